"""The schedule of the page: pairs of `--moe-overlap`, whose two passes take turns and are measured as one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megalite.core.mesh.grid import Grid
from megalite.core.pipeline.schedule import Costs
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.view.page.timing import collect_schedule
from megalite.runtime.options import cli
from tests.unit.extras.view.runs import record_schedule

FLAGS = "--num-layers 4 --hidden-size 32 --num-heads 2 --vocab-size 64 --seq-len 8 --mock-data --device cpu --pp 2"
START, END, WAIT, CRITICAL, BESIDE = 4, 5, 6, 7, 9


@pytest.mark.parametrize(("name", "vp"), [("1f1b-overlap", 1), ("interleaved-overlap", 2), ("1f1b", 1)])
def test_a_pair_has_one_place_and_both_of_its_passes(tmp_path: Path, name: str, vp: int) -> None:
    whole = record_schedule(tmp_path, name, vp, Costs(forward=2.0, input_grad=3.0, weight_grad=1.0))
    cfg = cli.parse([*FLAGS.split(), "--vp", str(vp)], world=2, dialect=DIALECT).config
    told = collect_schedule(tmp_path, cfg, Grid.from_config(cfg.parallel, 2))
    for key in ("planned", "measured"):
        step = told[key]
        assert step["makespan"] == pytest.approx(whole), key
        for lane in step["ops"]:
            by_label = {op[0]: op for op in lane}
            pairs = [op for op in lane if op[BESIDE]]
            # After its warm-up a rank runs each forward pass beside a backward pass.
            assert bool(pairs) == name.endswith("overlap")
            for op in pairs:
                other = by_label[op[BESIDE]]
                assert other[BESIDE] == op[0]
                assert {op[1], other[1]} == {"F", "B"}
                assert op[START : END + 1] == other[START : END + 1]
                assert op[CRITICAL] == other[CRITICAL]
                assert op[END] - op[START] == pytest.approx(6)
            alone = {op[1]: op[END] - op[START] for op in lane if not op[BESIDE]}
            assert alone == {"F": pytest.approx(2), "B": pytest.approx(4)}
        # A chain from the beginning to the end of the step, without a gap: messages take no time here.
        chain = sorted({(op[START], op[END]) for lane in step["ops"] for op in lane if op[CRITICAL]})
        assert chain[0][0] == 0
        assert chain[-1][1] == pytest.approx(whole)
        assert all(later[0] == pytest.approx(earlier[1]) for earlier, later in zip(chain, chain[1:]))


@given(
    costs=st.builds(
        Costs,
        *[st.floats(1, 3)] * 4,
        st.tuples(*[st.floats(0.5, 2)] * 4),
    ),
    name=st.sampled_from(["1f1b", "interleaved", "zb-h1", "zb-v", "interleaved-overlap"]),
)
@example(Costs(2.0, 2.0, 2.0, 1.5, (0.8, 1.2)), "1f1b")
def test_the_critical_path_follows_what_was_waited_for(costs: Costs, name: str) -> None:
    vp = 1 if name in ("1f1b", "zb-h1") else 2
    costs = replace(costs, stage_scale=(costs.stage_scale or ())[: 2 * vp])
    cfg = cli.parse([*FLAGS.split(), "--vp", str(vp)], world=2, dialect=DIALECT).config
    with TemporaryDirectory() as folder:
        record_schedule(Path(folder), name, vp, costs)
        told = collect_schedule(Path(folder), cfg, Grid.from_config(cfg.parallel, 2))["planned"]
    chain = sorted({(op[START], op[END]) for lane in told["ops"] for op in lane if op[CRITICAL]})
    assert chain[0][0] == pytest.approx(0)
    assert chain[-1][1] == pytest.approx(told["makespan"])
    # The next one begins as the one before ends, or a message later: also where another rank was busy for longer.
    gaps = [later[0] - earlier[1] for earlier, later in zip(chain, chain[1:])]
    message = max(gaps)
    assert all(min(gap, message - gap) == pytest.approx(0, abs=1e-5) for gap in gaps), gaps
