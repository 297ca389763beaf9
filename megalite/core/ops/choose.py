"""The list of ops, and the choice of a backend for each.

The choice is passed explicitly as an `Ops` object: nothing is chosen at import, and there is no module-level state. A
backend requested by name that cannot run is an error, never a silent fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megalite.core.base.errors import UserError
from megalite.core.ops.op import Backend, Missing, Op

BACKEND_NAMES = ("auto", "torch", "triton", "cuda", "cpp", "onednn", "apex")
_NAMES = (
    "rmsnorm",
    "layernorm",
    "rope",
    "attention",
    "attend",
    "delta_rule",
    "causal_conv",
    "glu",
    "clamped_glu",
    "gelu",
    "dropout",
    "cross_entropy",
    "adamw",
    "l2_norm",
    "lamb",
    "stochastic_round",
    "matmul",
    "grouped",
    "combine",
)
# Every op by its name, in the order of the listing.
OPS: dict[str, Op] = {name: import_module(f"megalite.core.ops.{name}").OP for name in _NAMES}


@dataclass(frozen=True)
class Choice:
    """The backend chosen for an op, the reason, and (backend, reason) of the backends that cannot run."""

    op: str
    backend: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Ops:
    """The chosen implementation of every function. Contracts: modules of `megalite.core.ops`."""

    rmsnorm: Callable[..., Tensor]
    add_rmsnorm: Callable[..., tuple[Tensor, Tensor]]
    qk_rmsnorm: Callable[..., Tensor]
    layernorm: Callable[..., Tensor]
    add_layernorm: Callable[..., tuple[Tensor, Tensor]]
    rope: Callable[..., Tensor]
    rope_qkv: Callable[..., tuple[Tensor, Tensor, Tensor]]
    attention: Callable[..., Tensor]
    attend: Callable[..., tuple[Tensor, Tensor]]
    attend_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gated_delta_rule: Callable[..., Tensor]
    gated_delta_transition: Callable[..., Tensor]
    causal_conv: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    geglu: Callable[..., Tensor]
    clamped_swiglu: Callable[..., Tensor]
    gelu: Callable[..., Tensor]
    keep_mask: Callable[..., Tensor]
    cross_entropy_stats: Callable[..., Tensor]
    cross_entropy_grad_: Callable[..., Tensor]
    adamw: Callable[..., None]
    l2_norm: Callable[..., Tensor]
    lamb_direction: Callable[..., None]
    lamb_apply: Callable[..., None]
    segment_norms: Callable[..., Tensor]
    stochastic_round: Callable[..., None]
    linear: Callable[..., Tensor]
    linear_dgrad: Callable[..., Tensor]
    linear_wgrad: Callable[..., None]
    grouped_linear: Callable[..., Tensor]
    grouped_dgrad: Callable[..., Tensor]
    grouped_wgrad: Callable[..., None]
    spread_rows: Callable[..., Tensor]
    combine_rows: Callable[..., Tensor]
    choices: tuple[Choice, ...] = ()

    def describe(self) -> str:
        """Return one line for the log: `ops: triton: rmsnorm, …; torch: …`, and how to install missing backends."""
        by_backend: dict[str, list[str]] = {}
        for choice in self.choices:
            by_backend.setdefault(choice.backend, []).append(choice.op)
        parts = [f"{backend}: {', '.join(names)}" for backend, names in by_backend.items()]
        rejected = dict(pair for choice in self.choices for pair in choice.rejected)
        parts += [f"no {backend}: {reason}" for backend, reason in rejected.items() if isinstance(reason, Missing)]
        return "ops: " + "; ".join(parts)


def parse_spec(spec: str | None) -> dict[str, str]:
    """Parse `"triton,adamw=cuda"` into {op: backend} for every op; a bare backend applies to all ops not named.

    Raises:
        UserError: an unknown op or backend, or an op that has no such backend.
    """
    default, named = "auto", {}
    for item in (part.strip() for part in (spec or "").split(",")):
        if not item:
            continue
        name, _, backend = item.rpartition("=")
        if backend not in BACKEND_NAMES:
            raise UserError(f"--ops {spec}", f"unknown backend {backend!r}", f"use one of {', '.join(BACKEND_NAMES)}")
        if not name:
            default = backend
            continue
        if name not in OPS:
            raise UserError(f"--ops {spec}", f"unknown op {name!r}", f"use one of {', '.join(OPS)}")
        if backend != "auto" and backend not in {b.name for b in OPS[name].backends}:
            names = ", ".join(b.name for b in OPS[name].backends)
            raise UserError(f"--ops {spec}", f"{name} has no backend {backend}", f"use auto or one of {names}")
        named[name] = backend
    return {name: named.get(name, default) for name in OPS}


def choose(op: Op, wanted: str, device: torch.device, dtype: torch.dtype, spec: str | None) -> tuple[Choice, Backend]:
    """Choose an op's backend.

    "auto" is the first backend that can run. With a backend requested for every op ("triton"), ops without it (such as
    matmul) are chosen automatically, and the reason says so. A requested backend that cannot run is an error.
    """
    rejected: list[tuple[str, str]] = []
    is_requested = wanted in {b.name for b in op.backends}
    for backend in op.backends:
        if is_requested and backend.name != wanted:
            continue
        # In this order: importing Triton to know whether it can run takes a second that a CPU need not spend.
        reason = None if is_requested else backend.why_not_auto(device, dtype)
        reason = reason or backend.why_not(device, dtype)
        if reason is None:
            if is_requested:
                why = "requested"
            elif wanted == "auto":
                why = "first of " + " > ".join(b.name for b in op.backends) + " that can run here"
            else:
                why = f"this op has no {wanted} backend"
            return Choice(op.name, backend.name, why, tuple(rejected)), backend
        rejected.append((backend.name, reason))
        if is_requested:
            raise UserError(
                f"--ops {spec}",
                f"{op.name}={wanted} cannot run here ({reason})",
                f"use {op.name}=auto, or see `python -m megalite.core.ops`",
            )
    raise AssertionError(f"op {op.name} has no backend for every machine")


def resolve(spec: str | None, device: torch.device | str, dtype: torch.dtype) -> Ops:
    """Choose a backend for every op.

    Args:
        spec: None or "auto"; "torch"; "rmsnorm=triton,adamw=cuda"; "triton,adamw=torch" (bare name: all others).
        device: device of the tensors.
        dtype: dtype of the activations and parameters.

    Raises:
        UserError: an unknown name, or a backend requested by name that cannot run here.
    """
    device = torch.device(device)
    functions: dict[str, Callable[..., Any]] = {}
    choices = []
    for name, wanted in parse_spec(spec).items():
        choice, backend = choose(OPS[name], wanted, device, dtype, spec)
        functions |= backend.load(OPS[name])
        choices.append(choice)
    return Ops(**functions, choices=tuple(choices))
