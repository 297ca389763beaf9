"""The gated delta rule in chunks and token by token, and the convolution before it, beside transformers' functions."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.core.ops import delta_rule
from megalite.core.ops.causal_conv import causal_conv
from megalite.core.ops.delta_rule import gated_delta_rule, gated_delta_transition, recurrent
from megalite.core.parts.kernels import fused
from megalite.core.parts.mixers.delta_net import delta_slices

# Around the ends of chunks of 64 tokens, and less than one.
LENGTHS = (1, 64, 65, 200)


def inputs(tokens: int, dtype: torch.dtype = torch.float64, heads: tuple[int, int] = (2, 4)) -> list[torch.Tensor]:
    """q, k, v, decay and beta of two samples; decays from 1 to almost nothing."""
    g = torch.Generator().manual_seed(tokens)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, 2, *shape, generator=g, dtype=torch.float64)

    keys, values = heads
    decay = -4 * torch.rand(tokens, 2, values, generator=g, dtype=torch.float64) ** 4
    out = [randn(keys, 6), randn(keys, 6), randn(values, 5), decay, randn(values).sigmoid()]
    return [x.to(dtype).requires_grad_() for x in out]


def starts_of(tokens: int) -> torch.Tensor:
    """Documents that end inside chunks, with chunks and at one token, other ones in each sample."""
    borders = [sorted({0, *(b for b in some if b < tokens)}) for some in ((3, 4, 64, 70, 128), (60, 66, 190))]
    at = torch.arange(tokens)
    return torch.stack([torch.tensor([max(b for b in some if b <= t) for t in at]) for some in borders], 1)


def gradients(run: Any, given: list[torch.Tensor], *more: Any) -> list[torch.Tensor]:
    """The result, and the gradient of every input from a gradient that weighs each element in its own way."""
    out = run(*given, *more)
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()
    return [out, *torch.autograd.grad(out, given, weights)]


def close(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunks_are_the_recurrence(tokens: int, documents: bool) -> None:
    given, starts = inputs(tokens), starts_of(tokens) if documents else None
    close(gradients(gated_delta_rule, given, starts), gradients(recurrent, given, starts), 1e-10)


def in_two(*given: torch.Tensor, starts: torch.Tensor | None, run: Any = gated_delta_rule) -> torch.Tensor:
    """The rule over 70 tokens, then over the others from what those make of the state before them."""
    (starts, later) = (None, None) if starts is None else (starts[:70], starts[70:] - 70)
    _, k, v, decay, beta = given
    before = torch.ones(*v.shape[1:3], k.shape[3], v.shape[3], dtype=v.dtype)
    map_of = gated_delta_transition(k[:70], v[:70], decay[:70], beta[:70], starts)
    passed, added = map_of.split((k.shape[3], v.shape[3]), -1)
    head = run(*(x[:70] for x in given), starts, before)
    return torch.cat((head, run(*(x[70:] for x in given), later, passed @ before + added)))


@pytest.mark.parametrize("documents", [False, True])
def test_states_go_from_piece_to_piece(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where heads are computed in slices. Documents: the first goes on from before, one begins with the piece."""
    given, starts = inputs(200, heads=(3, 6)), starts_of(200) if documents else None
    if starts is not None:
        starts[:3, 0] = -5
    before = torch.ones(2, 6, 6, 5, dtype=torch.float64)
    expected = gradients(recurrent, given, starts, before)
    for limit in (delta_slices.LIMIT, 2 * delta_slices.work_bytes(140, 2, 6, 5)):
        monkeypatch.setattr(delta_slices, "LIMIT", limit)
        for run in (gated_delta_rule, recurrent):
            close(gradients(lambda *x, run=run: in_two(*x, starts=starts, run=run), given), expected, 1e-10)


