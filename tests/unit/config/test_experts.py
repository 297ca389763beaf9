"""Options of experts: what is refused, in one line with the remedy, and what is derived."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from megalite.core.options.model import ModelConfig
from megalite.core.parts.options.expert_options import choose_dispatch
from megalite.runtime.options.cli import parse, to_yaml

EXPERTS = "--num-experts 8 --moe-ffn-size 32"


def test_one_expert_of_each_token_has_a_weight_of_its_own() -> None:
    assert parse(f"{EXPERTS} --moe-topk 1 --no-moe-renormalize".split()).config.model.moe_topk == 1


def test_whole_experts_may_have_any_width() -> None:
    parse(["--num-experts", "8", "--moe-ffn-size", "30", "--tp", "4", "--etp", "1"])


@pytest.mark.parametrize(
    ("ep", "topk", "chosen"),
    [
        (1, 2, "alltoall"),
        (2, 2, "allgather"),
        (2, 3, "allgather"),
        (4, 8, "allgather"),
        (8, 8, "allgather"),
        (8, 6, "alltoall"),
    ],
)
def test_dispatch_is_chosen_by_what_a_rank_sends(ep: int, topk: int, chosen: str) -> None:
    """Rows of a rank of ep whose tokens each go to k of 64 experts, counted over random choices; the same number is
    sorted once less by allgather.
    """
    cfg = parse(f"--num-experts 64 --moe-ffn-size 32 --moe-topk {topk} --ep {ep} --moe-dispatch auto".split()).config
    experts = np.random.default_rng(0).permuted(np.tile(np.arange(64), (10_000, 1)), axis=1)[:, :topk]
    exchanged = (experts // (64 // ep) != 0).sum() / len(experts)
    dispatch, why = choose_dispatch(cfg.model, cfg.parallel)
    assert dispatch == chosen
    assert (ep - 1 < 1.02 * exchanged) == (chosen == "allgather")
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
