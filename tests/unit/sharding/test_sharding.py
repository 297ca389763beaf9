"""The parameter table's arithmetic: shards are slices, pieces cover everything once, and no layout is in a value."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.core.base.slices import Slice
from megalite.core.model.parameters import param_map
from megalite.core.optim.shares import bucket_layout
from megalite.core.options.model import ModelConfig
from megalite.core.sharding import ParamSpec, Shard, count_parameters
from megalite.core.sharding import shard as module
from megalite.core.sharding.parameter import ShardedParameter
from tests.shards import tp_shard

SIZES: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 90, "seq_len": 16}
MODELS = {
    "llama": ModelConfig.from_arch("llama", **SIZES, ffn_hidden_size=48),
    "llama-gqa": ModelConfig.from_arch("llama", **{**SIZES, "num_heads": 8}, num_kv_heads=4, ffn_hidden_size=48),
    "gpt2": ModelConfig.from_arch("gpt2", **SIZES),
    "gpt_neox": ModelConfig.from_arch("gpt_neox", **SIZES),
    "olmo2": ModelConfig.from_arch("olmo2", **SIZES, ffn_hidden_size=48),
}


def slice_by_hand(full: torch.Tensor, spec: ParamSpec, rank: int, tp: int) -> torch.Tensor:
    """Each packed part cut into tp equal chunks, chunk `rank` of each joined: written with torch alone."""
    if not spec.sharded_dims:
        return full
    ((_, dim),) = spec.sharded_dims
    parts = full.split(spec.parts or (spec.shape[dim],), dim)
    return torch.cat([part.chunk(tp, dim)[rank] for part in parts], dim)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_shards_are_bitwise_slices_of_the_whole(model: str, tp: int) -> None:
    for name, spec in param_map(MODELS[model]).items():
        whole = Shard(spec).initial(1234)
        if spec.padded:
            whole = torch.cat((whole, torch.zeros(-spec.shape[0] % (8 * tp), *spec.shape[1:])))
        for rank in range(tp):
            shard = tp_shard(spec, rank, tp, 8)
            expected = whole.chunk(tp)[rank] if spec.padded else slice_by_hand(whole, spec, rank, tp)
            assert shard.shape == tuple(expected.shape), name
            assert torch.equal(shard.initial(1234), expected), name
            assert torch.equal(shard.take(whole[: spec.shape[0]]), expected), name


def test_values_of_drawn_parameters() -> None:
    specs = param_map(ModelConfig.from_arch("gpt2", num_layers=2, hidden_size=256, num_heads=4, vocab_size=1000))
    seen: dict[str, torch.Tensor] = {}
    for name, spec in specs.items():
        value = Shard(spec).initial(1)
        if spec.init == "normal":
            assert value.std().item() == pytest.approx(spec.std, rel=0.03), name
            assert abs(value.mean().item()) < 0.05 * spec.std, name
            seen[name] = value
        else:
            assert torch.equal(value, torch.full(spec.shape, float(spec.init == "ones"))), name
    # Output projections onto the residual stream: 0.02 / sqrt(2 layers * 2).
    assert specs["layers.0.self_attn.o_proj.weight"].std == pytest.approx(0.01)
    assert specs["layers.1.mlp.down_proj.weight"].std == pytest.approx(0.01)
    tied = seen.pop("lm_head.weight")
    assert torch.equal(tied, seen["embed_tokens.weight"])
    # No two parameters share values: layers of different depth, matrices of one layer, another seed.
    heads = [value.flatten()[:16] / specs[name].std for name, value in seen.items()]
    heads.append(Shard(specs["embed_tokens.weight"]).initial(2).flatten()[:16] / 0.02)
    assert len(torch.unique(torch.stack(heads), dim=0)) == len(heads)


def test_values_do_not_depend_on_which_rows_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are drawn in blocks of rows; a rank that needs few blocks gets the same numbers."""
    monkeypatch.setattr(module, "_INIT_BLOCK", 5 * 7)  # blocks of 5 rows of 7
    rows = ParamSpec("w", (36, 7), sharded_dims=(("tp", 0),), parts=(12, 24))
    columns = ParamSpec("w", (36, 8), sharded_dims=(("tp", 1),))
    padded = ParamSpec("w", (33, 7), sharded_dims=(("tp", 0),), padded=True)
    for spec in (rows, columns, padded):
        whole = Shard(spec).initial(3)
        assert len(torch.unique(whole)) == whole.numel()
        for rank in range(4):
            shard = tp_shard(spec, rank, 4, 4)
            assert torch.equal(shard.initial(3), shard.take(whole)), (spec, rank)


