"""`megalite estimate` of a model with experts: what the plan says of memory, work and messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from megalite.core.mesh.grid import Grid
from megalite.core.parts.families import PRESETS
from megalite.core.parts.ffn.experts import FEED_FORWARD
from megalite.core.parts.schedules.steady import paired as paired_shares
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.runtime.options.cli import parse
from tests.unit.extras.estimate.fake_runs import Tool
from tests.unit.extras.estimate.tools import started
from tests.unit.extras.plan.models import NEW_PRESETS

pytestmark = pytest.mark.full
# A layer of each kind that a preset has, at its sizes.
OF_PRESETS = "--precision bf16 --vocab-divisible-by 16 --tp 2 --ep 4 --num-layers 4 --global-batch-size 4"
QWEN = (  # a layer of it, in one micro-batch
    "--preset qwen3-30b-a3b --vocab-size 512 --vocab-divisible-by 16 --precision bf16 --micro-batch-size 1 "
    "--seq-len 4096 --mock-data --device cuda --moe-memory-factor 1"
)
FLAGS = (
    "--arch mixtral --num-layers 4 --hidden-size 256 --num-heads 4 --num-kv-heads 4 --ffn-hidden-size 512 "
    "--num-experts 8 --vocab-size 512 --seq-len 128 --global-batch-size 16 --mock-data --device cuda "
    "--ep 2 --tp 2"
)


@pytest.fixture(scope="module")
def tool() -> Iterator[Tool]:
    with started() as made:
        yield made


@pytest.mark.parametrize("preset", NEW_PRESETS)
def test_plans_of_presets(tool: Tool, preset: str) -> None:
    """What a step of the new families holds, and what the plan says of it; it errs to the safe side."""
    dense = [str(i) for i in PRESETS[preset].get("moe_dense_layers", ()) if i < 4]
    words = ["--moe-dense-layers", *dense] if dense else []
    real = tool.figures(" ".join(["--world 8", OF_PRESETS, "--preset", preset, *words]))
    plan, states, peak = real["predicted_bytes"], real["states_bytes"], real["peak_bytes"]
    assert plan["weights"] + plan["main_grad"] + plan["optimizer"] == pytest.approx(states, rel=1e-3)
    assert 0.99 < plan["total"] / peak < 1.06
    assert 0.98 < (plan["total"] - states) / (peak - states) < 1.35


@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
def test_recomputation_does_not_wait_for_sizes_again(tool: Tool, dispatch: str) -> None:
    sizes = "--num-layers 2 --global-batch-size 4 --micro-batch-size 1 --precision bf16 --recompute full"
    real = tool.figures(f"{FLAGS} {sizes} --world 4 --moe-dispatch {dispatch}")
    assert real["host_syncs_in"] == {"status of the step": 1, "rows of experts": 2 * 2}


@pytest.mark.parametrize("bias", ["", "--mlp-bias"])
def test_experts_of_one_rank_never_make_the_host_wait(tool: Tool, bias: str) -> None:
    """Forward, backward and recomputation: the sizes stay on the device. One launch per weight gradient."""
    sizes = "--num-layers 2 --global-batch-size 4 --micro-batch-size 1"
    real = tool.figures(f"{FLAGS} {sizes} --ep 1 --precision bf16 --recompute full --world 2 {bias}")
    assert real["host_syncs_in"] == {"status of the step": 1}
    assert real["calls"]["backward"]["megalite::triton_grouped_wgrad_"] == 2 * 2 * 4


def test_a_layer_of_experts_keeps_no_outputs() -> None:
    """Bytes of a micro-batch of 4096 tokens, k 8, that plans count for one layer of Qwen3-30B-A3B."""
    assert sum(kept.bytes for kept in FEED_FORWARD.saved(parse(QWEN.split()).config)) < 290e6


def test_what_a_layer_of_experts_launches(tool: Tool) -> None:
    """Of Qwen3's kind, in one micro-batch; a GPU that is late in a step is late here first."""
    flags = FLAGS.replace("mixtral", "qwen3_moe").replace("--ep 2 --tp 2", "--precision bf16 --micro-batch-size 1")
    words = f"--world 1 {flags} --global-batch-size 1 --moe-ffn-size 128 --moe-topk 2"
    calls = [tool.figures(f"{words} --num-layers {n}")["calls"] for n in (1, 2)]
    added = {way: Counter(calls[1][way]) - Counter(calls[0][way]) for way in ("forward", "backward")}
    assert {way: sum(found.values()) for way, found in added.items()} == {"forward": 52, "backward": 34}
    # What each token's experts, and each expert's tokens, take beside the dense layer's.
    assert added["forward"]["aten::sort"] == added["forward"]["megalite::triton_combine_rows"] == 1
    assert added["backward"]["megalite::triton_grouped_wgrad_"] == 2


