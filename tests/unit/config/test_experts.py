"""Options of experts: what is refused, in one line with the remedy, and what is derived."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.core.options.model import ModelConfig
from megalite.core.options.parallel import SCHEDULES
from megalite.core.parts.options.expert_options import choose_dispatch
from megalite.runtime.options.cli import parse, to_yaml

EXPERTS = "--num-experts 8 --moe-ffn-size 32"
REFUSED = {
    f"{EXPERTS} --tp 2 --etp 1 --no-sequence-parallel": "--etp 1 with --tp 2 --no-sequence-parallel: whole experts",
    "--moe-per-layer-logging": "--moe-per-layer-logging: needs a model with experts; give",
    f"{EXPERTS} --moe-memory-factor 0.5": "--moe-memory-factor 0.5: must be at least 1",
    f"{EXPERTS} --moe-shared-ffn-size 6 --tp 4": "--moe-shared-ffn-size 6: must be divisible by --tp 4",
    f"{EXPERTS} --etp 2": "--etp 2: must be one of 1, tp",
    f"{EXPERTS} --moe-shared-gate": "--moe-shared-gate: needs a shared expert",
    f"{EXPERTS} --moe-dense-layers 0 4": "--moe-dense-layers 0 4: must be some, not all, of the layers 0 to 3",
    f"{EXPERTS} --moe-dense-layers 0 1 2 3": "must be some, not all",
    "--num-experts 8 --moe-ffn-size 48 --hidden-size 128 --seq-len 128 --fp8 mxfp8 --fp8-emulate --precision bf16": (
        "48 inner features of an expert on a rank: must be divisible by 32"
    ),
    "--moe-overlap": "--moe-overlap: needs a model with experts; give",
    f"{EXPERTS} --moe-overlap": "--moe-overlap with --ep 1: there is no exchange to hide",
    f"{EXPERTS} --ep 2 --moe-overlap --zero 3": "--moe-overlap with --zero 3: a layer's weights are released",
    **{
        f"{EXPERTS} --ep 2 --moe-overlap --schedule {name}": f"--moe-overlap with --schedule {name}: runs no forward"
        for name in SCHEDULES
        if not name.endswith("-overlap")
    },
    "--schedule 1f1b-overlap": "--schedule 1f1b-overlap: runs micro-batches in pairs",
    f"{EXPERTS} --ep 2 --schedule interleaved-overlap --vp 2": "give --moe-overlap, or another schedule",
    f"{EXPERTS} --moe-topk 1": "--moe-topk 1: renormalized, its weight is always 1",
    f"{EXPERTS} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01": "there is no balance loss to weigh",
    f"{EXPERTS} --moe-router-enable-expert-bias": "--moe-router-enable-expert-bias: is added to sigmoids",
    f"{EXPERTS} --moe-router-bias-update-rate 0.01": "--moe-router-bias-update-rate 0.01: there is no bias to move",
}


@pytest.mark.parametrize("argv", REFUSED)
def test_what_does_not_fit_is_refused(argv: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(argv.split())
    message = str(refused.value)
    assert REFUSED[argv] in message
    assert "\n" not in message


def test_one_expert_of_each_token_has_a_weight_of_its_own() -> None:
    assert parse(f"{EXPERTS} --moe-topk 1 --no-moe-renormalize".split()).config.model.moe_topk == 1


def test_whole_experts_may_have_any_width() -> None:
    parse(["--num-experts", "8", "--moe-ffn-size", "30", "--tp", "4", "--etp", "1"])


@pytest.mark.parametrize(
    ("ep", "topk", "chosen"),
    [(1, 2, "alltoall"), (2, 2, "alltoall"), (2, 3, "allgather"), (4, 8, "allgather"), (8, 6, "alltoall")],
)
def test_dispatch_is_chosen_by_what_a_rank_sends(ep: int, topk: int, chosen: str) -> None:
    """Rows of a rank of ep whose tokens each go to k of 64 experts, counted over random choices."""
    cfg = parse(f"--num-experts 64 --moe-ffn-size 32 --moe-topk {topk} --ep {ep} --moe-dispatch auto".split()).config
    experts = np.random.default_rng(0).permuted(np.tile(np.arange(64), (10_000, 1)), axis=1)[:, :topk]
    exchanged = (experts // (64 // ep) != 0).sum() / len(experts)
    dispatch, why = choose_dispatch(cfg.model, cfg.parallel)
    assert dispatch == chosen
    assert (ep - 1 < 0.98 * exchanged) == (chosen == "allgather")
    sent, gathered = re.findall(r"([\d.]+) (?:rows per token by|by) \w+", why)
    assert (float(sent), float(gathered)) == pytest.approx((exchanged, ep - 1), rel=0.02)
    asked = replace(cfg.parallel, moe_dispatch="alltoall")
    assert choose_dispatch(cfg.model, asked) == ("alltoall", "as requested")


def test_options_of_experts_are_written_and_read() -> None:
    cfg = parse(f"{EXPERTS} --moe-dense-layers 0 2 --ep 4 --etp 1".split()).config
    assert cfg.model.moe_dense_layers == (0, 2)
    assert [cfg.model.is_moe(layer) for layer in range(4)] == [False, True, False, True]
    assert [cfg.model.block_kind(layer).feed_forward for layer in (0, 1)] == ["mlp", "moe"]
    assert ModelConfig.from_dict({**vars(cfg.model), "moe_dense_layers": [0, 2]}) == cfg.model
    assert "etp: '1'" in to_yaml(cfg)
    assert parse(["--num-experts", "4"]).config.model.moe_ffn_size == cfg.model.ffn_size
