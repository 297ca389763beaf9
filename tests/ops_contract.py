"""Numerical contract of every op against plain float64 formulas, on whatever backends are chosen.

Besides the error: memory that an op fails to write is NaN (deterministic mode fills it), memory next to what an
in-place op may write must not change, and a second call must give the same bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.core.batch import Documents, Mask
from megalite.core.ops import Ops
from megalite.core.ops.bands import Band
from megalite.core.ops.cross_entropy import combine_stats

# Relative L2 error against float64. bf16: rounding of inputs' products to 8 bits (2^-9) a few times over.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
_GUARD = 64
# Its tests, for another process in which other backends are chosen.
CONTRACT = [str(Path(__file__).parent / "unit" / "ops" / name) for name in ("test_backends.py", "test_registered.py")]


@dataclass(frozen=True)
class Case:
    """One op on one set of inputs.

    Attributes:
        inputs: generator -> tensors; float64 ones are rounded to the dtype under test, others are taken as they are.
        run: (ops, inputs) -> outputs.
        oracle: inputs in float64 -> the outputs they should be.
        differentiate: also compare the gradients with respect to every float64 input.
    """

    name: str
    inputs: Callable[..., Sequence[Tensor]]
    run: Callable[..., Sequence[Tensor]]
    oracle: Callable[..., Sequence[Tensor]]
    differentiate: bool = True


@dataclass(frozen=True)
class Result:
    """Largest relative error over a case's outputs and gradients; `fault` names another broken rule."""

    case: str
    error: float
    limit: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit (NaN is not) and there is no fault."""
        return self.error <= self.limit and not self.fault


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w


def _layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w + b


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[1]
    c, s = cos[:, None, None], sin[:, None, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    if approximate == "none":
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _halves(packed: Tensor, activation: Callable[[Tensor], Tensor]) -> tuple[Tensor]:
    width = packed.shape[-1] // 2
    return (activation(packed[..., :width]) * packed[..., width:],)


def _clamped_swiglu(packed: Tensor) -> Tensor:
    width = packed.shape[-1] // 2
    gate, up = packed[..., :width].clamp(max=7), packed[..., width:].clamp(-7, 7)
    return gate * (1.702 * gate).sigmoid() * (up + 1)


def _randn(g: torch.Generator, *shape: int, strided: bool = False) -> Tensor:
    """Normal numbers; `strided`: every second element of the last but one dim of something larger."""
    if not strided:
        return torch.randn(*shape, generator=g, dtype=torch.float64, device=g.device)
    return torch.randn(*shape[:-2], 2 * shape[-2], shape[-1], generator=g, dtype=torch.float64, device=g.device)[
        ..., ::2, :
    ]


_NORMS: tuple[tuple[str, Callable[..., Sequence[Tensor]], Callable[..., Sequence[Tensor]]], ...] = (
    ("rmsnorm", lambda o, x, r, w, b: (o.rmsnorm(x, w, 1e-5),), lambda x, r, w, b: (_rms(x, w),)),
    ("add_rmsnorm", lambda o, x, r, w, b: o.add_rmsnorm(x, r, w, 1e-5), lambda x, r, w, b: (_rms(x + r, w), x + r)),
    ("layernorm", lambda o, x, r, w, b: (o.layernorm(x, w, b, 1e-5),), lambda x, r, w, b: (_layer(x, w, b),)),
    (
        "add_layernorm",
        lambda o, x, r, w, b: o.add_layernorm(x, r, w, b, 1e-5),
        lambda x, r, w, b: (_layer(x + r, w, b), x + r),
    ),
)


def _norm_cases() -> Iterator[Case]:
    for shape, strided in (
        ((5, 3, 64), False),
        ((4, 2, 37), False),
        ((1, 1, 1), False),
        ((0, 2, 16), False),
        ((3, 4, 257), True),
    ):

        def inputs(g: torch.Generator, shape: Any = shape, strided: bool = strided) -> list[Tensor]:
            x, residual = _randn(g, *shape, strided=strided), _randn(g, *shape)
            return [x, residual, _randn(g, shape[-1]), _randn(g, shape[-1])]

        for name, run, oracle in _NORMS:
            # A norm over one element is constant: its gradient is nothing but cancellation.
            label = f"{name} {list(shape)}{' strided' if strided else ''}"
            yield Case(label, inputs, run, oracle, differentiate=shape[-1] > 1)


def _qk_norm_cases() -> Iterator[Case]:
    for shape, heads, kv in (((5, 3, 8, 16), 4, 2), ((3, 1, 9, 37), 3, 3), ((1, 1, 3, 2), 1, 1), ((0, 2, 4, 8), 2, 1)):

        def inputs(g: torch.Generator, shape: Any = shape) -> list[Tensor]:
            return [_randn(g, *shape), _randn(g, shape[-1]), _randn(g, shape[-1])]

        yield Case(
            f"qk_rmsnorm {list(shape)} of {heads}+2*{kv} heads",
            inputs,
            lambda o, x, q, k, n=heads, g=kv: (o.qk_rmsnorm(x, q, k, 1e-5, n, g),),
            lambda x, q, k, n=heads, g=kv: (
                torch.cat((_rms(x[:, :, :n], q), _rms(x[:, :, n : n + g], k), x[:, :, n + g :]), dim=2),
            ),
        )


def _rope_cases() -> Iterator[Case]:
    for seq, batch, heads, kv, width, rotated in ((5, 3, 4, 2, 16, 16), (3, 1, 3, 3, 10, 4), (1, 1, 1, 1, 2, 2)):
        label = f"[{seq}, {batch}, {heads}+2*{kv}, {width}] rotated {rotated}"

        def inputs(
            g: torch.Generator, shape: Any = (seq, batch, heads + 2 * kv, width), r: int = rotated
        ) -> list[Tensor]:
            angle = _randn(g, shape[0], r // 2)
            return [_randn(g, *shape), angle.cos().float(), angle.sin().float()]

        yield Case(
            f"rope_qkv {label}",
            inputs,
            lambda o, x, c, s, h=heads, k=kv: o.rope_qkv(x.clone(), c, s, h, k),
            lambda x, c, s, h=heads, k=kv: (
                _rotate(x[:, :, :h], c, s),
                _rotate(x[:, :, h : h + k], c, s),
                x[:, :, h + k :],
            ),
        )
        yield Case(
            f"rope {label}",
            inputs,
            lambda o, x, c, s: (o.rope(x.transpose(0, 1).contiguous().transpose(0, 1), c, s),),
            lambda x, c, s: (_rotate(x, c, s),),
        )


def _weighed(ops: Ops, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    w = weights.float()
    return ops.swiglu(x, w), ops.clamped_swiglu(x, w), ops.geglu(x, "tanh", w), ops.gelu(x, weights=w)


def _activation_cases() -> Iterator[Case]:
    for shape, strided in (
        ((4, 2, 96), False),
        ((3, 3, 74), False),
        ((1, 1, 2), False),
        ((0, 6), False),
        ((2, 3, 34), True),
    ):
        label = f"{list(shape)}{' strided' if strided else ''}"

        def inputs(g: torch.Generator, shape: Any = shape, strided: bool = strided) -> list[Tensor]:
            return [_randn(g, *shape, strided=strided) * 3]

        yield Case(
            f"swiglu {label}",
            inputs,
            lambda o, x: (o.swiglu(x),),
            lambda x: _halves(x, lambda g: g * g.sigmoid()),
        )
        yield Case(
            f"clamped_swiglu {label}",
            # Not by the op's caller in bf16: near up = -1 what that rounds off is much of up + 1.
            lambda g, inputs=inputs: [inputs(g)[0] * 3],
            lambda o, x: (o.clamped_swiglu(x),),
            lambda x: (_clamped_swiglu(x),),
        )
        yield Case(
            f"weighed activations {label}",
            lambda g, shape=shape, inputs=inputs: [inputs(g)[0], _randn(g, *shape[:-1])],
            _weighed,
            lambda x, w: (
                _halves(x, lambda g: g * g.sigmoid())[0] * w[..., None],
                _clamped_swiglu(x) * w[..., None],
                _halves(x, lambda g: _gelu(g, "tanh"))[0] * w[..., None],
                _gelu(x, "none") * w[..., None],
            ),
            differentiate=shape[-1] > 2,  # of one element, the gradients of the four cancel
        )
        for kind in ("none", "tanh"):
            yield Case(
                f"geglu {kind} {label}",
                inputs,
                lambda o, x, kind=kind: (o.geglu(x, kind),),
                lambda x, kind=kind: _halves(x, lambda g: _gelu(g, kind)),
            )
            yield Case(
                f"gelu {kind} {label}",
                inputs,
                lambda o, x, kind=kind: (o.gelu(x, kind),),
                lambda x, kind=kind: (_gelu(x, kind),),
            )


def _cross_entropy(ops: Ops, wide: Tensor, target: Tensor, scale: Tensor, real: int) -> tuple[Tensor, Tensor]:
    """Two ranks' slices of one logits buffer; the second ends in padding, and guard columns surround both."""
    guard = torch.full((wide.shape[0], _GUARD), 7.0, dtype=wide.dtype, device=wide.device)
    buffer = torch.cat((guard, wide, guard), dim=1)
    logits = buffer[:, _GUARD:-_GUARD]
    half = logits.shape[1] // 2
    left, right = logits[:, :half], logits[:, half:]
    stats = [ops.cross_entropy_stats(left, target, 0), ops.cross_entropy_stats(right, target, half, real - half)]
    lse, target_logit = combine_stats(torch.stack(stats))
    ops.cross_entropy_grad_(left, target, 0, lse, scale)
    ops.cross_entropy_grad_(right, target, half, lse, scale, real - half)
    if not (buffer[:, :_GUARD] == 7.0).all() or not (buffer[:, -_GUARD:] == 7.0).all():
        raise _FaultError("wrote outside its columns")
    return lse - target_logit, logits


