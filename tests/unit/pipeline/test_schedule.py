"""Orders, peaks, messages and times of every schedule against recorded rows and closed forms."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.core.base.errors import UserError
from megalite.core.options.parallel import SCHEDULES
from megalite.core.parts.schedules.choose import USUAL_COSTS, Request, choose_schedule, name_of, simulate_all
from megalite.core.parts.schedules.pipeline import naive
from megalite.core.parts.schedules.simulate import simulate
from megalite.core.pipeline.order import PipelineSchedule
from megalite.core.pipeline.schedule import Costs, Op, Placement, build_schedule
from megalite.extras.view.schedule import order_sha
from megalite.runtime.options.cli import parse
from tests.rows import always_run

ROWS = defaultdict(list)
for _row in json.loads((Path(__file__).parents[2] / "data" / "schedule_expected.json").read_text())["rows"]:
    ROWS[_row["schedule"].replace("_", "-")].append(_row)
REAL = Costs(1.0, 1.05, 0.85)
REAL_WITH_TRANSFERS = Costs(1.0, 1.05, 0.85, transfer=0.05)


def test_rows_are_of_schedules_that_exist():
    assert ROWS.keys() <= SCHEDULES.keys()
    assert sum(map(len, ROWS.values())) == 191


@pytest.mark.parametrize("name", always_run(ROWS, "1f1b", "zb-v"))
def test_rows(name):
    """Every recorded row: order, peaks and messages equal, times and bubbles to the recorded digits."""
    for row in ROWS[name]:
        case = f"{name} pp{row['pp']} vp{row['vpp']} m{row['m']}"
        schedule = build_schedule(name, row["pp"], row["vpp"], row["m"])
        unit = simulate(schedule)
        assert order_sha(schedule) == row["order_sha"], case
        assert unit.peak_activations == row["peak_act_chunks"], case
        assert unit.peak_pending_w == row["peak_w_chunks"], case
        assert unit.messages == row["msgs_sent"], case
        assert unit.peak_receives == row["peak_recv_bufs"], case
        assert (unit.makespan, unit.ideal, max(unit.span)) == (row["makespan"], row["ideal"], row["span"]), case
        assert unit.bubble == pytest.approx(row["bubble_over_ideal"], abs=1e-6), case
        assert unit.idle_share == pytest.approx(row["idle_share"], abs=1e-6), case
        assert simulate(schedule, REAL).bubble == pytest.approx(row["bubble_real"], abs=1e-6), case
        comm = simulate(schedule, REAL_WITH_TRANSFERS.per_chunk(row["vpp"]), mode="free")
        assert comm.bubble == pytest.approx(row["bubble_real_comm"], abs=1e-6), case


@pytest.mark.parametrize(
    ("name", "vp", "transfer", "bubble"),
    [
        ("1f1b", 1, 0.0, 0.219),
        ("1f1b-eager", 1, 0.0, 0.219),
        ("interleaved", 2, 0.0, 0.109),
        ("interleaved", 4, 0.0, 0.055),
        ("zb-h1", 1, 0.0, 0.091),
        ("zb-v", 2, 0.0, 0.040),
        ("1f1b", 1, 0.1, 0.292),
        ("1f1b-eager", 1, 0.1, 0.234),
        ("interleaved", 2, 0.1, 0.142),
        ("interleaved", 4, 0.1, 0.122),
        ("zb-h1", 1, 0.1, 0.121),
        ("zb-v", 2, 0.1, 0.075),
    ],
)
def test_bubble_with_a_stream_per_direction(name, vp, transfer, bubble):
    costs = Costs(1.0, 1.05, 0.85, transfer).per_chunk(vp)
    assert simulate(build_schedule(name, 8, vp, 32), costs, "dir").bubble == pytest.approx(bubble, abs=5.1e-4)


def test_1f1b_by_hand():
    programs = build_schedule("1f1b", pp=2, vp=1, num_microbatches=2).programs
    assert " ".join(map(str, programs[0])) == "F0.0 SF0.0@1 F1.0 SF1.0@1 RB0.0@1 B0.0 RB1.0@1 B1.0"
    assert " ".join(map(str, programs[1])) == "RF0.1@0 RF1.1@0 F0.1 B0.1 SB0.1@0 F1.1 B1.1 SB1.1@0"


def _forwards(program):
    return [op for op in program if op.kind == "F"]


def test_interleaved_order_with_a_last_group_of_its_own_size():
    schedule = build_schedule("interleaved", pp=2, vp=2, num_microbatches=5, group_size=3)
    for rank, program in enumerate(schedule.programs):
        forwards = _forwards(program)
        backwards = [op for op in program if op.kind == "B"]
        assert "".join(str(op.microbatch) for op in forwards) == "0120123434"
        assert "".join(str(schedule.placement.chunk_of(op.stage)) for op in forwards) == "0001110011"
        assert "".join(str(op.microbatch) for op in backwards) == "0120123434"
        assert "".join(str(schedule.placement.chunk_of(op.stage)) for op in backwards) == "1110001100"
        assert {op.stage for op in program if op.is_compute} == {rank, rank + 2}


sizes = st.floats(0.1, 3.0)


@settings(max_examples=40, deadline=None)
@given(
    p=st.integers(1, 6), v=st.integers(1, 3), k=st.integers(1, 3), extra=st.integers(0, 7), f=sizes, i=sizes, w=sizes
)
def test_makespan_closed_forms(p, v, k, extra, f, i, w):
    """Bubble time of each schedule for any costs per chunk, from its formula."""
    costs = Costs(f, i, w)
    b = i + w
    m = k * p + extra
    expected = {
        ("naive", v, m): (p - 1) * m * v * (f + b),
        ("gpipe", v, m): (p - 1) * (f + b),
        ("1f1b", 1, m): (p - 1) * (f + b),
        ("1f1b-eager", 1, m): (p - 1) * (f + b),
        ("interleaved", v, k * p): (p - 1) * (f + b),
        ("zb-h1", 1, m): (p - 1) * max(f, i, f + i - w),
    }
    for (name, vp, count), bubble in expected.items():
        simulation = simulate(build_schedule(name, p, vp, count), costs)
        work = vp * count * (f + b)
        assert simulation.ideal == pytest.approx(work)
        assert simulation.makespan == pytest.approx(work + bubble), (name, p, vp, count)
    equal = Costs(f, f, f)
    simulation = simulate(build_schedule("zb-v", p, 2, m + p), equal)
    assert simulation.makespan == pytest.approx(2 * (m + p) * 3 * f + (p - 1) * f), (p, m + p)


@settings(max_examples=80, deadline=None)
@given(p=st.integers(1, 8), v=st.integers(1, 4), m=st.integers(1, 20), g=st.integers(1, 20))
def test_memory_and_messages_closed_forms(p, v, m, g):
    ranks = range(p)
    expected = {
        ("naive", v, m, None): [v for _ in ranks],
        ("gpipe", v, m, None): [v * m for _ in ranks],
        ("1f1b", 1, m, None): [min(p - r, m) for r in ranks],
        ("1f1b-eager", 1, m, None): [min(2 * (p - r) - 1, m) for r in ranks],
        ("zb-h1", 1, m, None): [min(p, m) for _ in ranks],
        ("zb-v", 2, m + 2 * p - 1, None): [2 * p for _ in ranks],
    }
    if p <= g <= m and (m % g == 0 or m % g >= p):
        expected["interleaved", v, m, g] = [min(2 * (p - r - 1) + (v - 1) * g + 1, m * v) for r in ranks]
    for (name, vp, count, group), peaks in expected.items():
        simulation = simulate(build_schedule(name, p, vp, count, group))
        assert simulation.peak_activations == peaks, (name, p, vp, count, group)
        ends = 2 * count if simulation.schedule.placement.v_shape else (2 * vp - 1) * count
        messages = [(ends if r in (0, p - 1) else 2 * vp * count) if p > 1 else 0 for r in ranks]
        assert simulation.messages == messages, (name, p, vp, count, group)


@settings(max_examples=40, deadline=None)
@given(p=st.integers(1, 8), m=st.integers(1, 15))
def test_zb_v_never_holds_more_than_1f1b_holds_on_rank_0(p, m):
    assert max(simulate(build_schedule("zb-v", p, 2, m)).peak_activations) <= 2 * p


@pytest.mark.parametrize("v_shape", [False, True])
@pytest.mark.parametrize(("pp", "vp"), [(1, 1), (1, 3), (4, 1), (4, 2), (3, 4)])
def test_placement_is_one_to_one(pp, vp, v_shape):
    place = Placement(pp, vp, v_shape)
    assert sorted(s for r in range(pp) for s in place.stages_of(r)) == list(range(pp * vp))
    for rank in range(pp):
        for chunk, stage in enumerate(place.stages_of(rank)):
            assert (place.rank_of(stage), place.chunk_of(stage)) == (rank, chunk)


def test_v_placement_turns_round_at_the_last_rank():
    assert [Placement(3, 4, True).rank_of(s) for s in range(12)] == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]
    schedule = build_schedule("zb-v", pp=2, vp=2, num_microbatches=3)
    handed_over = [op for op in schedule.programs[1] if op.stage == 2 and op.kind == "RF"]
    assert handed_over == []
    assert Op("RF", 0, 3, 1) in schedule.programs[0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_runs_any_schedule_without_a_transfer(name):
    (program,) = build_schedule(name, 1, SCHEDULES[name].vp or 1, 3).programs
    assert all(op.is_compute for op in program)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("interleaved", 4, 2, 7, 4), ["7 micro-batches", "remainder 3", "0 or at least pp", "multiple of 4", "gpipe"]),
        (("interleaved", 4, 2, 3), ["3 micro-batches", "pp 4", "gpipe"]),
        (("interleaved", 4, 2, 8, 3), ["groups of 3", "pp <= group size"]),
        (("interleaved", 4, 2, 8, 0), ["groups of 0"]),
        (("1f1b", 4, 2, 8), ["1f1b with vp 2", "requires vp 1", "--schedule interleaved"]),
        (("zb-v", 4, 1, 8), ["zb-v with vp 1", "requires vp 2", "--vp 2 or --schedule 1f1b"]),
        (("zb-h1", 4, 2, 8), ["requires vp 1"]),
        (("1f1b", 4, 1, 8, 4), ["group size 4", "only interleaved"]),
        (("1f1b", 0, 1, 8), ["pp 0", "at least 1"]),
        (("1f1b", 2, 1, 0), ["micro-batches 0", "at least 1"]),
        (("1F1B", 2, 1, 4), ["'1F1B'", "naive, gpipe, 1f1b"]),
    ],
)
def test_refusals_name_value_rule_and_remedies(args, words):
    with pytest.raises(UserError) as caught:
        build_schedule(*args)
    for word in words:
        assert word in str(caught.value)


def test_schedules_are_cached():
    assert build_schedule("1f1b", 4, 1, 8) is build_schedule("1f1b", 4, 1, 8)


def chosen(pp, vp, m, costs=USUAL_COSTS, **limits):
    """Name the schedule that is chosen for `m` micro-batches; costs of a rank's whole share."""
    return choose_schedule(Request(pp, vp, (m,), **limits), costs.per_chunk(vp)).name


