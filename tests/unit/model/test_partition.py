"""Layers over stages: none dropped, none twice, and the dearest stage as cheap as can be."""

from __future__ import annotations

from itertools import accumulate, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.core.model.partition import block_costs, layer_split, split_layers
from megalite.core.options.model import ModelConfig
from megalite.core.options.stages import read_stages
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.time.step import step_time
from megalite.runtime.options.cli import parse


def counts(ranges: list[range]) -> list[int]:
    assert [i for r in ranges for i in r] == list(range(ranges[-1].stop))
    return [len(r) for r in ranges]


def test_an_output_layer_worth_two_blocks_takes_their_place() -> None:
    assert counts(split_layers([1.0] * 32, 4, last=2.0)) == [9, 9, 8, 6]
    assert counts(split_layers([1.0] * 4, 4, first=50.0, last=50.0)) == [1, 1, 1, 1]
    assert counts(split_layers([1.0] * 5, 1, last=3.0)) == [5]


def test_layers_of_several_costs_are_spread_evenly() -> None:
    """Dense layers before those with experts; stages that are not the dearest are even too."""
    assert counts(split_layers([0.25] * 4 + [1.0] * 6, 4)) == [5, 2, 2, 1]
    assert counts(split_layers([3.0] + [1.0] * 8, 4)) == [1, 3, 3, 2]


@settings(max_examples=60, deadline=None)
@given(
    each=st.lists(st.sampled_from((0.5, 1.0, 2.5)), min_size=1, max_size=11),
    alike=st.booleans(),
    stages=st.integers(1, 6),
    first=st.floats(0, 4),
    last=st.floats(0, 4),
)
def test_no_split_is_cheaper(each: list[float], alike: bool, stages: int, first: float, last: float) -> None:
    each = [1.0] * len(each) if alike else each
    layers = len(each)
    if stages > layers:
        with pytest.raises(UserError, match="every stage needs a layer; lower --pp or --vp, or raise --num-layers"):
            split_layers(each, stages, first, last)
        return

    def dearest(parts: list[int]) -> float:
        ends = [0, *accumulate(parts)]
        costs = [sum(each[a:b]) for a, b in zip(ends, ends[1:])]
        costs[0] += first
        costs[-1] += last
        return max(costs)

    parts = counts(split_layers(each, stages, first, last))
    assert sum(parts) == layers
    assert min(parts) >= 1
    every = (
        [b - a for a, b in zip((0, *cuts), (*cuts, layers))] for cuts in combinations(range(1, layers), stages - 1)
    )
    assert dearest(parts) == pytest.approx(min(dearest(p) for p in every))


def test_models_are_split_whole() -> None:
    llama = ModelConfig.from_arch(
        "llama",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14336,
        vocab_size=128256,
        seq_len=8192,
    )
    # 2 of 32 blocks: 525 M multiply-adds of the head, 218 M of a block's matrices and 34 M of its attention.
    assert block_costs(llama)[1] == pytest.approx(525336576 / (218103808 + 33554432), rel=1e-6)
    for stages in (1, 3, 4, 7, 32):
        assert sum(counts(layer_split(llama, stages))) == 32
    assert counts(layer_split(llama, 4)) == [9, 9, 8, 6]


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("7,8*14,7", [7, *[8] * 14, 7]),
        ("7 9", [7, 9]),
        # Megatron-LM's form, with an example of its documentation of `--pipeline-model-parallel-layout`.
        ("Et*3|(tt|)*29,tttL", [3, *[2] * 29, 3]),
        ("Et*7|(t*8|)*14t*7L", [7, *[8] * 14, 7]),
        ("E|(t|)*6|L", [0, *[1] * 6, 0, 0]),
        ("E,((t*2|)*2t|)*2L", [2, 2, 1, 2, 2, 1, 0]),
        # Modules that predict further tokens are no layers.
        ("Ett|tm*2L", [2, 1]),
        ("Ett|t|(m)L", [2, 1, 0]),
    ],
)
def test_layouts_by_hand(text: str, counts: list[int]) -> None:
    assert read_stages(text) == tuple(counts)


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("--pp 2 --pipeline-layout 2,two", "has '2', which is no part of a layout"),
        ("--pp 2 --pipeline-layout 2,-2", "has '-2', which is not a number of layers"),
        ("--pp 2 --pipeline-layout tt|ttL", "must begin with E"),
        ("--pp 2 --pipeline-layout Ettx|ttL", "has 'x', which is no part of a layout"),
        (
            "--pp 2 --pipeline-layout Ettm|ttL --mtp-num-layers 1",
            "elsewhere than directly before L: modules are on the",
        ),
        ("--pp 3 --pipeline-layout Ett|ttm|L --mtp-num-layers 1", "elsewhere than directly before L: modules are on"),
        (
            "--pp 2 --pipeline-layout Ett|tmtL --mtp-num-layers 1",
            "elsewhere than directly before L: modules are on the",
        ),
        ("--pp 2 --pipeline-layout Ett|ttmL", r"--mtp-num-layers 0 with .* has 1 of them \(m\); change one"),
        ("--pp 2 --pipeline-layout Ett|ttmL --mtp-num-layers 2", r"-layers 2 with .* has 1 of them \(m\); change one"),
        ("--pp 2 --pipeline-layout Ett|tLtL", "has 'L' in a stage"),
        ("--pp 2 --pipeline-layout E((t*9999)*9999)*9999L", "stands for more than 10000"),
        ("--pp 2 --pipeline-layout 1*99999,99999*99999", "has more than 10000 stages"),
        ("--pp 5", "say with --pipeline-layout which have none"),
    ],
)
def test_layouts_that_cannot_be(flags: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        parse([*flags.split(), "--vocab-size", "90"])


def test_layouts_name_modules_or_not() -> None:
    for layout in ("Ett|ttmmL", "Ett|ttL", "2,2"):
        flags = f"--pp 2 --pipeline-layout {layout} --mtp-num-layers 2 --position rope --vocab-size 90"
        assert parse(flags.split()).config.parallel.stage_layers == (2, 2)


def test_the_layout_by_hand_is_what_is_planned() -> None:
    """Stages of the layout that balances by cost, written by hand, have the same memory and time; others do not."""
    plain = ["--preset", "llama-3-8b", "--pp", "4", "--precision", "bf16", "--global-batch-size", "64"]
    cluster, found = Cluster.parse("h100:32"), []
    for flags in ([], ["--pipeline-layout", "9,9,8,6"], ["--pipeline-model-parallel-layout", "Et*8|(t*8|)*2t*8L"]):
        cfg = parse([*plain, *flags, "--schedule", "1f1b"], dialect=DIALECT).config
        grid = Grid.from_config(cfg.parallel, 32)
        found.append((memory_per_rank(cfg, grid), step_time(cfg, grid, cluster)))
    assert found[0] == found[1]
    balanced, even = found[0], found[2]
    assert [rank.parameters for rank in even[0]][1:3] == [8 * 218_112_000] * 2
    assert even[0][1].total < balanced[0][1].total
    assert even[1].total > 1.04 * balanced[1].total  # the last stage has a head of two layers besides its eight