def _cross_entropy_oracle(wide: Tensor, target: Tensor, scale: Tensor, real: int) -> tuple[Tensor, Tensor]:
    wide = wide.detach().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(wide[:, :real], target, reduction="none")
    (grad,) = torch.autograd.grad(loss, wide, scale.double())
    return loss.detach(), grad


def _cross_entropy_cases() -> Iterator[Case]:
    for rows, columns, padding in ((7, 64, 0), (5, 130, 3), (1, 2, 0), (0, 8, 2)):
        real = columns - padding

        def inputs(g: torch.Generator, rows: int = rows, columns: int = columns, real: int = real) -> list[Tensor]:
            target = torch.randint(real, (rows,), generator=g, device=g.device)
            return [_randn(g, rows, columns) * 3, target, _randn(g, rows).float()]

        yield Case(
            f"cross_entropy [{rows}, {columns}] padding {padding}",
            inputs,
            lambda o, x, t, s, real=real: _cross_entropy(o, x, t, s, real),
            lambda x, t, s, real=real: _cross_entropy_oracle(x, t, s, real),
            differentiate=False,
        )


class _FaultError(Exception):
    pass


def _guarded(tensors: Sequence[Tensor], offset: int) -> tuple[list[Tensor], Callable[[], None]]:
    """Copies inside larger buffers (at `offset`, so also unaligned), and a check that the surroundings are intact."""
    buffers = [torch.full((offset + len(t) + _GUARD,), 7.0, dtype=t.dtype, device=t.device) for t in tensors]
    views = [buffer[offset : offset + len(t)].copy_(t) for buffer, t in zip(buffers, tensors)]

    def check() -> None:
        for buffer, t in zip(buffers, tensors):
            if not (buffer[:offset] == 7.0).all() or not (buffer[offset + len(t) :] == 7.0).all():
                raise _FaultError("wrote outside its buffer")

    return views, check


