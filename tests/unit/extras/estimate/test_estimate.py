"""`megalite estimate`: one rank's real training step without a GPU and without its peers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.extras.estimate.rank import run_step
from megalite.extras.estimate.record import Communication, recorded_world
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.runtime.options import cli
from tests.unit.extras.estimate.fake_runs import Tool
from tests.unit.extras.estimate.tools import started

ROOT = Path(__file__).resolve().parents[4]
GIB = 2**30

LLAMA_405B = (
    "--arch llama --num-layers 126 --hidden-size 16384 --num-heads 128 --num-kv-heads 8 --ffn-hidden-size 53248 "
    "--vocab-size 128256 --seq-len 8192 --precision bf16 --recompute none --global-batch-size 1024 --tp 8 --pp 16 "
    "--schedule 1f1b"
)
# 8 GB of weights on a rank, gathered over 32 hosts in 190 ms, and 380 ms of forward pass to hide that behind.
LLAMA_8B = (
    "--preset llama-3-8b --seq-len 8192 --micro-batch-size 4 --global-batch-size 128 --tp 2 --precision bf16 "
    "--recompute none"
)
ZERO3 = "--tp 2 --pp 2 --zero 3 --zero-whole-below 0 --schedule zb-h1"
BUDGETS = ("--preset llama-3.2-1b", "--preset llama-3-8b --num-layers 4")
LARGE_BATCH = "--precision bf16 --recompute none --seq-len 4096 --micro-batch-size 4 --global-batch-size 8"
TINY = (
    "--arch gpt2 --num-layers 4 --hidden-size 64 --num-heads 4 --vocab-size 90 --seq-len 16 --precision bf16 "
    "--global-batch-size 16 --hidden-dropout 0.1 --attention-dropout 0.1 --bucket-size 5000 --vocab-divisible-by 8"
)
HYBRID = """--arch llama --num-layers 4 --hidden-size 256 --num-heads 4 --ffn-hidden-size 512 --vocab-size 1024
 --linear-attention-freq 2 --linear-num-key-heads 8 --linear-num-value-heads 16 --linear-key-head-dim 64
 --linear-value-head-dim 64 --seq-len 8192 --precision bf16 --recompute full --micro-batch-size 2 --global-batch-size 2
 --tp 2"""
# Heads of the published size, 512 tokens of a sample on a rank.
SHARED = """--arch llama --num-layers 3 --hidden-size 256 --num-heads 8 --ffn-hidden-size 512 --vocab-size 512
 --linear-attention-freq 3 --linear-num-key-heads 16 --linear-num-value-heads 32 --linear-key-head-dim 128
 --linear-value-head-dim 128 --seq-len 8192 --precision bf16 --global-batch-size 1 --cp 16
 --num-kv-heads 2 --attention-output-gate --device cuda"""
FP8 = """--world 1 --num-layers 2 --hidden-size 256 --num-heads 4 --ffn-hidden-size 512 --vocab-size 512
 --seq-len 128 --global-batch-size 1 --precision bf16 --fp8"""


TINY_LLAMA = f"--world 1 {TINY} --arch llama --hidden-dropout 0 --attention-dropout 0"
SHARDED = f"--rank 15 --world 16 {ZERO3} {TINY}"


@pytest.fixture(scope="module")
def tool() -> Iterator[Tool]:
    """Where Triton is not installed."""
    with started("triton") as made:
        yield made


def states(run: dict[str, Any]) -> int:
    """What the memory model says of the bytes between steps."""
    return sum(run["predicted_bytes"][part] for part in ("weights", "main_grad", "optimizer"))


@pytest.mark.full
def test_a_rank_with_delta_nets(tool: Tool) -> None:
    """The rule works in slices of its heads, and ranks of cp exchange states, which the plan knows."""
    for run in (tool.figures(f"--world 2 {HYBRID}"), tool.figures(f"--world 16 {SHARED}")):
        assert 1 <= run["predicted_bytes"]["total"] / run["peak_bytes"] < 1.1


WINDOWS = (
    "--num-layers 2 --seq-len 4096 --vocab-size 512 --precision bf16 --micro-batch-size 1 --global-batch-size 1 "
    "--mock-data --device cuda"
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "launches", "of_all"),
    [
        ("--world 1 --preset gpt-oss-20b --num-experts 4", 2, (175, 161)),
        ("--world 2 --preset llama-3.2-1b --window 1024 --cp 2 --cp-comm gather", 4, (117, 88)),
        ("--world 2 --preset llama-3.2-1b --window 1024 --cp 2 --cp-comm ring", 6, (139, 108)),
        ("--world 2 --preset llama-3.2-1b --cp 2 --cp-comm ring", 4, (93, 88)),
    ],
)
def test_windows_and_shared_samples_have_no_masks(
    tool: Tool, words: str, launches: int, of_all: tuple[int, int]
) -> None:
    """By blocks of 512 queries with masks, gpt-oss had 9 launches of attention and 386 in all."""
    calls = tool.figures(f"{words} {WINDOWS}")["calls"]
    for way, most in zip(("forward", "backward"), of_all):
        assert {name: n for name, n in calls[way].items() if "attention" in name} == {
            f"aten::_flash_attention_{way}": launches
        }
        assert sum(calls[way].values()) <= most


@pytest.mark.full
def test_work_in_a_window(tool: Tool) -> None:
    """Whole samples, and ranks that share them, see the same pairs of queries and keys."""
    words = f"--preset llama-3.2-1b --window 1024 {WINDOWS}"
    whole, *ranks = (
        tool.figures(f"--world {world} {words} {more}")["flops"]
        for world, more in ((1, ""), (2, "--cp 2 --cp-comm ring"), (2, "--rank 1 --cp 2 --cp-comm ring"))
    )
    assert sum(ranks) == whole


@pytest.mark.full
def test_a_rank_of_llama_405b(tool: Tool) -> None:
    run = tool.figures(f"--world 8192 {LLAMA_405B}")
    assert tool.peak < GIB
    # Of 8 layers and the embedding, tp 8: 3.45e9 parameters at 2 + 4 + 12 / 64 bytes, plus tables of rope.
    assert 0 <= run["states_bytes"] - states(run) < 2**21
    assert run["peak_bytes"] / GIB == pytest.approx(84.78, abs=0.01)
    assert run["peak_bytes"] == pytest.approx(run["predicted_bytes"]["total"], rel=0.02)
    assert run["peak_during"] == "B0.0"
    assert run["peak_holders"]["activations"] / GIB == pytest.approx(63.87, abs=0.01)
    # 2 x 3 FLOPs per parameter of the matrices and token, and causal attention: 5.5 products of half of S x S.
    tokens, layers, s = 16 * 8192, 8, 8192
    matrices = 6 * layers * (16384 * (16384 * 2 + 1024 * 2) + 3 * 16384 * 53248) / 8
    assert run["flops"] == pytest.approx(tokens * (matrices + layers * 7 * s * 16384 / 8), rel=1e-3)
    tp = run["collectives"]["tp"]
    # Each layer gathers twice and scatters twice in each direction, and gathers its inputs twice more in backward.
    assert tp["all_gather"]["count"] == 16 * (8 * 6 + 1)
    assert tp["reduce_scatter"]["count"] == 16 * (8 * 4 + 1)
    assert tp["all_gather"]["bytes"] == 196 * GIB
    assert run["collectives"]["pp"]["send"] == {"count": 16, "bytes": GIB // 2, "exposed_s": 0.0}
    assert run["host_syncs"] == 1


@pytest.mark.full
def test_an_installed_triton_changes_nothing(tool: Tool) -> None:
    pytest.importorskip("triton")
    with (other := Tool()).process:
        run = other.figures(SHARDED)
    assert run == tool.figures(SHARDED)
    assert "triton: rmsnorm, layernorm" in run["ops"]


@pytest.mark.full
def test_fp8_where_triton_is_not_installed(tool: Tool) -> None:
    calls = [tool.figures(f"{FP8} {recipe}")["calls"] for recipe in ("blockwise", "rowwise", "tensorwise")]
    assert [run["forward"]["aten::_scaled_mm"] for run in calls] == [8, 8, 8]
    # Whole rows and tensors are cast after their maxima.
    assert ["megalite::triton_quantize" in run["forward"] for run in calls] == [True, False, False]


@pytest.mark.full
def test_a_library_that_is_named_is_there(tool: Tool) -> None:
    assert "cuda: adamw" in tool.figures(f"--world 2 {TINY} --ops adamw=cuda")["ops"]
    assert "adamw" not in tool.figures(SHARDED)["ops"].partition("cuda: ")[2]


@pytest.mark.parametrize(
    ("rank", "options", "peak"),
    [
        (0, "", 84.43),
        (15, "", 22.45),
        (0, "--schedule zb-h1", 84.96),
        (8, "--schedule zb-h1", 83.25),
        (15, "--recompute full --loss-chunk 2048", 19.28),
        (0, "--recompute selective", 84.36),
    ],
)
def test_dry_run_predicts_the_peak(rank: int, options: str, peak: float) -> None:
    # GiB that the tool found for other pipeline ranks and options of the run above: half a minute of computation.
    cfg = cli.parse(f"{LLAMA_405B} {options}".split()).config
    assert memory_per_rank(cfg, Grid.of(8192, tp=8, pp=16))[rank].total / GIB == pytest.approx(peak, rel=0.02)


@pytest.mark.full
def test_sharded_weights_of_the_last_stage(tool: Tool) -> None:
    run = tool.figures(SHARDED)
    assert run["coords"] == {"pp": 1, "dp": 3, "cp": 0, "tp": 1}
    assert set(run["collectives"]) == {"dp", "pp", "pp_grad", "tp", "ends", "world"}
    # Shares of a quarter: 2 + 4 + 12 bytes per parameter over 4 ranks.
    assert 0 <= run["states_bytes"] - states(run) < 40_000
    # 4 micro-batches: forward gathers each unit, backward all but the embedding; a norm's are kept by its block.
    assert run["collectives"]["dp"]["all_gather"]["count"] > 4 * 2 * 3
    assert run["timeline"][-1]["op"].startswith("W")


@pytest.mark.full
def test_the_program_is_the_same_on_a_cpu(tool: Tool) -> None:
    # The test of all ranks runs on CPU tensors, which takes a tenth of the time.
    cfg = cli.parse(f"{ZERO3} {TINY}".split()).config
    grid = Grid.of(16, tp=2, pp=2)
    with recorded_world(15, grid) as log:
        first = run_step(build_engine(cfg, ParallelContext.create(grid, torch.device("cpu"))), log)
    posted = Counter((event.axis, event.kind) for event in log[first:] if isinstance(event, Communication))
    found = tool.figures(SHARDED)["collectives"]
    assert posted == {(axis, kind): v["count"] for axis, kinds in found.items() for kind, v in kinds.items()}


@pytest.mark.full
def test_gathering_weights_hides_behind_the_forward_pass(tool: Tool) -> None:
    gathers = tool.figures(f"--world 64 {LLAMA_8B}")["collectives"]["dp"]["all_gather"]
    assert gathers["bytes"] == pytest.approx(8.03e9, rel=1e-3)
    # With one hardware queue, gathers that were all posted at once would hold the first kernel up for 190 ms.
    assert gathers["exposed_s"] < 0.02


@pytest.mark.full
def test_what_a_layer_launches(tool: Tool) -> None:
    """In 16 micro-batches; each operation more is one that the host has to start, and memory that is read again."""
    one, two = (tool.figures(f"{TINY_LLAMA} --num-layers {n}")["calls"] for n in (1, 2))
    added = {way: Counter(two[way]) - Counter(one[way]) for way in one}
    expected = {
        "forward": {"triton_norm": 2, "mm": 4, "triton_rope_": 1, "_scaled_dot_product_flash_attention": 1}
        | {"triton_glu": 1, "add": 1},
        "backward": {"triton_norm_backward": 2, "mm": 4, "addmm": 4, "triton_rope_pack": 1}
        | {"_scaled_dot_product_flash_attention_backward": 1, "triton_glu_backward": 1, "add": 1},
    }
    # A first contribution is mm, later ones are addmm.
    first = {"mm": 4, "addmm": -4}
    for way, calls in expected.items():
        want = {name: 16 * count + (first.get(name, 0) if way == "backward" else 0) for name, count in calls.items()}
        assert {name.rpartition(":")[2]: count for name, count in added[way].items()} == want
    assert [sum(calls.values()) for calls in expected.values()] == [10, 14]


@pytest.mark.full
@pytest.mark.parametrize("model", BUDGETS)
def test_computed_times_on_the_page(tool: Tool, model: str) -> None:
    table = tool.says(f"--world 1 --budget {LARGE_BATCH} {model}").strip()
    assert table.startswith("| computed, not measured |")
    assert table in (ROOT / "docs" / "performance.md").read_text()


@pytest.mark.full
def test_a_window_takes_the_kernel_that_skips_what_is_not_seen(tool: Tool) -> None:
    full, window = (tool.figures(f"{TINY_LLAMA} {words}") for words in ("", "--window 5"))
    # 16 micro-batches of one sample, 4 layers.
    assert window["calls"]["forward"]["torch_attn::_varlen_attn"] == 16 * 4
    assert window["calls"]["backward"]["torch_attn::_varlen_attn_backward"] == 16 * 4
    assert not any("scaled_dot_product" in name for calls in window["calls"].values() for name in calls)
    # The first query sees one key, the fifth and all later ones five; causal attention counts as half of all pairs.
    pairs = 1 + 2 + 3 + 4 + 12 * 5
    per_pair = 2 * (2 + 5) * 16 * 4  # two products forward and five backward, heads of 16, 4 of them
    assert full["flops"] - window["flops"] == 16 * 4 * per_pair * (16 * 16 // 2 - pairs)
    # There is no mask, in the run as in the plan.
    for figure in ("peak_bytes", "predicted_bytes"):
        assert window[figure] == full[figure]


@pytest.mark.full
def test_the_output_layer_in_chunks_of_tokens(tool: Tool) -> None:
    run = tool.figures(f"--world 1 --budget {TINY} --vocab-size 256 --global-batch-size 2 --loss-chunk 12")
    part = run["output layer"]
    # Two micro-batches of 16 tokens in chunks of 12 and 4; 12 tokens x 256 rows are the FLOPs of 16 x 192 (q, k and v).
    assert (part["kernels"], part["flops"]) == (2 * 2 * 3, 2 * 3 * 2 * 16 * 64 * 256)
    assert run["products, forward"]["flops"] == 2 * 4 * 2 * 16 * 64 * (192 + 64 + 256 + 256)
    assert part["seconds"]["h200"] > 0


@pytest.mark.full
def test_the_page_the_picture_and_a_refusal(tool: Tool, tmp_path: Path) -> None:
    assert "tp        all_gather" in tool.says(f"--world 2 --tp 2 --png {tmp_path}/memory.png {TINY}")
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    refused = tool.says(f"--world 2 --rank 2 {TINY}")
    assert refused == "error: --rank 2: a world of 2 has ranks 0 to 1; choose one"


def test_a_missing_compiler_is_a_user_error() -> None:
    command = [sys.executable, "tools/estimate.py", "--world", "2"]
    environment = {**os.environ, "PATH": "/nonexistent"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 2
    assert "requires a C++ compiler" in done.stderr
