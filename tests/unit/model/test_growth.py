"""No part of a step calls more operators, or moves more bytes, than in proportion to its tokens, layers or experts.

Operators are counted at n, 2 n and 4 n: from 2 n to 4 n twice as many come on top as from n to 2 n. The scores of
soft-capped attention are in memory by its contract, and masks of scores are drawn element by element: neither is here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.core import build
from megalite.core import ops as kernels
from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.ops import Ops, delta_rule
from megalite.core.parts.context import blocks
from megalite.core.parts.families import FAMILIES
from megalite.core.parts.ffn.experts.routing import Router
from megalite.core.rows import Rows
from megalite.core.step import train_step
from megalite.extras.estimate.rank import plausible_status
from megalite.extras.estimate.record import recorded_world
from megalite.extras.estimate.tracker import arguments, launches, operands
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.rows import always_run
from tests.unit.extras.estimate.layouts import in_turn
from tests.update_rules import OWN_RULES

EXPERTS = {"num_experts": 8, "moe_topk": 3, "moe_ffn_size": 32}
DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "linear_attention_freq": 2,
    "attention_output_gate": True,
}
LATENTS = {"kv_lora_rank": 20, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"num_kv_heads": 8, "hidden_dropout": 0.1},
    "gemma3_text": {"window": 5, "window_pattern": 2, "head_dim": 8, "query_pre_attn_scalar": 6},
    "gpt_oss": {**EXPERTS, "window": 5, "head_dim": 8},
    "llama4_text": {**EXPERTS, "moe_topk": 1, "moe_dense_layers": (0,), "moe_shared_ffn_size": 16}
    | {"attention_chunk_size": 8, "no_rope_freq": 2, "head_dim": 8},
    "mixtral": EXPERTS,
    "deepseek_v3": {**EXPERTS, **LATENTS, "num_kv_heads": 8, "moe_shared_ffn_size": 16, "mtp_num_layers": 1},
    "qwen3_next": {**EXPERTS, **DELTA, "moe_shared_ffn_size": 16, "head_dim": 8, "rope_fraction": 0.5},
}
FP8 = {"precision": "bf16", "fp8_emulate": True}
# Name of the row: (family, ranks, layout, training options, whether samples have documents).
Row = tuple[str, int, dict[str, Any], dict[str, Any], bool]
ROWS: dict[str, Row] = {
    "gpt2": ("gpt2", 1, {}, {"label_smoothing": 0.1}, False),
    "windows": ("gemma3_text", 1, {}, {}, True),
    "sinks": ("gpt_oss", 1, {}, {}, False),
    "chunks": ("llama4_text", 1, {}, {"recompute": "full"}, True),
    "experts": ("mixtral", 2, {"ep": 2}, {"loss_chunk": 16, "recompute": "selective"}, False),
    "latents": ("deepseek_v3", 2, {"ep": 2, "moe_dispatch": "allgather"}, {}, False),
    "delta nets": ("qwen3_next", 1, {}, {}, True),
    "fp8": ("llama", 1, {}, {**FP8, "fp8": "rowwise"}, False),
    "experts in fp8": ("mixtral", 1, {}, {**FP8, "fp8": "tensorwise"}, False),
    "products in chunks": ("llama", 2, {"tp": 2, "tp_chunks": 2}, {}, False),
    "gather": ("gpt_oss", 2, {"cp": 2, "cp_comm": "gather"}, {}, True),
    "gathered latents": ("deepseek_v3", 2, {"cp": 2, "cp_comm": "gather"}, {}, False),
    "ring": ("gemma3_text", 2, {"cp": 2, "cp_comm": "ring"}, {"recompute": "full"}, True),
    "heads": ("gemma3_text", 2, {"cp": 2, "cp_comm": "a2a"}, {}, True),
    "pieces": ("qwen3_next", 2, {"cp": 2}, {}, True),
}
Counts = tuple[int, int, int]


class Counted(TorchDispatchMode):
    """Counts operators that do more than make or reinterpret memory, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()
        self.nbytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if launches(func):
            outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            read, written = operands(func, arguments(func, args, kwargs or {}), outputs)
            self.calls[func.name()] += 1
            self.nbytes[func.name()] += sum(x.nbytes for x in (*read, *written))
        return out


