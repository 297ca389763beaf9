"""ZeRO-3: the weights of a unit are gathered while it runs, and sharded otherwise.

Before a unit's forward pass its weights are gathered, and the next unit's gather starts; afterwards they are released.
An identity node on the unit's output gathers them again when the backward pass reaches it, and one on its input
releases them when the backward pass leaves. Weight gradients that a split backward pass defers need no weights, nor
does the backward pass of an embedding, whose input has no gradient. All of this happens in module hooks, outside of
what torch.compile traces. Weights that are only multiplied in FP8 may come as codes (`weight_codes.py`). Source:
Rajbhandari et al. 2019, section 5.3; prefetch as in PyTorch FSDP (Zhao et al. 2023, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from megalite.core.optim.bucket import Bucket
from megalite.core.sharding.parameter import ShardedParameter

Keep = Literal["none", "backward", "step"]
Holder = Literal["F", "B", "kept"]
"""What needs the weights of a unit: a forward pass, a backward pass, maybe beside it, or a backward pass to come."""


@dataclass(eq=False)
class _Unit:
    """A module with sharded weights.

    Attributes:
        name: name of its first parameter.
        buckets: buckets of its weights; that of a tied embedding belongs to two units.
        previous, next: neighbors in its chain.
        holders: what its weights are in use by, or prefetched for.
        differentiable: whether a backward pass follows its forward pass.
    """

    name: str
    buckets: list[Bucket]
    previous: _Unit | None = None
    next: _Unit | None = None
    holders: set[Holder] = field(default_factory=set)
    differentiable: bool = False


class UnitWeights:
    """Gathers and releases the weights of this rank's units.

    Args:
        chains: units of this rank's stages, in forward order; each is prefetched by the one before it in its chain.
        buckets: buckets of this rank; those without sharded weights are ignored.
        keep: how long gathered weights are kept: while their unit runs ("none"), from its forward to its backward pass
            ("backward"), or until the end of the step ("step").
        prefetch: gather the weights of the next unit while one runs.
        debug: raise an error when released weights are used.
    """

    def __init__(
        self,
        chains: Iterable[Sequence[nn.Module]],
        buckets: Sequence[Bucket],
        *,
        keep: Keep = "none",
        prefetch: bool = True,
        debug: bool = False,
    ) -> None:
        self.keep, self.prefetch = keep, prefetch
        bucket_of = {id(param): bucket for bucket in buckets if bucket.sharded.weights for param in bucket.params}
        self._users: dict[Bucket, list[_Unit]] = {}
        self._units: list[_Unit] = []
        for modules in chains:
            previous = None
            for module in modules:
                used = list(dict.fromkeys(bucket_of[id(p)] for p in module.parameters() if id(p) in bucket_of))
                if used:
                    previous = self._add(module, used, previous)
        if debug:
            for bucket in self._users:
                for param in bucket.params:
                    param.__class__ = GuardedParameter

    def _add(self, module: nn.Module, buckets: list[Bucket], previous: _Unit | None) -> _Unit:
        unit = _Unit(buckets[0].params[-1].shard.spec.name, buckets, previous)
        if previous is not None:
            previous.next = unit
        self._units.append(unit)
        for bucket in buckets:
            self._users.setdefault(bucket, []).append(unit)
        module.register_forward_pre_hook(lambda _, args: self._before_forward(unit, args))
        module.register_forward_hook(lambda _, args, out: self._after_forward(unit, out))
        return unit

    def start_pass(self) -> None:
        """Release weights that an interrupted pass has left gathered; the next gathers send them as they are now."""
        for unit in self._units:
            if unit.holders:
                self._release(unit)
        self._forget_codes()

    def end_pass(self) -> None:
        """Release weights that are kept until the end of a step or an evaluation.

        Raises:
            RuntimeError: other weights are still gathered; an update would not reach them.
        """
        if self.keep == "step":
            for unit in self._units:
                self._release(unit)
        remaining = [
            unit.name for unit in self._units if unit.holders or any(bucket.store.gathered for bucket in unit.buckets)
        ]
        if remaining:
            raise RuntimeError(f"weights not released after the pass: units of {', '.join(remaining)}")
        self._forget_codes()

    def _forget_codes(self) -> None:
        for bucket in self._users:
            bucket.store.forget_codes()

    def _before_forward(self, unit: _Unit, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if _recomputes():
            return None
        self._gather("F", unit, unit.next)
        x = args[0]
        unit.differentiable = torch.is_grad_enabled() and x.requires_grad
        return (_InBackward.apply(x, partial(self.leave_backward, unit)), *args[1:]) if unit.differentiable else None

    def _after_forward(self, unit: _Unit, out: torch.Tensor) -> torch.Tensor | None:
        if _recomputes():
            return None
        if self.keep == "step" or (self.keep == "backward" and unit.differentiable):
            unit.holders.add("kept")
        self._release(unit, "F")
        return _InBackward.apply(out, partial(self.enter_backward, unit)) if unit.differentiable else None

    def enter_backward(self, unit: _Unit) -> None:
        """Gather the weights of a unit for its backward pass."""
        previous = unit.previous
        self._gather("B", unit, previous if previous is not None and previous.differentiable else None)

    def leave_backward(self, unit: _Unit) -> None:
        """Release the weights of a unit after its backward pass."""
        self._release(unit, "B")
        if self.keep == "backward":
            self._release(unit, "kept")

    def _gather(self, holder: Holder, unit: _Unit, following: _Unit | None) -> None:
        for needed in (unit, following if self.prefetch else None):
            if needed is not None:
                needed.holders.add(holder)
                for bucket in needed.buckets:
                    if not bucket.store.gathered:
                        bucket.store.gather()
        for bucket in unit.buckets:
            bucket.store.wait()

    def _release(self, unit: _Unit, *holders: Holder) -> None:
        """Release weights that nothing else holds than these holders, all by default."""
        unit.holders.difference_update(holders or ("F", "B", "kept"))
        for bucket in unit.buckets:
            if not any(user.holders for user in self._users[bucket]):
                bucket.store.release()


def _recomputes() -> bool:
    """Whether this is within a backward pass, where weights are gathered and a forward pass is a repeated one."""
    return torch._C._current_graph_task_id() != -1


class _InBackward(torch.autograd.Function):
    """Identity that calls `action` in the backward pass: first there for a unit's output, last for its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, action: Callable[[], None]) -> torch.Tensor:
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.action()
        return grad, None


# Methods that are allowed on released weights; properties are too.
_HARMLESS = {"numel", "size", "dim", "stride", "element_size", "untyped_storage", "is_contiguous", "register_hook"}


class GuardedParameter(ShardedParameter):
    """A parameter that raises an error when it is read while released (`--debug-zero`)."""

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name not in _HARMLESS and name not in ("__get__", "__set__"):
                for x in args:
                    for param in x if isinstance(x, list | tuple) else (x,):
                        if isinstance(param, GuardedParameter) and not param.untyped_storage().nbytes():
                            spec = param.shard.spec
                            raise RuntimeError(f"{name} reads {spec.name}, whose weights are released")
            return func(*args, **(kwargs or {}))
