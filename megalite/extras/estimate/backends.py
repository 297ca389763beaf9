"""The backends of the GPU that is asked about, whatever is installed on the machine that asks.

An estimate needs the shapes that a kernel makes, not the kernel: fake implementations of all of them are in
`megalite.core.parts.kernels.native`, without Triton or a compiled library.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest import mock

import torch

from megalite.core.ops import choose, grouped
from megalite.core.ops.op import Backend, Missing, Op
from megalite.core.parts.kernels import fused, native
from megalite.core.parts.quant import fp8


@contextmanager
def target_backends(spec: str | None) -> Iterator[None]:
    """Choose backends as on a GPU where `pip install megalite` was run: it has Triton and no compiled library.

    Args:
        spec: as `--ops`; for the ops that it sends to the CUDA library, the GPU's machine has built that.
    """
    by_name = choose.parse_spec(spec)
    target = {
        name: replace(op, backends=tuple(_on_target(backend, by_name[name], op) for backend in op.backends))
        for name, op in choose.OPS.items()
    }
    kernels = fp8.triton_kernels if _has_triton() else lambda module: _fake_kernels()
    with mock.patch.dict(choose.OPS, target), mock.patch.object(fp8, "triton_kernels", kernels):
        yield


def _on_target(backend: Backend, wanted: str, op: Op) -> Backend:
    if backend.name == "triton":
        return replace(backend, load=backend.load if _has_triton() else _load_fakes, why_not=_unless_missing(backend))
    if backend.name == "cuda" and op is not grouped.OP:  # whose kernels are torch's own
        reason = None if wanted == "cuda" else "assumed to be absent; name it with --ops"
        return replace(backend, why_not=lambda device, dtype: reason)
    return backend


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _unless_missing(backend: Backend) -> Callable[..., str | None]:
    """Return why a backend cannot run on a GPU where all that it needs is installed."""

    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        reason = backend.why_not(device, dtype)
        return None if isinstance(reason, Missing) else reason

    return why_not


def _load_fakes(op: Op) -> dict[str, Callable[..., Any]]:
    _fake_kernels()
    return fused.functions(op, "triton")


@lru_cache
def _fake_kernels() -> Any:
    """Define what the Triton kernels would, without implementations; return torch's operators of megalite."""
    for name in native.KERNELS:
        native.define(name, "triton_")
    return torch.ops.megalite
