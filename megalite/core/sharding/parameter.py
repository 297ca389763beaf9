"""A local shard of a parameter, and the buffer that its gradient accumulates in."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from megalite.core.sharding.shard import Shard


class ShardedParameter(torch.nn.Parameter):
    """A local parameter with its shard, and the fp32 buffer of its gradient.

    Attributes:
        shard: the global parameter and this rank's shard of it.
        main_grad: gradient, fp32 or as `--grad-dtype`, a view into a bucket, which may allocate its memory on access.
        has_grad: whether `main_grad` holds contributions. If not, its content is undefined, and the next contribution
            overwrites it.
        before_grad, after_grad: callbacks of the bucket, before each access to `main_grad` and after each contribution.
        fp8: how its matrices are quantized wherever it is multiplied, a `Quantization`; None: it is read as it is.
        codes: what `--fp8` has computed from the weights; None once a bucket has changed or released them.
        uses: contributions to the gradient per micro-batch (2 for an embedding that is also the output layer).
        adds_to_main_grad: whether all layers that use it add to `main_grad` themselves and call `grad_added`. Otherwise
            autograd may leave the gradient in `.grad`, and the bucket moves it. (Fused norms add to `main_grad`, unless
            they are compiled, or the weight that they apply is computed from the parameter.)
    """

    shard: Shard
    has_grad: bool = False
    before_grad: Callable[[], None] | None = None
    after_grad: Callable[[], None] | None = None
    fp8: Any = None
    codes: Any = None
    uses: int
    adds_to_main_grad: bool
    _main_grad: torch.Tensor

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> ShardedParameter:
        param = super().__new__(cls, data, requires_grad)
        if not isinstance(param, cls):
            # torch keeps the class of a tensor subclass, such as a fake tensor: use a class that derives from both.
            param.__class__ = _joint_class(cls, type(param))
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
        """Report that a contribution has been added to `main_grad`."""
        self.has_grad = True
        if self.after_grad is not None:
            self.after_grad()

    def add_grad(self, grad: torch.Tensor) -> None:
        """Add a contribution to `main_grad`: `grad` has the parameter's shape and any float dtype."""
        (self.main_grad.add_ if self.has_grad else self.main_grad.copy_)(grad)
        self.grad_added()

    @classmethod
    def empty(
        cls, shard: Shard, dtype: torch.dtype, device: torch.device, adds_to_main_grad: bool = False
    ) -> ShardedParameter:
        """Make an uninitialized parameter of the shard's local shape."""
        param = cls(torch.empty(shard.shape, dtype=dtype, device=device))
        param.shard = shard
        param.uses = 1
        param.adds_to_main_grad = adds_to_main_grad
        return param


@lru_cache
def _joint_class(cls: type[ShardedParameter], kind: type[torch.Tensor]) -> type[ShardedParameter]:
    return type(f"{kind.__name__}{cls.__name__}", (kind, cls), {})