def assert_linear(counted: Callable[[int], Counted], n: int) -> None:
    """Compare growth from n to 2 n and to 4 n. What makes zeros for the whole of an indexed tensor does not grow."""
    one, two, four = (counted(factor * n) for factor in (1, 2, 4))
    for kind in ("calls", "nbytes"):
        counts = [getattr(x, kind) for x in (one, two, four)]
        first, second, third = (sum(x.values()) for x in counts)
        worst = max(counts[2], key=lambda name: counts[2][name] - 2 * counts[1][name])
        assert third - second <= 2.06 * (second - first) + 4 * (kind == "calls"), (kind, worst, first, second, third)
    for name in ("aten::select_backward", "aten::slice_backward"):
        assert four.calls[name] == two.calls[name], name


def step(cfg: Config, world: int, documents: bool = False) -> Counted:
    """A step of the first rank, by real operators on a world without peers."""
    grid = Grid.from_config(cfg.parallel, world)
    with recorded_world(0, grid):
        engine = build_engine(cfg, ParallelContext.create(grid, torch.device("cpu")))
        engine.optimizer.init_parameters(cfg.train.seed)
        n, seq = cfg.train.global_batch_size // engine.ctx.dp.size, cfg.model.seq_len
        tokens = np.tile(np.arange(seq + 1) % jobs.VOCAB, (n, 1))
        starts = np.tile(np.arange(seq) // 13 * 13, (n, 1)) if documents else None
        with plausible_status(cfg), Counted() as counted:
            train_step(engine, Rows(tokens[:, :-1], tokens[:, 1:], starts), 1)
    return counted


def config(family: str, parallel: dict[str, Any], train: dict[str, Any], layers: int = 2, **options: Any) -> Config:
    model = jobs.llama(layers, **{**FAMILIES[family].options, **MODELS[family], **options})
    return jobs.make_config(model, parallel, **{"global_batch_size": 2, **train})


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As attention with a mask has them in long samples, and experts that all get rows."""
    monkeypatch.setattr(build, "LONG_ON_CPU", 16)
    monkeypatch.setattr(blocks, "_ROWS", 16)
    monkeypatch.setattr(delta_rule, "CHUNK", 16)
    monkeypatch.setattr(Router, "forward", in_turn)


@pytest.mark.parametrize(
    "name", always_run(ROWS, "windows", "chunks", "experts", "delta nets", "products in chunks", "ring")
)
def test_a_step_grows_with_its_tokens(name: str) -> None:
    family, world, parallel, train, documents = ROWS[name]
    assert_linear(lambda seq: step(config(family, parallel, train, seq_len=seq), world, documents), 128)


def with_rule(cfg: Config, **optim: Any) -> Config:
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, **optim))


# Options of the optimizer, of training.
UPDATES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"optimizer": rule}, {}) for rule in OWN_RULES),
    ({"master_dtype": "bf16", "moments_dtype": "bf16"}, {"precision": "bf16"}),
    *(({}, {"compress": codec}) for codec in ("int8", "topk:0.1", "powersgd:2")),
    ({}, {"offload": "optimizer"}),
]


@pytest.mark.parametrize(("optim", "train"), UPDATES, ids=str)
def test_a_step_grows_with_its_layers(optim: dict[str, Any], train: dict[str, Any]) -> None:
    assert_linear(lambda layers: step(with_rule(config("llama", {"zero": 0}, train, layers), **optim), 2), 2)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_step_grows_with_its_micro_batches(zero: int) -> None:
    def cfg(n: int) -> Config:
        train = {"global_batch_size": 2 * n, "micro_batch_size": 1}
        return config("llama", {"zero": zero, "zero_whole_below": 500}, train)

    assert_linear(lambda n: step(cfg(n), 2), 2)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_a_step_grows_with_its_experts(rule: str) -> None:
    assert_linear(lambda n: step(with_rule(config("mixtral", {}, {}, num_experts=n), optimizer=rule), 1), 8)


def test_every_op_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and updates call each function of `Ops` between them."""
    called, resolve = set[str](), kernels.resolve

    def seen(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return function(*args, **kwargs)

        return call

    def resolved(*args: Any) -> Ops:
        ops = resolve(*args)
        functions = [field.name for field in dataclasses.fields(ops) if field.name != "choices"]
        wrapped: dict[str, Any] = {name: seen(name, getattr(ops, name)) for name in functions}
        return dataclasses.replace(ops, **wrapped)

    monkeypatch.setattr(kernels, "resolve", resolved)
    for family, world, parallel, train, documents in ROWS.values():
        step(config(family, parallel, train, seq_len=32), world, documents)
    for optim, train in UPDATES:
        step(with_rule(config("llama", {}, train, 1), **optim), 1)
    assert {field.name for field in dataclasses.fields(Ops)} - called == {"choices"}
