"""What an op is: a contract (its module's docstring), a torch reference, and the backends that compute the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


class Missing(str):
    """A reason why a backend cannot run that an installation can remove, and how."""


@dataclass(frozen=True)
class Backend:
    """One way to compute the functions of an op.

    Attributes:
        name: one of `choose.BACKEND_NAMES` (not "auto").
        load: imports what it needs and returns {function name: callable} for an op; called only once `why_not` found
            no reason.
        why_not: reason why it cannot run on (device, dtype) here, or None.
    """

    name: str
    load: Callable[[Op], Mapping[str, Callable[..., Any]]]
    why_not: Callable[[torch.device, torch.dtype], str | None] = lambda device, dtype: None


@dataclass(frozen=True)
class Op:
    """The functions that one choice decides together.

    Attributes:
        name: as `--ops` spells it; also the name of its module.
        reference: its functions in torch, which run everywhere and, if the op has a gradient, are differentiable.
        backends: preferred ones first; `TORCH` is always among them.
    """

    name: str
    reference: tuple[Callable[..., Any], ...]
    backends: tuple[Backend, ...]

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the functions."""
        return tuple(function.__name__ for function in self.reference)


TORCH = Backend("torch", lambda op: dict(zip(op.functions, op.reference)))
