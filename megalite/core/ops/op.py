"""An op: a contract (its module's docstring), a torch reference, and the backends that implement it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
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


def _of(module: str, name: str, part: str = "") -> Backend:
    """Return a backend of a module of `core.parts.kernels`, which is imported when the backend is first asked.

    Args:
        module: module whose `BACKENDS` has it.
        name: name of the backend.
        part: which of its kernels, where they are in several modules.
    """

    @lru_cache(maxsize=1)
    def found() -> Backend:
        backend: Backend = import_module(f"megalite.core.parts.kernels.{module}").BACKENDS[name](part)
        return backend

    return Backend(
        name,
        lambda op: found().load(op),
        lambda device, dtype: found().why_not(device, dtype),
        lambda device, dtype: found().why_not_auto(device, dtype),
    )


def triton(part: str) -> Backend:
    """Return the backend of the Triton kernels in one module."""
    return _of("fused", "triton", part)


def apex(part: str) -> Backend:
    """Return the backend of one of apex's extensions."""
    return _of("apex", "apex", part)


CPP = _of("fused", "cpp")
CUDA = _of("fused", "cuda")
ONEDNN = _of("onednn", "onednn")