def test_auto_in_a_run():
    assert chosen(4, 1, 8) == "zb-h1"
    assert chosen(4, 2, 8) == "zb-v"
    assert chosen(4, 4, 8) == "interleaved"
    assert chosen(1, 1, 8) == "1f1b"  # all are equal there: the plain one
    # Deferred weight gradients would keep what full recomputation brought back.
    assert chosen(4, 1, 8, split_backward=False) == "1f1b"
    assert chosen(4, 2, 8, split_backward=False) == "interleaved"
    for flags, name in (("--schedule 1f1b", "1f1b"), ("", "zb-h1"), ("--recompute full", "1f1b")):
        command = f"--num-layers 4 --hidden-size 8 --num-heads 2 --mock-data --pp 4 --global-batch-size 8 {flags}"
        assert name_of(parse(command.split()).config, 1) == name


def test_auto_counts_the_communication_over_tp():
    """A split backward pass waits for collectives that a fused one hides behind weight gradients."""

    def name(m: int, **flags: Any) -> str:
        words = [f"--{name} {value}" for name, value in flags.items()]
        command = f"--preset llama-3-70b --mock-data --pp 8 --global-batch-size {m} {' '.join(words)}"
        return name_of(parse(command.split()).config, 1)

    assert [name(m, tp=8) for m in (16, 256)] == ["zb-h1", "1f1b"]  # the bubble is 12 and 1 % of the step there
    assert name(256, tp=1) == name(64, tp=4) == "zb-h1"
    # One collective as long as a twentieth of a layer's forward pass: what a step waits for, by hand.
    costs = Costs(1.2, 1.25, 0.85, overlapped=0.1)
    simulation = simulate(build_schedule("1f1b", 2, 1, 4), costs)
    assert simulation.makespan == pytest.approx(5 * (1.2 + 1.25 + 0.85 - 0.1))
    assert costs.per_chunk(2).overlapped == 0.05


