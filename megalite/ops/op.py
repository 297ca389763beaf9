"""An op: a contract (its module's docstring), a torch reference, and the backends that implement it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


class Missing(str):
    """A reason why a backend cannot run that an installation would remove; says how."""


@dataclass(frozen=True)
class Backend:
    """One way to compute the functions of an op.

    Attributes:
        name: name of the backend, one of `choose.BACKEND_NAMES` except "auto".
        load: function that imports the backend and returns {function name: callable} of an op; called only if `why_not`
            returns None.
        why_not: function that returns why the backend cannot run on (device, dtype), or None.
        why_not_auto: function that returns why a backend that can run is only chosen when requested by name, or None.
    """

    name: str
    load: Callable[[Op], Mapping[str, Callable[..., Any]]]
    why_not: Callable[[torch.device, torch.dtype], str | None] = lambda device, dtype: None
    why_not_auto: Callable[[torch.device, torch.dtype], str | None] = lambda device, dtype: None


@dataclass(frozen=True)
class Op:
    """Functions that share a choice of backend.

    Attributes:
        name: name in `--ops`, and of the op's module.
        reference: functions in torch, which run everywhere and are differentiable if the op has a gradient.
        backends: backends in order of preference, always including `TORCH`.
    """

    name: str
    reference: tuple[Callable[..., Any], ...]
    backends: tuple[Backend, ...]

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the functions."""
        return tuple(function.__name__ for function in self.reference)


TORCH = Backend("torch", lambda op: dict(zip(op.functions, op.reference)))
