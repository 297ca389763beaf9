"""What autograd saves on real ranks, tensor by tensor, against the rows of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from megalite.core.mesh.grid import Grid
from megalite.core.options.choices import BlockKind
from megalite.extras.plan.memory.activations import block_activations, saved_by_block
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.runtime.options.data import DataConfig
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.rows import always_run
from tests.workers import WorkerPool

SEQ, VOCAB = 32, 1600
DENSE = BlockKind()
SHAPE = {"hidden_size": 64, "seq_len": SEQ, "vocab_size": VOCAB}
FAMILIES = {
    "llama": jobs.llama(**SHAPE, ffn_hidden_size=176),
    "gpt2": jobs.gpt2(**SHAPE),
    "bloom": jobs.gpt2(**SHAPE, position="alibi", embedding_norm=True),
    "gptj": jobs.gpt2(**SHAPE, norm_position="shared", parallel_residual=True, head_bias=True, tie_embeddings=False),
    "sums": jobs.gpt2(**SHAPE, norm_position="sum", embedding_size=48),
    "relu": jobs.gpt2(**SHAPE, activation="relu"),
    # Four norms, q/k norms, bounded scores, masks; dropout in both places.
    "olmo2": jobs.llama(**SHAPE, norm_position="post", qk_norm="full"),
    "gemma2": jobs.gemma2(**SHAPE),
    "documents": jobs.llama(**SHAPE),
    "chunks": jobs.llama(**SHAPE, attention_chunk_size=9, qk_norm="l2"),
    "sinks": jobs.llama(**SHAPE, attention_sinks=True, window=9, window_pattern=2, activation="clamped_swiglu"),
    "dropout": jobs.gpt2(**SHAPE, hidden_dropout=0.1, attention_dropout=0.1),
}


def config(family: str, layers: int, zero: int, recompute: str, tp: int, sequence: bool, precision: str) -> Config:
    from dataclasses import replace

    parallel = {"tp": tp, "sequence_parallel": sequence, "zero": zero, "zero_whole_below": 1000, "device": "cpu"}
    train: dict[str, Any] = {"recompute": recompute, "precision": precision, "micro_batch_size": 2}
    cfg = jobs.make_config(replace(FAMILIES[family], num_layers=layers), parallel, **train)
    return replace(cfg, data=DataConfig(document_mask=family == "documents"))


LAYOUTS = [(1, False), (2, True), (2, False)]
CASES = [
    *product(("llama",), (1, 3), ("none", "selective", "full"), LAYOUTS, ("bf16",)),
    *product(("gpt2",), (3,), ("none", "selective", "full"), LAYOUTS, ("bf16",)),
    *product(
        ("olmo2", "gemma2", "dropout", "documents", "chunks", "relu", "bloom", "gptj", "sums"),
        (1,),
        ("none", "selective"),
        LAYOUTS[:1],
        ("fp32",),
    ),
    *product(("olmo2", "gemma2", "dropout", "sinks", "bloom"), (1,), ("none", "selective"), LAYOUTS[1:2], ("bf16",)),
]
ALWAYS = CASES[::4]


def saved(rank: int, cfgs: Sequence[Config]) -> list[Counter[int]]:
    """Sizes of the storages that one forward pass of the stage saves, weights and tables of positions left out."""
    import torch

    from megalite.core.mesh.context import ParallelContext

    contexts = {tp: ParallelContext.create(Grid.of(4, tp=tp), torch.device("cpu")) for tp in (1, 2)}
    return [_saved(cfg, contexts[cfg.parallel.tp]) for cfg in cfgs]


def _saved(cfg: Config, ctx: Any) -> Counter[int]:
    import torch

    from megalite.core.batch import Documents, ForwardPass, MicroBatch, Positions
    from megalite.core.build import build_engine

    engine = build_engine(cfg, ctx)
    engine.optimizer.init_parameters(1)
    engine.optimizer.wait_weights()
    (stage,) = engine.stages.values()
    apart = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    for make in filter(None, stage._positions):
        tables = make(Positions.of_samples(SEQ), torch.device("cpu"))
        assert tables is not None
        apart |= {table.untyped_storage().data_ptr() for table in tables}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in apart:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    tokens = torch.arange(2 * SEQ).view(SEQ, 2)
    starts = torch.arange(SEQ).repeat(2, 1).t() // 8 * 8
    documents = Documents(starts) if cfg.data.document_mask else None
    batch = MicroBatch.of_samples(tokens, tokens, documents)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        stage(tokens, batch, ForwardPass(1, 0, training=True, samples=range(2), positions=batch.positions))
    return Counter(x.untyped_storage().nbytes() for x in kept.values())


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, pool: WorkerPool) -> dict[Any, tuple[Counter[int], Counter[int]]]:
    """For each case, what stages of one and of three blocks save."""
    cases = CASES if request.config.getoption("--full") else ALWAYS
    cfgs = [config(f, n, z, r, *layout, p) for f, z, r, layout, p in cases for n in (1, 3)]
    sizes, *others = pool.run(4, saved, cfgs)
    assert all(other == sizes for other in others)
    return dict(zip(cases, zip(sizes[::2], sizes[1::2])))


@pytest.mark.parametrize("case", always_run(CASES, *ALWAYS), ids=str)
def test_saved_tensors_are_the_rows_of_the_plan(measured: Any, case: Any) -> None:
    (few, more), (family, zero, recompute, layout, precision) = measured[case], case
    tp, sequence = layout
    cfg = config(family, 3, zero, recompute, tp, sequence, precision)
    rows = Counter(row.bytes for row in saved_by_block(cfg, DENSE))
    assert more - few == Counter({size: 2 * count for size, count in rows.items()})
    assert sum(size * count for size, count in rows.items()) == block_activations(cfg, DENSE)
    planned = memory_per_rank(cfg, Grid.of(4, tp=layout[0]))[0]
    if recompute == "none" and family != "gemma2":  # else the plan also counts what backward adds
        total = sum(size * count for size, count in more.items())
        assert total == pytest.approx(planned.activations + planned.logits, rel=0.02)