@pytest.mark.parametrize("init", ["normal", "ones", "log"])
def test_a_share_is_a_range_of_the_local_value(monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    """ZeRO-3 keeps a share of each matrix, and draws little more than that."""
    block, drawn = 5 * 8, 0
    monkeypatch.setattr(module, "_INIT_BLOCK", block)
    random_blocks = module._random_blocks

    def counted(*args: Any) -> Iterator[tuple[Slice, torch.Tensor]]:
        nonlocal drawn
        for box, values in random_blocks(*args):
            drawn += box.numel
            yield box, values

    monkeypatch.setattr(module, "_random_blocks", counted)
    rows = ParamSpec("w", (36, 8), sharded_dims=(("tp", 0),), parts=(12, 24), init=init)
    columns = ParamSpec("w", (36, 32), sharded_dims=(("tp", 1),), init=init)
    vector = ParamSpec("w", (36,), init=init)
    padded = ParamSpec("w", (33, 8), sharded_dims=(("tp", 0),), padded=True, init=init)
    for spec, rank in product((rows, columns, vector, padded), (0, 3)):
        shard = tp_shard(spec, rank, 4, 4)
        local = shard.initial(3).flatten()
        for start, stop in ((0, len(local)), (3, 4), (7, 30), (len(local) - 9, len(local)), (5, 5)):
            drawn = 0
            assert torch.equal(shard.initial(3, start, stop), local[start:stop]), (spec, rank, start)
            if spec is rows:
                assert drawn <= 2 * (stop - start) + 2 * block


def test_rows_nobody_needs_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int | str] = []
    philox = module.philox

    def counted(*key: int | str) -> np.random.Generator:
        drawn.append(key[-1])
        return philox(*key)

    monkeypatch.setattr(module, "_INIT_BLOCK", 8)
    monkeypatch.setattr(module, "philox", counted)
    tp_shard(ParamSpec("w", (32, 4), sharded_dims=(("tp", 0),)), 3, 4).initial(0)
    assert drawn == [12, 13, 14, 15]


def test_padding_of_the_vocabulary() -> None:
    spec = ParamSpec("embed_tokens.weight", (90, 4), sharded_dims=(("tp", 0),), padded=True)
    assert [tp_shard(spec, r, 4, 8).shape for r in range(4)] == [(24, 4)] * 4
    assert tp_shard(spec, 0, 1, 128).shape == (128, 4)
    last = tp_shard(spec, 3, 4, 8)
    assert last.slices == [Slice((72, 0), (18, 4), 0)]
    value = last.initial(0)
    assert value[:18].ne(0).all()
    assert not value[18:].any()
    # A rank that holds nothing but padding.
    assert tp_shard(ParamSpec("e", (10, 4), sharded_dims=(("tp", 0),), padded=True), 3, 4, 8).slices == []


def test_count_leaves_tied_copies_out() -> None:
    specs = param_map(MODELS["gpt2"])
    h, v = 32, 90
    block = 4 * h + 3 * h * h + 3 * h + h * h + h + 8 * h * h + 5 * h
    assert count_parameters(specs) == v * h + 16 * h + 3 * block + 2 * h