@pytest.mark.parametrize("strong", [{5: 50.0, 13: 300.0}, {3: 1e4}], ids=str)
@pytest.mark.parametrize("documents", [False, True])
def test_strong_decays_lose_no_digits(strong: dict[int, float], documents: bool) -> None:
    """fp32 beside the recurrence in fp64, where every n-th token leaves e^-x of the state."""
    given, starts = [x.detach().float() for x in inputs(200)], starts_of(200) if documents else None
    for every, x in strong.items():
        given[3][::every] = -x
    before = torch.ones(2, 4, 6, 5, dtype=torch.float64)

    def of(run: Any, *more: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return gradients(run, [x.to(dtype).requires_grad_() for x in given], *more)

    close(of(gated_delta_rule, starts), of(recurrent, starts, dtype=torch.float64), 1e-6)
    expected = of(recurrent, starts, before, dtype=torch.float64)
    close(of(lambda *x: in_two(*x, starts=starts)), expected, 1e-6)


@pytest.mark.parametrize("run", [gated_delta_rule, recurrent], ids=["chunks", "recurrent"])
@pytest.mark.parametrize("tokens", [5, 130])
def test_it_is_that_of_transformers(tokens: int, run: Any) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    given = inputs(tokens, torch.float32)
    for function in (theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule):

        def reference(*args: torch.Tensor, function: Any = function) -> torch.Tensor:
            out, _ = function(*(x.transpose(0, 1) for x in args), use_qk_l2norm_in_kernel=True)
            return out.transpose(0, 1)

        close(gradients(run, given), gradients(reference, given), 1e-5)


@pytest.mark.parametrize("run", [gated_delta_rule, recurrent], ids=["chunks", "recurrent"])
def test_documents_are_as_if_alone(run: Any) -> None:
    """Each document of each sample is computed by itself, gradients included."""
    given, starts = inputs(200), starts_of(200)
    packed = gradients(run, given, starts)
    for sample in range(2):
        begins = sorted(set(starts[:, sample].tolist()))
        for begin, end in zip(begins, [*begins[1:], 200]):
            alone = [x.detach()[begin:end, sample : sample + 1].requires_grad_() for x in given]
            out = run(*alone)
            weights = torch.arange(packed[0].numel(), dtype=out.dtype).view(packed[0].shape).cos()
            grads = torch.autograd.grad(out, alone, weights[begin:end, sample : sample + 1])
            close([x[begin:end, sample : sample + 1] for x in packed], [out, *grads], 1e-9)


def test_backward_keeps_the_inputs_alone() -> None:
    given, kept = inputs(130, torch.bfloat16), list[torch.Tensor]()

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = gated_delta_rule(*given)
    assert out.dtype == torch.bfloat16
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in given}


class Peak(TorchDispatchMode):
    """Bytes of the largest number of tensors that were alive at once of those made within."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._held = 0, dict[int, int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and id(storage := x.untyped_storage()) not in self._held:
                self._held[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._held.pop, id(storage))
        self.most = max(self.most, sum(self._held.values()))
        return out


def backward_bytes(key_heads: int, per_key: int, key_size: int, value_size: int, tokens: int = 256) -> int:
    shapes = [(key_heads, key_size)] * 2 + [(key_heads * per_key, value_size)] + [(key_heads * per_key,)] * 2
    given = [torch.empty(tokens, 1, *s, device="meta", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    out = gated_delta_rule(*given)
    with Peak() as peak:
        out.backward(torch.empty_like(out))
    return peak.most - sum(x.nbytes for x in given)


@pytest.mark.parametrize("sizes", [(1, 32, 64), (2, 128, 128), (4, 64, 64)], ids=str)
def test_backward_takes_what_is_planned_for_a_slice(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = delta_slices.work_bytes(256, *sizes)
    assert backward_bytes(4, *sizes) == pytest.approx(4 * planned, rel=0.1)
    monkeypatch.setattr(delta_slices, "LIMIT", 2 * planned + 1)
    assert backward_bytes(4, *sizes) == pytest.approx(2 * planned, rel=0.1)


@pytest.mark.parametrize("documents", [False, True])
def test_slices_of_heads_are_the_whole(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given, starts = inputs(70, heads=(3, 6)), starts_of(70) if documents else None
    monkeypatch.setattr(delta_slices, "LIMIT", 2 * delta_slices.work_bytes(140, 2, 6, 5))
    assert [keys.stop for _, keys in delta_rule._slices(given[1], given[2], [3])] == [2, 3]
    close(gradients(gated_delta_rule, given, starts), gradients(recurrent, given, starts), 1e-10)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_the_convolution_is_that_of_torch(tokens: int, documents: bool) -> None:
    g = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_() for s in ((tokens, 2, 3), (3, 4)))
    starts = starts_of(tokens) if documents else torch.zeros(tokens, 2, dtype=torch.int64)

    def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Torch's convolution of each document by itself."""
        samples = []
        for sample in range(2):
            begins = sorted(set(starts[:, sample].tolist()))
            alone = [x[b:e, sample].t() for b, e in zip(begins, [*begins[1:], tokens])]
            out = [F.conv1d(d, weight.unsqueeze(1), padding=3, groups=3)[:, : d.shape[1]] for d in alone]
            samples.append(torch.cat(out, 1).t())
        return F.silu(torch.stack(samples, 1))

    given = starts if documents else None
    close(gradients(causal_conv, [x, weight], given), gradients(reference, [x, weight]), 1e-12)


def test_kernels_keep_no_input_but_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rule runs its states with lives until backward; of a block that is recomputed, inputs must not."""
    for name in ("gated_delta_rule", "gated_delta_transition"):
        monkeypatch.setattr(delta_rule, name, lambda *args, scan: scan)
        given = inputs(64)[0 if name == "gated_delta_rule" else 1 :]
        alive = [weakref.ref(x) for x in given]
        scan = getattr(fused, name)(*given, kernels="triton")
        del given
        assert scan is not None
        assert not any(ref() is not None for ref in alive), name