_HYPER: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}


def _adamw(ops: Ops, offset: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor, mult: Tensor) -> Sequence[Tensor]:
    (p, g, m, v, out), check = _guarded((p, g, m, v, torch.full_like(g, float("nan"))), offset)
    ops.adamw(p, g, m, v, out, lr=0.01, grad_multiplier=mult, **_HYPER)
    check()
    return p, m, v, out


def _adamw_oracle(p: Tensor, g: Tensor, m: Tensor, v: Tensor, mult: Tensor) -> Sequence[Tensor]:
    g = g * mult
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    p = p * (1 - 0.01 * 0.1) - 0.01 * (m / (1 - 0.9**3)) / ((v / (1 - 0.95**3)).sqrt() + 1e-8)
    return p, m, v, p


def _lamb(ops: Ops, offset: int, p: Tensor, g: Tensor, m: Tensor, v: Tensor, mult: Tensor) -> Sequence[Tensor]:
    (p, g, m, v, out), check = _guarded((p, g, m, v, torch.full_like(g, float("nan"))), offset)
    update = torch.empty_like(p)
    offsets = (0, len(p) // 3, len(p) // 3, len(p))
    ops.lamb_direction(p, g, m, v, update, grad_multiplier=mult, **_HYPER)
    ratios = ops.segment_norms(p, offsets) / ops.segment_norms(update, offsets).clamp_min(1e-30)
    ops.lamb_apply(p, update, out, ratios, offsets, 0.01)
    check()
    return p, m, v, out


def _lamb_oracle(p: Tensor, g: Tensor, m: Tensor, v: Tensor, mult: Tensor) -> Sequence[Tensor]:
    g = g * mult
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    update = (m / (1 - 0.9**3)) / ((v / (1 - 0.95**3)).sqrt() + 1e-8) + 0.1 * p
    cut = len(p) // 3
    parts = zip((p[:cut], p[cut:]), (update[:cut], update[cut:]))
    p = torch.cat([a - 0.01 * a.norm() / u.norm().clamp_min(1e-30) * u for a, u in parts])
    return p, m, v, p


def _l2_norm(ops: Ops, p: Tensor, g: Tensor, *rest: Tensor) -> tuple[Tensor]:
    return (ops.l2_norm(g),)


def _l2_norm_oracle(p: Tensor, g: Tensor, *rest: Tensor) -> tuple[Tensor]:
    return (g.square().sum().sqrt(),)


def _at_offset(run: Callable[..., Sequence[Tensor]], offset: int, ops: Ops, *args: Tensor) -> Sequence[Tensor]:
    return run(ops, offset, *args)


def _flat_cases() -> Iterator[Case]:
    for n, offset in ((4099, 0), (4096, 32), (1000, 1), (1, 0), (0, 0)):

        def inputs(g: torch.Generator, n: int = n) -> list[Tensor]:
            state = [_randn(g, n).float(), _randn(g, n), _randn(g, n).float(), _randn(g, n).square().float()]
            return [*state, torch.tensor(0.37, device=g.device)]

        for name, run, oracle in (("adamw", _adamw, _adamw_oracle), ("lamb", _lamb, _lamb_oracle)):
            at_offset = functools.partial(_at_offset, run, offset)
            yield Case(f"{name} [{n}] at {offset}", inputs, at_offset, oracle, differentiate=False)
        yield Case(f"l2_norm [{n}]", inputs, _l2_norm, _l2_norm_oracle, differentiate=False)


def _matmul(ops: Ops, main_grad: Tensor, dy: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    main_grad, y, dx = main_grad.clone(), torch.full_like(dy, float("nan")), torch.full_like(x, float("nan"))
    ops.linear_wgrad(main_grad, dy, x)
    first = torch.full_like(main_grad, float("nan"))
    ops.linear_wgrad(first, dy, x, accumulate=False)
    ops.linear(x, w, out=y)
    ops.linear_dgrad(dy, w, out=dx)
    # With more dimensions than two, and without buffers.
    rows = [t.view(-1, 1, t.shape[-1]) for t in (x, dy)]
    ops.linear_wgrad(main_grad, rows[1], rows[0])
    return main_grad, first, y, dx, ops.linear(rows[0], w, b), ops.linear(rows[0], w), ops.linear_dgrad(rows[1], w)


def _matmul_oracle(main_grad: Tensor, dy: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y, dx = x @ w.t(), dy @ w
    return main_grad + 2 * dy.t() @ x, dy.t() @ x, y, dx, (y + b)[:, None], y[:, None], dx[:, None]


def _matmul_cases() -> Iterator[Case]:
    for rows, out, width in ((5, 8, 16), (3, 7, 5), (0, 4, 4)):

        def inputs(g: torch.Generator, rows: int = rows, out: int = out, width: int = width) -> list[Tensor]:
            shapes = ((rows, out), (rows, width), (out, width), (out,))
            return [_randn(g, out, width).float(), *(_randn(g, *shape) for shape in shapes)]

        label = f"matmul [{rows}, {out}] x [{rows}, {width}]"
        yield Case(label, inputs, _matmul, _matmul_oracle, differentiate=False)


def _grouped(sizes: list[int], ops: Ops, main_grad: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    main_grad, first = main_grad.clone(), torch.full_like(main_grad, torch.nan)
    ops.grouped_wgrad(first, dy, x, sizes, accumulate=False)
    ops.grouped_wgrad(main_grad, dy, x, sizes)
    return ops.grouped_linear(x, w, sizes), ops.grouped_dgrad(dy, w, sizes), main_grad, first


def _grouped_oracle(sizes: list[int], main_grad: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    parts = list(zip(dy.split(sizes), x.split(sizes), w))
    wgrad = torch.stack([dy_e.t() @ x_e for dy_e, x_e, _ in parts])
    y, dx = torch.cat([x_e @ w_e.t() for _, x_e, w_e in parts]), torch.cat([dy_e @ w_e for dy_e, _, w_e in parts])
    return y, dx, main_grad + wgrad, wgrad


def _grouped_cases() -> Iterator[Case]:
    # Groups of none, of one row, of exactly a kernel's 128 and of more; widths of more than a tile, and of odd sizes.
    for sizes, out, width in (([3, 0, 128, 1, 0], 136, 72), ([0, 131], 5, 67), ([0, 0], 8, 16)):

        def inputs(g: torch.Generator, n: int = sum(sizes), e: int = len(sizes), o: int = out, i: int = width) -> Any:
            return [_randn(g, e, o, i).float(), _randn(g, n, o), _randn(g, n, i), _randn(g, e, o, i)]

        run, oracle = functools.partial(_grouped, sizes), functools.partial(_grouped_oracle, sizes)
        yield Case(f"grouped {sizes} {out} x {width}", inputs, run, oracle, differentiate=False)


def _combine_cases() -> Iterator[Case]:
    """Slots of 5 tokens by expert; a third of them elsewhere, as where other ranks hold their experts, and none."""
    for k, here, width, weighed in ((2, 10, 6, True), (3, 10, 7, True), (3, 10, 1030, False), (2, 0, 6, True)):
        slots = 5 * k
        order = torch.randperm(slots, generator=torch.Generator().manual_seed(0))[:here]
        inverse = torch.full((slots,), here).scatter_(0, order, torch.arange(here))

        def inputs(g: torch.Generator, sizes: tuple[int, ...] = (k, here, width)) -> list[Tensor]:
            k, here, width = sizes
            return [_randn(g, 5, width), _randn(g, here, width), _randn(g, 5, k)]

        def run(o: Ops, x: Tensor, rows: Tensor, weights: Tensor, given: Any = (order, inverse, k, weighed)) -> Any:
            order, inverse, k, weighed = given
            way = order.to(x.device), inverse.to(x.device), k
            return o.spread_rows(x, *way, weights.float() if weighed else None), o.combine_rows(rows, *way)

        def oracle(x: Tensor, rows: Tensor, weights: Tensor, given: Any = (order, k, weighed)) -> Any:
            order, k, weighed = given
            order = order.to(x.device)
            factors = (weights if weighed else torch.ones_like(weights)).flatten()[order].unsqueeze(1)
            return x[order // k] * factors, torch.zeros_like(x).index_add(0, order // k, rows)

        yield Case(f"combine [{here} of {slots} slots, {width}]{'' if weighed else ' unweighed'}", inputs, run, oracle)


def _attention_oracle(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, first_BS: Tensor | None = None
) -> tuple[Tensor]:
    seq, group = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(seq, device=q.device)[:, None] - torch.arange(seq, device=q.device)
    hidden = (distance < 0) | (distance >= (window or seq))
    if first_BS is not None:
        hidden = (hidden | (torch.arange(seq, device=q.device) < first_BS[..., None])).unsqueeze(1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v,)


def _documents(*lengths: int, device: torch.device) -> Documents:
    """Two samples of these documents, the second in the opposite order."""
    orders = (lengths, lengths[::-1])
    starts = [[sum(order[:i]) for i, n in enumerate(order) for _ in range(n)] for order in orders]
    ends = torch.tensor([0, *lengths, *lengths[::-1]]).cumsum(0)
    return Documents(torch.tensor(starts, device=device).t(), ends.to(device, torch.int32), max(lengths))


def _attention_cases() -> Iterator[Case]:
    for seq, heads, kv, width in ((9, 4, 2, 16), (17, 3, 3, 8), (64, 8, 1, 64), (1, 1, 1, 8)):
        for window, softcap in ((None, None), (5, None), (None, 2.0), (5, 2.0)):

            def inputs(g: torch.Generator, shape: Any = (seq, heads, kv, width)) -> list[Tensor]:
                seq, heads, kv, width = shape
                # As the model has them: positions first in memory.
                return [_randn(g, seq, 2, n, width).permute(1, 2, 0, 3) for n in (heads, kv, kv)]

            yield Case(
                f"attention [2, {heads}/{kv}, {seq}, {width}] window {window} softcap {softcap}",
                inputs,
                lambda o, q, k, v, w=window, c=softcap: (o.attention(q, k, v, Mask(w), softcap=c),),
                lambda q, k, v, w=window, c=softcap: _attention_oracle(q, k, v, w, c),
                # A softmax over one key is constant.
                differentiate=seq > 1,
            )
            if seq < 9:
                continue
            lengths = (2, 1, seq - 8, 5)

            def first(q: Tensor, lengths: tuple[int, ...] = lengths) -> Tensor:
                return _documents(*lengths, device=q.device).starts_SB.t()

            yield Case(
                f"attention [2, {heads}/{kv}, {seq}, {width}] window {window} softcap {softcap} documents",
                inputs,
                lambda o, q, k, v, w=window, c=softcap, n=lengths: (
                    o.attention(q, k, v, Mask(w), _documents(*n, device=q.device), softcap=c),
                ),
                lambda q, k, v, w=window, c=softcap, first=first: _attention_oracle(q, k, v, w, c, first(q)),
            )


def _attend(o: Ops, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor, **options: Any) -> Sequence[Tensor]:
    """Attend to the first five keys and to the others, merge, and give every block its gradients; causal: at once."""
    at_once = "causal" in options or "band" in options
    blocks = [slice(None)] if at_once else [slice(0, 5), slice(5, None)]
    masks = [None if at_once or seen.all() else seen[..., keys] for keys in blocks]
    parts = [o.attend(q, k[:, :, keys], v[:, :, keys], mask, **options) for keys, mask in zip(blocks, masks)]
    lse = functools.reduce(torch.logaddexp, (lse for _, lse in parts))
    merged = sum(out * (own - lse).exp().unsqueeze(-1) for out, own in parts)
    assert isinstance(merged, Tensor)
    out = merged.to(q.dtype)
    grads = [
        o.attend_backward(dout, q, k[:, :, keys], v[:, :, keys], out, lse, mask, **options)
        for keys, mask in zip(blocks, masks)
    ]
    dq = sum(dq.float() for dq, _, _ in grads)
    assert isinstance(dq, Tensor)
    return out, lse, dq, *(torch.cat(d, 2) for d in list(zip(*grads))[1:])


def _attend_oracle(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor, *, softcap: float | None = None, **at_once: Any
) -> Sequence[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    scores = leaves[0] @ leaves[1].repeat_interleave(group, 1).transpose(2, 3) / q.shape[3] ** 0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    seen = torch.ones_like(scores, dtype=torch.bool).tril() if "causal" in at_once else seen
    scores = scores.masked_fill(~seen, float("-inf"))
    out = scores.softmax(-1) @ leaves[2].repeat_interleave(group, 1)
    return out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, leaves, dout)


def _attend_cases() -> Iterator[Case]:
    for queries, keys, heads, kv in ((7, 12, 4, 2), (12, 12, 3, 3), (33, 40, 8, 1)):
        more = keys - queries
        bands = {"band": Band(more, 4), "all before": Band(more, keys), "earlier": Band(keys + 2, queries + 5)}
        for kind in ("all", "masked", "masked alike", *(("causal",) if queries == keys else ()), *bands):
            for softcap in (None, 2.0):

                def inputs(g: torch.Generator, sizes: Any = (queries, keys, heads, kv, kind, bands)) -> list[Tensor]:
                    queries, keys, heads, kv, kind, bands = sizes
                    shapes = ((queries, heads), (keys, kv), (keys, kv), (queries, heads))
                    drawn = [_randn(g, rows, 2, n, 16).permute(1, 2, 0, 3) for rows, n in shapes]
                    seen = torch.ones(2, 1, queries, keys, dtype=torch.bool, device=drawn[0].device)
                    if kind == "masked":  # some queries see nothing of one block or of the other
                        seen[0, :, 2:4, :5] = False
                        seen[1, :, 1::2, 5:] = False
                        seen[:, :, :, 3] = False
                    if kind == "masked alike":  # one mask for all samples
                        seen = seen[:1].tril(2)
                    if kind in bands:
                        seen = bands[kind].visible(*drawn[:2])
                    return [*drawn, seen]

                options: dict[str, Any] = {"softcap": softcap}
                options |= {"causal": True} if kind == "causal" else {"band": bands[kind]} if kind in bands else {}
                yield Case(
                    f"attend [2, {heads}/{kv}, {queries} to {keys}, 16] {kind} softcap {softcap}",
                    inputs,
                    lambda o, *args, options=options: _attend(o, *args, **options),
                    lambda *args, options=options: _attend_oracle(*args, **options),
                    differentiate=False,
                )


def _delta_oracle(
    starts: Tensor | None, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor]:
    """Token by token: decay the state, correct what it holds for the key towards the value, read it with the query."""
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2).unsqueeze(-2) for x in (q, k))
    out = []
    for t in range(len(v)):
        state = state * decay[t].exp()[..., None, None]
        if starts is not None:
            state = state * (starts[t] != t)[:, None, None, None]
        change = (v[t].unsqueeze(-2) - k[t] @ state) * beta[t][..., None, None]
        state = state + k[t].mT * change
        out.append((q[t] @ state).squeeze(-2) / q.shape[-1] ** 0.5)
    return (torch.stack(out),)


def _delta_rule(o: Ops, starts: Tensor | None, *given: Tensor) -> tuple[Tensor]:
    *tokens, state = given
    return (o.gated_delta_rule(*tokens, starts, state.float()),)


def _delta_in_two(o: Ops, starts: Tensor | None, *given: Tensor) -> tuple[Tensor]:
    """The rule over some tokens, and over the others from what those make of the state before them."""
    *tokens, state = given
    cut, state = len(tokens[0]) // 2, state.float()
    ahead, behind = [x[:cut] for x in tokens], [x[cut:] for x in tokens]
    starts_ahead, starts_behind = (None, None) if starts is None else (starts[:cut], starts[cut:] - cut)
    passed, added = o.gated_delta_transition(*ahead[1:], starts_ahead).split((state.shape[-2], state.shape[-1]), -1)
    first = o.gated_delta_rule(*ahead, starts_ahead, state)
    return (torch.cat((first, o.gated_delta_rule(*behind, starts_behind, passed @ state + added))),)


def _delta_cases() -> Iterator[Case]:
    # Less than a chunk of 64 tokens, and several; strong decays among mild ones.
    # The last has sizes that are no powers of two, and more columns than a program.
    sizes = (
        ((5,), 2, 4, 16, 8, False),
        ((150,), 1, 3, 16, 8, False),
        ((30, 1, 33, 86), 2, 2, 16, 8, True),
        ((70,), 1, 2, 24, 40, False),
    )
    for lengths, keys, values, key_size, value_size, documents in sizes:
        shape = sum(lengths), keys, values, key_size, value_size

        def inputs(g: torch.Generator, sizes: tuple[int, ...] = shape) -> list[Tensor]:
            tokens, keys, values, key_size, value_size = sizes
            decay = -_randn(g, tokens, 2, values).square()
            decay[4::9] *= 100
            q, k, v = (
                _randn(g, tokens, 2, heads, width)
                for heads, width in ((keys, key_size), (keys, key_size), (values, value_size))
            )
            beta, state = _randn(g, tokens, 2, values).sigmoid(), _randn(g, 2, values, key_size, value_size)
            return [q, k, v, decay, beta, state]

        def starts(x: Tensor, lengths: tuple[int, ...] = lengths, documents: bool = documents) -> Tensor | None:
            if not documents:
                return None
            at = _documents(*lengths, device=x.device).starts_SB
            return at.where(at > 0, -3)  # the first goes on from before

        label = f"[{shape[0]}, 2, {keys}/{values}, {key_size} x {value_size}]{' documents' if documents else ''}"
        for name, run in (("gated_delta_rule", _delta_rule), ("gated_delta_transition", _delta_in_two)):
            yield Case(
                f"{name} {label}",
                inputs,
                lambda o, *given, run=run, starts=starts: run(o, starts(given[0]), *given),
                lambda *given, starts=starts: _delta_oracle(starts(given[0]), *given),
            )


def _conv_oracle(x: Tensor, weight: Tensor, starts: Tensor | None) -> tuple[Tensor]:
    tokens, width = len(x), weight.shape[1]
    total = torch.zeros_like(x)
    for t in range(tokens):
        for j in range(min(width, t + 1)):
            seen = x[t - j] if starts is None else x[t - j] * (starts[t] <= t - j)[:, None]
            total[t] = total[t] + weight[:, width - 1 - j] * seen
    return (total * total.sigmoid(),)


def _conv_cases() -> Iterator[Case]:
    # The last more than a program's rows and channels.
    sizes = (((1,), 4, 10, False), ((17,), 3, 10, False), ((2, 1, 9), 4, 10, True), ((29, 1, 5), 4, 130, True))
    for lengths, width, channels, documents in sizes:
        tokens = sum(lengths)

        def inputs(g: torch.Generator, sizes: tuple[int, ...] = (tokens, channels, width)) -> list[Tensor]:
            tokens, channels, width = sizes
            return [_randn(g, tokens, 2, channels), _randn(g, channels, width)]

        def starts(x: Tensor, lengths: tuple[int, ...] = lengths, documents: bool = documents) -> Tensor | None:
            return _documents(*lengths, device=x.device).starts_SB if documents else None

        yield Case(
            f"causal_conv [{tokens}, 2, {channels}] of {width} tokens{' documents' if documents else ''}",
            inputs,
            lambda o, x, w, starts=starts: (o.causal_conv(x, w, starts(x)),),
            lambda x, w, starts=starts: _conv_oracle(x, w, starts(x)),
        )


def cases() -> list[Case]:
    """Every case of every op."""
    return [
        *_norm_cases(),
        *_qk_norm_cases(),
        *_rope_cases(),
        *_activation_cases(),
        *_cross_entropy_cases(),
        *_flat_cases(),
        *_matmul_cases(),
        *_grouped_cases(),
        *_combine_cases(),
        *_attention_cases(),
        *_attend_cases(),
        *_delta_cases(),
        *_conv_cases(),
    ]


def relative_error(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, with a floor under ||b|| so that an exact zero may carry rounding."""
    if a.shape != b.shape:
        raise _FaultError(f"shape {list(a.shape)}, should be {list(b.shape)}")
    if not b.numel():
        return 0.0
    floor = 1e-2 * b.numel() ** 0.5
    return float((a.double() - b.double()).norm() / max(float(b.double().norm()), floor))


def _evaluate(case: Case, run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], grad: Sequence[bool]) -> Any:
    """-> outputs, then gradients of a fixed random projection of them."""
    leaves = [t.detach().requires_grad_(case.differentiate and g) for t, g in zip(inputs, grad)]
    outputs = [t for t in run(*leaves) if t is not None]
    if not case.differentiate:
        return outputs
    weights = torch.Generator(device=inputs[0].device).manual_seed(1)
    dy = [torch.randn(y.shape, generator=weights, device=y.device).bfloat16().to(y.dtype) for y in outputs]
    wanted = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, dy, allow_unused=True)
    return [y.detach() for y in outputs] + [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads)]


def check_case(case: Case, ops: Ops, device: torch.device, dtype: torch.dtype) -> Result:
    """Run one case twice and against its oracle."""
    drawn = case.inputs(torch.Generator(device=device).manual_seed(0))
    is_typed = [t.dtype == torch.float64 for t in drawn]
    inputs = [t.to(dtype) if typed else t for t, typed in zip(drawn, is_typed)]
    limit = LIMITS[dtype]

    def evaluate() -> list[Tensor]:
        return _evaluate(case, lambda *args: case.run(ops, *args), [t.clone() for t in inputs], is_typed)

    try:
        got = evaluate()
        again = evaluate()
        exact = [t.double() if t.is_floating_point() else t for t in inputs]
        want = _evaluate(case, case.oracle, exact, is_typed)
        # zip over what both give: an op in fp32 returns fp32 states even under bf16 (adamw), held to the same limit.
        error = max(relative_error(a, b) for a, b in zip(got, want))
        same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, again))
    except _FaultError as e:
        return Result(case.name, float("inf"), limit, str(e))
    # max() drops NaN in the middle of its arguments.
    if any(t.isnan().any() for t in got):
        return Result(case.name, float("nan"), limit, "NaN in the result: unwritten memory, or wrong arithmetic")
    return Result(case.name, error, limit, "" if same else "two runs differ in bits")


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, torch.empty is filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check(ops: Ops, device: torch.device | str, dtype: torch.dtype) -> list[Result]:
    """Every case on the chosen backends."""
    with poisoned_memory():
        return [check_case(case, ops, torch.device(device), dtype) for case in cases()]