@st.composite
def cut(draw: st.DrawFn) -> tuple[ParamSpec, int, int, int]:
    """A parameter, tp, the padding multiple and the number of ZeRO shares."""
    tp, shares, multiple = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 5)), draw(st.sampled_from([1, 4]))
    kind = draw(st.sampled_from(["rows", "columns", "padded", "vector", "replicated", "replicated-vector"]))
    n, width = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    if kind == "padded":
        return (
            ParamSpec("w", (draw(st.integers(1, 40)), width), sharded_dims=(("tp", 0),), padded=True),
            tp,
            multiple,
            shares,
        )
    if kind.startswith("replicated"):
        return ParamSpec("w", (n, width) if kind == "replicated" else (n,)), tp, multiple, shares
    if kind == "columns":
        return ParamSpec("w", (n, width * tp), sharded_dims=(("tp", 1),)), tp, multiple, shares
    parts = tuple(p * tp for p in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = (sum(parts), width) if kind == "rows" else (sum(parts),)
    return ParamSpec("w", shape, sharded_dims=(("tp", 0),), parts=parts if len(parts) > 1 else ()), tp, multiple, shares


def zero_slices(shape: tuple[int, ...], before: int, shares: int) -> Iterator[tuple[int, int]]:
    """The part of a parameter in every dp rank's share of a bucket, where `before` elements come first."""
    size = int(np.prod(shape))
    starts, numel = bucket_layout([before, size], shares)
    for share in range(shares):
        low, high = share * numel // shares, (share + 1) * numel // shares
        yield max(0, low - starts[1]), max(0, min(size, high - starts[1]))


@settings(max_examples=150, deadline=None)
@given(cut(), st.integers(0, 300))
def test_pieces_cover_every_element_once_and_put_the_whole_together(
    case: tuple[ParamSpec, int, int, int], before: int
) -> None:
    spec, tp, multiple, shares = case
    whole = torch.arange(1.0, spec.numel + 1).view(spec.shape)
    rebuilt, count = torch.zeros(spec.shape), torch.zeros(spec.shape)
    for rank in range(tp):
        shard = tp_shard(spec, rank, tp, multiple)
        flat = shard.take(whole).view(-1)
        covered = 0
        for low, high in zero_slices(shard.shape, before, shares):
            for piece in shard.flat_slices(low, high):
                at, size = piece.at, piece.numel
                assert low <= at
                assert at + size <= high
                rebuilt[piece.index] = flat[at : at + size].view(piece.shape)
                count[piece.index] += 1
                # The rectangle is the same elements of the local tensor.
                local = shard.local(piece).index
                assert torch.equal(flat.view(shard.shape)[local].flatten(), flat[at : at + size])
                covered += size
        # Nothing of the padding is in a piece: all elements of `whole` are above zero.
        assert covered == int((flat > 0).sum())
    assert torch.equal(rebuilt, whole)
    assert torch.equal(count, torch.full(spec.shape, 1.0 if spec.sharded_dims else float(tp)))


def test_uneven_parts_are_refused() -> None:
    shard = tp_shard(ParamSpec("w", (10, 2), sharded_dims=(("tp", 0),), parts=(4, 6)), 0, 4)
    with pytest.raises(AssertionError, match="w: part of 6 is not divisible by 4 ranks"):
        _ = shard.shape


def test_a_sharded_parameter_is_an_ordinary_one_too() -> None:
    shard = tp_shard(ParamSpec("w", (6, 4), sharded_dims=(("tp", 0),)), 1, 2)
    param = ShardedParameter.empty(shard, torch.bfloat16, torch.device("cpu"), adds_to_main_grad=True)
    assert isinstance(param, torch.nn.Parameter)
    assert (tuple(param.shape), param.dtype, param.requires_grad) == ((3, 4), torch.bfloat16, True)
    assert (param.shard, param.uses, param.adds_to_main_grad) == (shard, 1, True)


@pytest.mark.parametrize(("local_ranks", "threads"), [(1, 8), (3, 2), (8, 1)])
def test_threads_draw_the_same_bits(monkeypatch: pytest.MonkeyPatch, local_ranks: int, threads: int) -> None:
    """As many threads as a rank has cores; with one, nothing is started."""
    spec = ParamSpec("w", (40, 7))
    monkeypatch.setattr(module, "_INIT_BLOCK", 5 * 7)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    expected = Shard(spec).initial(3)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    together = threading.Barrier(threads, timeout=120)
    draw = module.philox

    def philox(*key: int | str) -> Any:
        together.wait()  # for all threads: fewer never come together
        return draw(*key)

    monkeypatch.setattr(module, "philox", philox)
    assert torch.equal(Shard(spec).initial(3), expected)
    assert together.n_waiting == 0