@pytest.mark.parametrize(("ep", "most"), [(1, 9.1), (2, 25.1)])
def test_what_a_row_costs_on_its_way(tool: Tool, ep: int, most: float) -> None:
    """Bytes that kernels move for each of k T H elements, of 2 bytes, to the experts and back, forward and backward.

    Rows that another rank sends are sorted on arrival and before they return.
    """
    words = f"--world {ep} --ep {ep} --global-batch-size {ep} {QWEN}"
    moved = [tool.figures(f"{words} --num-layers {n}")["calls_bytes"] for n in (1, 2)]
    way = ("megalite::triton_spread_rows", "megalite::triton_combine_rows", "aten::index")
    added = [Counter(moved[1][d]) - Counter(moved[0][d]) for d in ("forward", "backward")]
    assert "megalite::triton_expert_weights_grad" not in added[1]
    elements = 8 * 4096 * 2048
    assert sum(figures[name] for figures in added for name in way) / elements <= most


@pytest.mark.parametrize(("dispatch", "precision"), [("alltoall", "bf16"), ("allgather", "fp16")])
def test_the_busiest_rank_of_ep(tool: Tool, dispatch: str, precision: str) -> None:
    """With torch's products, and with Triton's."""
    flags = [*FLAGS.split(), "--precision", precision, "--mlp-bias", "--moe-dispatch", dispatch]
    real, cfg = tool.figures(" ".join([*flags, "--rank 0 --world 8"])), parse(flags).config
    (plan,) = memory_per_rank(cfg, Grid.from_config(cfg.parallel, 8))
    assert plan.total == pytest.approx(real["peak_bytes"], rel=0.1)
    assert plan.weights + plan.main_grad + plan.optimizer == pytest.approx(real["states_bytes"], rel=0.01)
    # Three passes over 2 experts of each of 512 tokens, with the busiest rank's share, on two ranks of tp.
    m, tokens = cfg.model, 4 * 128
    experts = 6 * tokens * m.moe_topk * 3 * m.hidden_size * m.ffn_size * m.num_layers * 1.5 / 2
    router = 6 * tokens / 2 * m.hidden_size * 8 * m.num_layers
    attention = (
        6 * tokens * 4 * m.hidden_size**2 * m.num_layers / 2 + 6 * tokens * 128 * m.hidden_size * m.num_layers / 2
    )
    head = 6 * tokens * m.hidden_size * 512 / 2
    assert real["flops"] == pytest.approx(experts + router + attention + head, rel=0.05)
    # For each layer and micro-batch.
    assert real["host_syncs_in"] == {"status of the step": 1, "rows of experts": 4 * 4}
    counts = {"all_to_all": 1 + 6} if dispatch == "alltoall" else {"all_gather": 1 + 3, "reduce_scatter": 3}
    assert {name: row["count"] for name, row in real["collectives"]["ep"].items()} == {
        name: 4 * 4 * count for name, count in counts.items()
    }


@pytest.mark.parametrize(
    ("more", "schedule"),
    [("", "1f1b"), ("--pp 2", "1f1b-eager"), ("--pp 2 --vp 2", "interleaved")],
    ids=["pp1", "pp2", "interleaved"],
)
def test_pairs_hide_their_exchanges_and_hold_what_is_planned(tool: Tool, more: str, schedule: str) -> None:
    """What stays in the open is that of passes without another beside them; and so says the plan."""
    shape = f"{QWEN} --ep 8 --num-layers 4 --world {16 if more else 8} --global-batch-size 32 {more}"
    plain, paired = (tool.figures(f"{shape} {flag}") for flag in (f"--schedule {schedule}", "--moe-overlap"))
    assert paired["kernels"] == plain["kernels"]
    exposed, whole = (each["collectives"]["ep"]["all_to_all"]["exposed_s"] for each in (paired, plain))
    cfg = parse(f"{QWEN} --ep 8 --num-layers 4 --global-batch-size 32 {more} --moe-overlap".split()).config
    name = "interleaved-overlap" if cfg.parallel.vp > 1 else "1f1b-overlap"
    (share, *_) = paired_shares(name, cfg.parallel.pp, cfg.parallel.vp, 4)
    assert exposed == pytest.approx((1 - share) * whole, rel=0.1)
    assert paired["predicted_bytes"]["total"] == pytest.approx(paired["peak_bytes"], rel=0.03)


@pytest.mark.parametrize(
    "more", ["--tp 2", "--tp 2 --etp 1", "--recompute full", "--zero 3", "--moe-dispatch allgather"]
)
def test_plans_of_pairs(tool: Tool, more: str) -> None:
    real = tool.figures(f"{QWEN} --ep 8 --num-layers 4 --world 16 --global-batch-size 64 --moe-overlap {more}")
    assert real["predicted_bytes"]["total"] == pytest.approx(real["peak_bytes"], rel=0.05)