def test_auto_never_trades_memory_for_numbers_that_interleaved_cannot_run():
    """gpipe could run them, and would hold every micro-batch."""
    with pytest.raises(UserError, match="multiple of 4 micro-batches"):
        chosen(4, 3, 30)
    assert chosen(4, 2, 30) == "zb-v"


def test_auto_takes_only_schedules_that_say_so(monkeypatch):
    """This one holds the least of all, so it would change the answer above."""
    monkeypatch.setitem(SCHEDULES, "mine", PipelineSchedule(naive))
    assert "mine" in [s.schedule.name for s in simulate_all(4, 3, 30)]
    with pytest.raises(UserError, match="multiple of 4 micro-batches"):
        chosen(4, 3, 30)
    monkeypatch.setitem(SCHEDULES, "mine", PipelineSchedule(naive, auto=True))
    assert chosen(4, 3, 30) == "mine"


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_the_default_bound_is_what_the_classic_schedule_holds(pp, vp, m):
    if vp > 1 and (m < pp or 0 < m % pp < pp):
        return
    classic = build_schedule("1f1b" if vp == 1 else "interleaved", pp, vp, m)
    assert Request(pp, vp, (m,)).bound == max(simulate(classic).peak_activations)


@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 60),
    st.tuples(st.floats(0.5, 2), st.floats(0.5, 2), st.floats(0.1, 2), st.floats(0, 0.4)),
    st.sampled_from([None, 1.5, 100]),
)
@settings(max_examples=40, deadline=None)
def test_choice_from_small_samples_is_the_choice_over_all(pp, vp, m, costs, more):
    """Whatever the size, the chosen schedule is within the bound and within 0.2 % of the fastest that is."""
    bound = None if more is None else int(Request(pp, vp, (m,)).bound * more)
    request = Request(pp, vp, (m,), bound)
    try:
        chosen = choose_schedule(request, Costs(*costs))
    except UserError:
        chosen = None
    full = {s.schedule.name: s for s in simulate_all(pp, vp, m, Costs(*costs)) if SCHEDULES[s.schedule.name].auto}
    allowed = {name: s.makespan for name, s in full.items() if max(s.peak_activations) <= request.bound}
    assert (chosen is None) == (not allowed)
    if chosen is not None:
        assert allowed[chosen.name] <= min(allowed.values()) * 1.0021


