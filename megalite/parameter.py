"""The parameter of a model on a rank: a tensor with its declaration and the way of its gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from megalite.sharding import Shard


class ShardedParameter(torch.nn.Parameter):
    """A local parameter that knows what it is a shard of, and where its gradient goes.

    Attributes:
        shard: the declaration and this rank's cut of it.
        main_grad: fp32 gradient, a view into a bucket; set by the gradient buffer, which may make memory at a use.
        has_grad: whether `main_grad` holds a contribution that the next one is added to. If not, it holds anything, and
            the next contribution overwrites it.
        before_grad, after_grad: called before each use of `main_grad`, and after each contribution; set by the gradient
            buffer.
        uses: contributions to the gradient in one micro-batch (2 for an embedding that is also the output layer).
        adds_to_main_grad: all that uses it adds its gradient to `main_grad` itself and calls `grad_added`. Otherwise
            autograd may leave it in `.grad`, from where the buffer moves it: fused norms add it themselves, unless
            they are compiled or what they scale by is computed from it.
    """

    shard: Shard
    has_grad: bool = False
    before_grad: Callable[[], None] | None = None
    after_grad: Callable[[], None] | None = None
    uses: int
    adds_to_main_grad: bool
    _main_grad: torch.Tensor

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> ShardedParameter:
        param = super().__new__(cls, data, requires_grad)
        if not isinstance(param, cls):
            # torch leaves a tensor of another class, such as a fake one, as it is: it becomes both.
            param.__class__ = _also(cls, type(param))
        return param

    @property
    def main_grad(self) -> torch.Tensor:
        if self.before_grad is not None:
            self.before_grad()
        return self._main_grad

    @main_grad.setter
    def main_grad(self, view: torch.Tensor) -> None:
        self._main_grad = view

    def grad_added(self) -> None:
        """Note that a contribution is in `main_grad`."""
        self.has_grad = True
        if self.after_grad is not None:
            self.after_grad()

    def add_grad(self, grad: torch.Tensor) -> None:
        """Contribute `grad`, of the parameter's shape and any float type, to `main_grad`."""
        (self.main_grad.add_ if self.has_grad else self.main_grad.copy_)(grad)
        self.grad_added()

    @classmethod
    def empty(
        cls, shard: Shard, dtype: torch.dtype, device: torch.device, adds_to_main_grad: bool = False
    ) -> ShardedParameter:
        """An uninitialised parameter of the shard's local shape."""
        param = cls(torch.empty(shard.shape, dtype=dtype, device=device))
        param.shard, param.uses, param.adds_to_main_grad = shard, 1, adds_to_main_grad
        return param


@lru_cache
def _also(cls: type[ShardedParameter], kind: type[torch.Tensor]) -> type[ShardedParameter]:
    return type(f"{kind.__name__}{cls.__name__}", (kind, cls), {})
