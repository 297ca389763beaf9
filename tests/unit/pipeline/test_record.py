"""Recorded steps: what a real run writes, and that reading it gives back the times that were written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.core.parts.schedules.simulate import Event, Simulation, simulate
from megalite.core.pipeline.order import together
from megalite.core.pipeline.schedule import Costs, Op, build_schedule
from megalite.extras.view.recording import measured_costs, measured_step, read_recording
from megalite.extras.view.schedule import main
from megalite.runtime.record.schedule_recorder import Recorder
from tests.parity import jobs
from tests.workers import WorkerPool

COSTS = Costs(3.0, 2.0, 1.0, transfer=0.5, stage_scale=(1.0, 0.8, 1.2, 1.0))


def write_recording(folder: Path, simulation: Simulation, steps: dict[int, float]) -> None:
    """The files of a run in which step n took `steps[n]` times the simulated times, read as milliseconds."""
    schedule = simulation.schedule
    done = {(e.rank, str(e.op)): (e.start, e.finish) for e in simulation.compute}
    (folder / "schedule").mkdir(parents=True)
    for rank, program in enumerate(schedule.programs):
        head = {"schedule": schedule.name, "pp": schedule.pp, "vp": schedule.vp}
        head |= {"num_microbatches": schedule.num_microbatches, "pipeline_rank": rank, "device": "cpu"}
        lines: list[dict[str, Any]] = [head]
        for step, factor in steps.items():
            clock, ops = 0.0, []
            for op in program:
                ready, finish = done.get((rank, str(op)), (clock, clock))
                ops.append([str(op), *(t * factor / 1e3 for t in (clock, ready, finish))])
                clock = finish
            lines.append({"step": step, "ops": ops})
        path = folder / "schedule" / f"pipeline_rank_{rank}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(("name", "pp", "vp"), [("1f1b", 4, 1), ("zb-h1", 4, 1), ("zb-v", 2, 2), ("interleaved", 2, 2)])
def test_reading_gives_back_what_was_written(tmp_path: Path, name: str, pp: int, vp: int) -> None:
    simulation = simulate(build_schedule(name, pp, vp, 6), COSTS)
    write_recording(tmp_path, simulation, {10: 1.0, 11: 3.0, 12: 2.0})
    recording = read_recording(tmp_path)
    assert recording.schedule == simulation.schedule
    assert recording.typical_step() == 12
    measured = measured_step(recording, 10)
    assert measured.makespan == pytest.approx(simulation.makespan)
    assert measured.busy == pytest.approx(simulation.busy)
    assert measured.bubble == pytest.approx(simulation.bubble)
    assert len(measured.compute) == len(simulation.compute)
    assert len(measured.transfers) == sum(simulation.messages)
    # Planned with the costs of the recording, the step is the recorded one again.
    costs = measured_costs(recording, 11)
    assert costs.transfer == pytest.approx(1.5)
    assert costs.stage_scale == pytest.approx(COSTS.stage_scale)
    assert simulate(recording.schedule, costs).makespan == pytest.approx(3 * simulation.makespan)


def test_a_pair_shows_as_both_of_its_passes(tmp_path: Path) -> None:
    """It is recorded as its forward pass, and the backward pass as empty at its end: pictures had one bar for two."""
    simulation = simulate(build_schedule("1f1b-overlap", 2, 1, 6), Costs(3.0, 2.0, 1.0))
    whole = {(e.rank, e.op): e for e in simulation.compute}
    for rank, program in enumerate(simulation.schedule.programs):
        for op, *beside in together(op for op in program if op.is_compute):
            for other in beside:
                pair = [Event(o, rank, None, whole[rank, op].start, whole[rank, other].finish) for o in (op, other)]
                whole[rank, op], whole[rank, other] = pair[0], replace(pair[1], start=pair[1].finish)
    recorded = Simulation.from_events(simulation.schedule, "free", simulation.makespan, list(whole.values()))
    write_recording(tmp_path, recorded, {10: 1.0})
    measured = measured_step(read_recording(tmp_path), 10)
    for got, want in zip(measured.compute, simulation.compute, strict=True):
        assert (got.op, got.rank) == (want.op, want.rank)
        assert (got.start, got.finish) == pytest.approx((want.start, want.finish))


def test_the_command_shows_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recording(tmp_path, simulate(build_schedule("zb-h1", 2, 1, 3), Costs(3, 2, 1)), {5: 1.0, 6: 2.0})
    png, trace = tmp_path / "a.png", tmp_path / "a.json"
    main(["--run", str(tmp_path), "--step", "6", "--png", str(png), "--perfetto", str(trace)])
    out = capsys.readouterr().out
    assert out.startswith("measured, zb-h1: step 6 in 44 ms")
    assert "planned with the measured costs, zb-h1: step 6 in 44 ms" in out
    assert out.rstrip().endswith("measured / planned: 1.000")
    assert png.stat().st_size > 5000
    processes = [e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["measured rank 0", "measured rank 1", "planned rank 0", "planned rank 1"]
    main(["--run", str(tmp_path), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["measured"]["makespan"]) == (5, pytest.approx(22))


def damage_one_file(folder: Path) -> None:
    (folder / "schedule" / "pipeline_rank_1.jsonl").write_text("not JSON\n")


def leave_another_run_s_file(folder: Path) -> None:
    path = folder / "schedule" / "pipeline_rank_1.jsonl"
    path.write_text(path.read_text().replace('"num_microbatches": 3', '"num_microbatches": 4'))


def lose_one_file(folder: Path) -> None:
    (folder / "schedule" / "pipeline_rank_1.jsonl").unlink()


@pytest.mark.parametrize(
    ("harm", "rule"),
    [
        (damage_one_file, "is not what --record-schedule writes"),
        (leave_another_run_s_file, "recordings of several runs"),
        (lose_one_file, "has no schedule/pipeline_rank_1.jsonl"),
    ],
)
def test_a_damaged_recording_is_refused(tmp_path: Path, harm: Any, rule: str) -> None:
    write_recording(tmp_path, simulate(build_schedule("1f1b", 2, 1, 3)), {1: 1.0})
    read_recording(tmp_path)
    harm(tmp_path)
    with pytest.raises(UserError, match=rule):
        read_recording(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "{run}", "--pp", "2"], "the recording determines what ran"),
        (["--run", "{run}", "--step", "9"], "only steps 1 were recorded"),
        (["--schedule", "1f1b", "--pp", "2", "-m", "3", "--step", "1"], "only a recording has steps"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], words: str) -> None:
    write_recording(tmp_path, simulate(build_schedule("1f1b", 2, 1, 3)), {1: 1.0})
    with pytest.raises(UserError, match=words):
        main([a.format(run=tmp_path) for a in arguments])


def train_recorded(rank: int, folder: str, steps: range) -> list[tuple[float, float]]:
    """Four steps at tp 2, pp 2, those of `steps` recorded."""
    from megalite.core.parts.schedules.choose import schedule_of

    cfg = jobs.make_config(jobs.llama(), {"tp": 2, "pp": 2, "schedule": "zb-h1"}, micro_batch_size=1)
    engine = jobs.start(rank, cfg, 4)
    recorder = Recorder(Path(folder), engine.ctx, engine.executor, schedule_of(cfg, 1), steps)
    out = []
    for step in range(1, 5):
        with recorder.step(step):
            out += jobs.run_steps(engine, 1, step)
    return out


def test_of_a_pair_both_waits_count_and_the_work_between_them_does_not(tmp_path: Path) -> None:
    """The backward pass begins: it waits from 1 to 3, works, and hands over; the forward pass waits from 10 to 14."""
    schedule = build_schedule("1f1b-overlap", 2, 1, 2)
    recorder = Recorder(tmp_path, ParallelContext.single(), cast(Any, None), schedule, range(1, 2))
    clock = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0, 20.0, 20.0, 21.0, 22.0])
    recorder._now = lambda: next(clock)  # type: ignore[method-assign]
    forward, backward, alone = Op("F", 1, 0, beside=True), Op("B", 0, 0), Op("B", 1, 0)
    recorder.begin(forward)
    for _ in range(2):
        recorder.waits()
        recorder.arrived()
    recorder.end(forward)
    for op in (backward, alone):
        recorder.begin(op)
        recorder.end(op)
    recorder._write(1, 0.0)
    (line,) = (tmp_path / "pipeline_rank_0.jsonl").read_text().splitlines()[1:]
    assert json.loads(line)["ops"] == [
        [str(forward), 0.0, 7.0, 20.0],
        [str(backward), 20.0, 20.0, 20.0],
        [str(alone), 21.0, 21.0, 22.0],
    ]


@pytest.mark.full
def test_a_real_run_is_recorded_and_goes_on_as_without(pool: WorkerPool, tmp_path: Path) -> None:
    recorded = pool.run(4, train_recorded, str(tmp_path / "schedule"), range(2, 4))
    assert recorded == pool.run(4, train_recorded, str(tmp_path / "none"), range(0))
    assert not (tmp_path / "none").exists()
    assert sorted(p.name for p in (tmp_path / "schedule").iterdir()) == [f"pipeline_rank_{r}.jsonl" for r in (0, 1)]
    recording = read_recording(tmp_path)
    assert list(recording.steps) == [2, 3]
    waited = 0
    for ranks in recording.steps.values():
        for timed, program in zip(ranks, recording.schedule.programs):
            assert tuple(t.op for t in timed) == program
            clock = 0.0
            for t in timed:
                assert clock <= t.begun <= t.ready <= t.done
                clock = t.done
                waited += t.ready > t.begun
    # Per step: rank 0 waits for 8 gradients, rank 1 for 8 activations, and nothing else is waited for.
    assert waited == 2 * (8 + 8)
    assert measured_step(recording, 2).makespan > 0