def test_choose_takes_the_fastest_within_memory():
    assert chosen(8, 1, 32, REAL) == "zb-h1"
    assert chosen(8, 2, 32, REAL) == "zb-v"
    assert chosen(8, 4, 32, REAL) == "interleaved"
    # Without weight gradients to defer there is nothing to win: the plain one is taken.
    assert chosen(4, 1, 8, Costs(1, 2, 0)) == "1f1b"
    # Slow messages: the eager one hides them, where there is room for it.
    assert chosen(4, 1, 16, Costs(1, 2, 0, transfer=0.5), max_activations=7) == "1f1b-eager"
    assert chosen(4, 1, 16, Costs(1, 2, 0, transfer=0.5)) != "1f1b-eager"
    assert chosen(1, 1, 4) == "1f1b"


def test_choose_refuses_when_nothing_fits():
    with pytest.raises(UserError, match=r"memory for 3 .* holds at least 4 at pp 4, vp 1 \("):
        chosen(4, 1, 8, max_activations=3)


def test_choose_refuses_numbers_that_nothing_can_run():
    with pytest.raises(UserError, match="pp 0"):
        chosen(0, 1, 8)


def test_stage_scale_slows_one_stage():
    schedule = build_schedule("1f1b", 2, 1, 3)
    simulation = simulate(schedule, Costs(stage_scale=(1.0, 2.0)))
    assert simulation.busy == [9.0, 18.0]
    assert simulation.idle == [simulation.makespan - 9.0, simulation.makespan - 18.0]
    # The slow last rank never waits but for the first forward; after its last backward comes one on rank 0.
    assert simulation.makespan == 1 + 18 + 2


def test_jitter_is_bounded_and_seeded():
    schedule = build_schedule("zb-v", 4, 2, 8)
    plain = simulate(schedule, Costs(transfer=0.1))
    first, again, other = (simulate(schedule, Costs(transfer=0.1, jitter=0.2, seed=s)) for s in (1, 1, 2))
    assert first.makespan == again.makespan != other.makespan
    assert 0.8 * plain.makespan <= first.makespan <= 1.2 * plain.makespan
