"""Registry of fused ops: every op is a page (contract, torch reference, backends); `resolve` makes one choice per op.

The choice is explicit and passed on as an `Ops` object: nothing is chosen at import, there is no module-level state.
A backend asked for by name that cannot run here is an error, never a silent fallback.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.errors import UserError

BACKEND_NAMES = ("auto", "torch", "triton", "cuda", "cpp", "apex")


@dataclass(frozen=True)
class Backend:
    """One way to compute a page's functions.

    Attributes:
        name: one of `BACKEND_NAMES` (not "auto").
        load: imports what it needs and returns {function name: callable}; called only once `why_not` found no reason.
        why_not: reason why it cannot run on (device, dtype) here, or None.
    """

    name: str
    load: Callable[[], Mapping[str, Callable[..., Any]]]
    why_not: Callable[[torch.device, torch.dtype], str | None] = lambda device, dtype: None


@dataclass(frozen=True)
class Page:
    """An op: the functions one choice decides together, and its backends, the automatic choice's favourite first."""

    name: str
    functions: tuple[str, ...]
    backends: tuple[Backend, ...]


def _why_no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"for fp32, bf16 and fp16, not {dtype}"
    from triton import knobs

    if device.type == "cpu" and not knobs.runtime.interpret:
        return "on CPU only under Triton's interpreter (TRITON_INTERPRET=1)"
    return None if device.type in ("cpu", "cuda") else f"for CUDA tensors, not {device.type}"


def triton_backend(module: str, *functions: str) -> Backend:
    """The Triton backend of a page: `functions` of `megalite.ops.triton.<module>`, imported when chosen."""

    def load() -> dict[str, Callable[..., Any]]:
        kernels = importlib.import_module(f"megalite.ops.triton.{module}")
        return {name: getattr(kernels, name) for name in functions}

    return Backend("triton", load, _why_no_triton)


@dataclass(frozen=True)
class Choice:
    """What was chosen for a page and why; `rejected` holds (backend, reason) of those that could not run."""

    page: str
    backend: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Ops:
    """The chosen implementation of every op. Contracts: the page modules of the same names in `megalite.ops`."""

    rmsnorm: Callable[..., Tensor]
    add_rmsnorm: Callable[..., tuple[Tensor, Tensor]]
    layernorm: Callable[..., Tensor]
    add_layernorm: Callable[..., tuple[Tensor, Tensor]]
    rope: Callable[..., Tensor]
    rope_qkv: Callable[..., tuple[Tensor, Tensor, Tensor]]
    attention: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    geglu: Callable[..., Tensor]
    bias_gelu: Callable[..., Tensor]
    cross_entropy_stats: Callable[..., Tensor]
    cross_entropy_grad_: Callable[..., Tensor]
    adamw: Callable[..., None]
    l2_norm: Callable[..., Tensor]
    lamb_direction: Callable[..., None]
    lamb_apply: Callable[..., None]
    segment_norms: Callable[..., Tensor]
    wgrad_accumulate: Callable[..., None]
    choices: tuple[Choice, ...] = ()

    def describe(self) -> str:
        """One line for the log: `ops: rmsnorm=triton, …`, pages of equal choice together."""
        by_backend: dict[str, list[str]] = {}
        for choice in self.choices:
            by_backend.setdefault(choice.backend, []).append(choice.page)
        return "ops: " + "; ".join(f"{backend}: {', '.join(pages)}" for backend, pages in by_backend.items())


def pages() -> tuple[Page, ...]:
    """Every op's page, in the order of the listing."""
    from megalite.ops import (
        adamw,
        attention,
        bias_gelu,
        cross_entropy,
        glu,
        l2_norm,
        lamb,
        layernorm,
        rmsnorm,
        rope,
        wgrad,
    )

    modules = (rmsnorm, layernorm, rope, attention, glu, bias_gelu, cross_entropy, adamw, l2_norm, lamb, wgrad)
    return tuple(module.PAGE for module in modules)


def parse_spec(spec: str | None, known: Mapping[str, Page]) -> dict[str, str]:
    """`"triton,adamw=cuda"` -> {page: backend} for every page; a bare backend is the default of the pages not named.

    Raises:
        UserError: an unknown op or backend, or an op that has no such backend.
    """
    default, named = "auto", {}
    for item in (part.strip() for part in (spec or "").split(",")):
        if not item:
            continue
        page, _, backend = item.rpartition("=")
        if backend not in BACKEND_NAMES:
            raise UserError(f"--ops {spec}", f"{backend!r} is no backend", f"use one of {', '.join(BACKEND_NAMES)}")
        if not page:
            default = backend
            continue
        if page not in known:
            raise UserError(f"--ops {spec}", f"{page!r} is no op", f"use one of {', '.join(known)}")
        if backend != "auto" and backend not in {b.name for b in known[page].backends}:
            have = ", ".join(b.name for b in known[page].backends)
            raise UserError(f"--ops {spec}", f"{page} has no backend {backend}", f"use auto or one of {have}")
        named[page] = backend
    return {name: named.get(name, default) for name in known}


def choose(
    page: Page, wanted: str, device: torch.device, dtype: torch.dtype, spec: str | None
) -> tuple[Choice, Backend]:
    """Pick a page's backend.

    "auto" takes the first that can run. A backend wanted by name for every op ("triton") leaves a page that does not
    have it (wgrad, say) to the automatic choice and the reason says so; wanted and unable to run is an error.
    """
    rejected: list[tuple[str, str]] = []
    has_it = wanted in {b.name for b in page.backends}
    for backend in page.backends:
        if has_it and backend.name != wanted:
            continue
        reason = backend.why_not(device, dtype)
        if reason is None and not has_it and backend.name == "triton" and device.type == "cpu":
            reason = "the interpreter is slow: only when asked for by name"
        if reason is None:
            if has_it:
                why = "asked for"
            elif wanted == "auto":
                why = "first of " + " > ".join(b.name for b in page.backends) + " that can run here"
            else:
                why = f"this op has no {wanted} backend"
            return Choice(page.name, backend.name, why, tuple(rejected)), backend
        rejected.append((backend.name, reason))
        if has_it:
            raise UserError(
                f"--ops {spec}",
                f"{page.name}={wanted} cannot run here ({reason})",
                f"use {page.name}=auto, or see `python -m megalite.ops`",
            )
    raise AssertionError(f"page {page.name} has no backend for every machine")


def resolve(spec: str | None, device: torch.device | str, dtype: torch.dtype) -> Ops:
    """Choose a backend for every op.

    Args:
        spec: None or "auto"; "torch"; "rmsnorm=triton,adamw=cuda"; "triton,adamw=torch" (bare name: for all others).
        device: where the tensors will live.
        dtype: dtype of the activations (parameters of the model).

    Raises:
        UserError: an unknown name, or a backend asked for by name that cannot run here.
    """
    device = torch.device(device)
    known = {page.name: page for page in pages()}
    functions: dict[str, Callable[..., Any]] = {}
    choices = []
    for name, wanted in parse_spec(spec, known).items():
        choice, backend = choose(known[name], wanted, device, dtype, spec)
        implementations = backend.load()
        functions.update({function: implementations[function] for function in known[name].functions})
        choices.append(choice)
    return Ops(**functions, choices=tuple(choices))
