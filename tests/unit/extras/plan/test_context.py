"""What the planner knows of --cp: the bytes that attention sends, the seconds they take, and when a search tries it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megalite.core.batch import Mask
from megalite.core.mesh import collectives
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.ops import resolve
from megalite.core.options.model import ModelConfig
from megalite.core.parts.context import share_attention
from megalite.core.parts.options.context_parallel import choose_comm
from megalite.extras.estimate.record import recorded_world
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.command import main
from megalite.extras.plan.report import context_rows
from megalite.extras.plan.search import pick, search
from megalite.extras.plan.time.context import Context, messages
from megalite.extras.plan.time.step import step_time
from megalite.runtime.options import cli
from tests.parity import jobs

TP, SEQ, BATCH = 2, 64, 3


def sent(model: ModelConfig, context: Context, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that leave rank 0 in attention, forward and backward."""
    posted: list[int] = []

    class Counted(collectives.PendingWork):
        def __init__(self, *args: Any, sent: int = 0) -> None:
            super().__init__(*args, sent=sent)
            posted.append(sent)

    monkeypatch.setattr(collectives, "PendingWork", Counted)
    grid = Grid.of(TP * context.ranks, cp=context.ranks, tp=TP)
    with recorded_world(0, grid):
        ctx = ParallelContext.create(grid, torch.device("cpu"))
        attention = share_attention(
            context.comm,
            context.neighbors,
            ctx,
            resolve("auto", "cpu", torch.float32),
            recomputed=not context.again,
            long=SEQ + 1,
        )
        heads = (model.num_heads // TP, *(2 * (model.kv_heads // TP,)))
        leaves = [torch.zeros(SEQ // context.ranks, BATCH, n, model.head_size, requires_grad=True) for n in heads]
        posted.clear()
        out = attention(*(x.permute(1, 2, 0, 3) for x in leaves), Mask(None))
        totals = [sum(posted)]
        out.sum().backward()
    return [*totals, sum(posted) - totals[0]]


@pytest.mark.parametrize(
    ("context", "kv_heads"),
    [
        (Context(4, "gather"), 4),
        (Context(8, "ring"), 4),
        (Context(2, "a2a", 2), 4),
        (Context(4, "a2a", 4, again=False), 4),
        (Context(4, "a2a", 4), 4),  # two key heads on a rank: each is copied
        (Context(8, "a2a+gather", 2), 8),
        (Context(8, "a2a+ring", 4), 2),
    ],
    ids=str,
)
def test_bytes_are_those_that_attention_sends(context: Context, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = jobs.llama(hidden_size=64, num_heads=8, num_kv_heads=kv_heads, seq_len=SEQ)
    forward, backward = messages(model, model.block_kind(0), context, TP, BATCH * SEQ // context.ranks, 4)
    assert [sum(m.sent for m in each) for each in (forward, backward)] == sent(model, context, monkeypatch)


def test_bytes_of_the_published_table() -> None:
    """Llama 3 8B at cp 4 and tp 2 in bf16: K is what one rank's keys and values take."""
    model = jobs.llama(hidden_size=4096, num_heads=32, num_kv_heads=8, seq_len=8192)
    k = 2 * 2048 * 4 * 128 * 2
    both = {
        name: messages(model, model.block_kind(0), Context(4, name, 4 if name == "a2a" else 1), 2, 2048, 2)
        for name in ("gather", "ring", "a2a")
    }
    totals = {name: [sum(m.sent for m in each) for each in passes] for name, passes in both.items()}
    assert totals["gather"] == [3 * k, 3 * k + 2 * 3 * k]
    assert totals["ring"] == [3 * k, 3 * k + 2 * 4 * k]
    assert totals["a2a"][0] == 2 * 2048 * (16 + 4) * 128 * 2 * 3 / 4


def test_a_dry_run_says_what_each_kind_of_block_sends() -> None:
    """Three of four blocks of Qwen3-Next pass states: of two pieces' 32 heads, 128 x (128 + 128) in fp32 over 4 ranks,
    and the states back; three tokens of 8192 features of both pieces go to all.
    """
    words = "--preset qwen3-next-80b-a3b --cp 4 --cp-comm ring --precision bf16 --global-batch-size 1 --seq-len 8192"
    (name, text), (attention, other) = context_rows(cli.parse(words.split()).config)
    assert (name, attention) == ("context", "")
    assert other.startswith("ring (as requested); a rank sends ")
    mib = (2 * 32 * 128 * (256 + 128) * 4 * 3 / 4 + 2 * 3 * 8192 * 2 * 3) / 2**20
    sent = f"a rank sends {mib:.2f} MiB forward, {mib:.2f} backward per block and micro-batch"
    assert text == f"delta nets pass states; {sent}"


LONG = "--preset llama-3-8b --seq-len 131072 --global-batch-size 8 --precision bf16"


def seconds(words: str, cluster: str) -> dict[str, float]:
    cfg = cli.parse([*LONG.split(), "--device", "cuda", *words.split()]).config
    where = Cluster.parse(cluster)
    return step_time(cfg, Grid.from_config(cfg.parallel, where.gpus), where).terms


def test_messages_cost_time_unless_a_ring_hides_them() -> None:
    waits = {
        comm: seconds(f"--cp 16 --cp-comm {comm}", "h100:16")["cp"] for comm in ("gather", "ring", "a2a", "a2a+ring")
    }
    assert waits["ring"] < 0.2 * waits["gather"]
    assert all(wait > 0 for wait in waits.values())
    assert seconds("--cp 1 --tp 2", "h100:16")["cp"] == 0
    # Within a host, links are nine times as fast as the network.
    near, far = (seconds("--cp 8 --cp-comm a2a", f"h100:16,domain={domain}")["cp"] for domain in (8, 1))
    assert far > 4 * near
    # A few tokens on a rank are too little work to hide a hop behind.
    short = [
        seconds(f"--seq-len 4096 --micro-batch-size 1 --cp 8 --cp-comm {comm}", "h100:8,domain=1")["cp"]
        for comm in ("ring", "gather")
    ]
    assert short[0] > 0.5 * short[1]
    # Keys come again where attention is computed again.
    none, again = (
        seconds(f"--cp 16 --cp-comm gather --recompute {mode}", "h100:16")["recompute"]
        for mode in ("none", "selective")
    )
    assert none == 0
    assert again > waits["gather"] / 4


def test_a_search_shares_long_samples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LONG.split(), "--cluster", "h100:64", "--zero", "1", "--micro-batch-size", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = {f["cp"] for f in found}
    assert sizes == {1, 2, 4, 8, 16}  # 8,192 tokens on a rank and more
    assert all(f["tp"] * f["cp"] * f["pp"] * f["dp"] == 64 for f in found)
    best = found[0]
    assert best["fits"]
    assert best["cp"] > 1
    # Eight samples have no use for more than eight ranks of dp.
    assert best["dp"] <= 8
    assert not any(f["fits"] for f in found if f["cp"] == 1 and f["tp"] == f["pp"] == 1)


def test_short_samples_are_shared_only_if_nothing_else_fits() -> None:
    cfg = cli.parse(["--preset", "llama-3-8b", "--global-batch-size", "64", "--precision", "bf16"]).config
    fixed = {"zero", "micro_batch_size"}
    assert {f.options["cp"] for f in search(cfg, Cluster.parse("h100:16"), fixed)} == {1}
    # One sample for eight GPUs, and no more pipeline or tensor-parallel ranks: the rest share it.
    words = "--preset llama-3.2-1b --seq-len 4096 --global-batch-size 1 --micro-batch-size 1 --precision bf16"
    candidates = search(cli.parse([*words.split(), "--tp", "2"]).config, Cluster.parse("h100:8"), {"tp", "pp"})
    best = pick(candidates)
    assert best is not None
    assert (best.options["cp"], best.grid["dp"]) == (4, 1)
    assert choose_comm(best.cfg.model, best.cfg.parallel, False)[0] == "gather"


def test_a_given_cp_and_variant_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{LONG} --cluster h100:64 --cp 4 --cp-comm a2a --zero 1 --micro-batch-size 1"
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert "\n  cp: 4\n" in text
    assert "\n  cp_comm: a2a\n" in text
    assert "--cp 4 --cp-comm a2a" in text.partition("torchrun")[2]
    recipe = cli.parse(text.partition("pretrain_gpt.py ")[2].splitlines()[0].split()).config
    assert (recipe.parallel.cp, recipe.parallel.cp_comm) == (4, "a2a")
