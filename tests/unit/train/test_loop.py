"""What a run logs, evaluates and collects around its steps."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import numpy as np
import pytest

from megalite.core.mesh.context import ParallelContext
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.base.collector import PeriodicCollector
from megalite.runtime.loop.loop import fit
from megalite.runtime.options import cli
from megalite.runtime.record.trackers import BackgroundTracker, Tracker
from megalite.runtime.start.start import open_run

RUN = [
    *["--device", "cpu", "--num-layers", "1", "--hidden-size", "8", "--num-heads", "2", "--seq-len", "8"],
    *["--vocab-size", "31", "--global-batch-size", "2", "--watchdog-timeout", "0", "--eval-steps", "2"],
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """20 documents of 10 tokens, the same sample again and again."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_documents(np.arange(200) % 8, [10] * 20)
        writer.finalize()
    return str(prefix)


def run_of(arguments: list[str], run_dir: Path) -> list[int]:
    """Train; the steps after which the run was evaluated."""
    run = open_run(cli.parse([*RUN, *arguments, "--run-dir", str(run_dir)]).config, ParallelContext.single())
    try:
        fit(run)
    finally:
        run.close()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line.get("event") == "eval"]


def test_a_run_with_validation_data_evaluates_once_at_its_end(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest keeps its own handlers
    real = ["--data", data, "--train-steps", "4"]
    assert run_of([*real, "--split", "90,10"], tmp_path / "never") == [4]
    assert run_of([*real, "--split", "90,10", "--eval-every", "3"], tmp_path / "3") == [3, 4]
    # None at the end either, and no data for it are asked for.
    assert run_of([*real, "--split", "100", "--eval-every", "2", "--eval-steps", "0"], tmp_path / "off") == []
    assert run_of([*real, "--split", "100"], tmp_path / "none") == []
    assert run_of([*real, "--split", "99,1"], tmp_path / "short") == [], "a part of no documents"
    assert run_of(["--mock-data", "--train-steps", "2"], tmp_path / "mock") == []
    log = (tmp_path / "never" / "logs" / "rank_0.log").read_text()
    said = re.findall(r"new run|resumed from|weights from|training from step 1 of 4|step \d/4|evaluation after", log)
    assert said == ["new run", "training from step 1 of 4", *(f"step {i}/4" for i in (1, 2, 3, 4)), "evaluation after"]


def test_a_step_is_evaluated_before_it_is_saved(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one too, but where it is the run's first evaluation, which may fail."""
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest keeps its own handlers
    for every, expected in (
        ("0", ["save 2", "save 4", "save 5", "eval 5"]),
        ("1000", ["save 2", "save 4", "save 5", "eval 5"]),
        ("2", ["eval 2", "save 2", "eval 4", "save 4", "eval 5", "save 5"]),
    ):
        run_dir = tmp_path / every
        split = ["--data", data, "--train-steps", "5", "--split", "90,10", "--save-every", "2"]
        run_of([*split, "--eval-every", every], run_dir)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        found = [f"{line['event']} {line['step']}" for line in lines if line.get("event") in ("eval", "save")]
        assert found == expected


def test_a_skipped_step_names_what_was_not_finite_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output where statistics are on; else a gradient, the first on the way back."""
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest keeps its own handlers
    scale = ["--precision", "fp16", "--initial-loss-scale", str(2.0**40)]
    run_of(["--mock-data", "--train-steps", "2", *scale, "--tensor-stats", "2:3"], tmp_path)
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    for step in (1, 2):
        assert f"gradients of step {step} are not finite: update skipped; first: lm_head.weight.grad\n" in log
    (path,) = (tmp_path / "tensor_stats").iterdir()
    assert path.name == "step_2.jsonl"
    lines = {line["name"]: line for line in map(json.loads, path.read_text().splitlines())}
    assert lines["lm_head.weight.grad"]["nan"] + lines["lm_head.weight.grad"]["inf"] > 0
    assert lines["layers.0.output"]["std"] > 0


def test_garbage_is_collected_at_set_steps_only() -> None:
    seen: list[str] = []
    collection = PeriodicCollector()
    gc.unfreeze()
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    try:
        collected = []
        for step in range(95, 303):
            collection.end_of_step(step, saves=step == 203)
            collected += [step] * seen.count("start")
            seen.clear()
            for _ in range(2000):  # what would make the automatic collector run
                cycle: list[object] = []
                cycle.append(cycle)
            collected += [-step] * seen.count("start")
            seen.clear()
        assert [step for step in collected if abs(step) > 95] == [100, 200, 203, 300]
        assert gc.get_freeze_count() > 0
        assert not gc.isenabled()
    finally:
        gc.callbacks.pop()
        collection.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_was_frozen_before_a_run_stays_frozen() -> None:
    gc.freeze()
    collection = PeriodicCollector()
    collection.end_of_step(1, saves=True)
    collection.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_a_collector_that_is_off_is_left_alone() -> None:
    gc.disable()
    try:
        collection = PeriodicCollector()
        collection.end_of_step(1, saves=True)
        collection.close()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_run_ends_with_a_save_when_its_time_is_over(tmp_path: Path) -> None:
    """After the first step that begins beyond --max-minutes; the same command goes on from there."""
    run = [*RUN, "--mock-data", "--train-steps", "3", "--run-dir", str(tmp_path)]
    for begun in (1, 2):
        with open_run(cli.parse([*run, "--max-minutes", "1e-9"]).config, ParallelContext.single()) as limited:
            fit(limited)
        assert limited.step == begun
        assert limited.saved[-1][0] == begun
    with open_run(cli.parse([*run, "--max-minutes", "1e6"]).config, ParallelContext.single()) as unlimited:
        fit(unlimited)
    assert unlimited.step == 3


def test_a_run_ends_with_a_save_at_an_interval(tmp_path: Path) -> None:
    """--exit-interval cuts a run into pieces; rates are those of the whole."""
    flags = [*RUN, "--mock-data", "--train-steps", "5"]
    whole = [*flags, "--run-dir", str(tmp_path / "whole")]
    pieces = [*flags, "--run-dir", str(tmp_path / "pieces"), "--exit-interval", "2"]
    for command, ends in ((whole, [5]), (pieces, [2, 4, 5])):
        for end in ends:
            with open_run(cli.parse(command).config, ParallelContext.single()) as run:
                fit(run)
            assert (run.step, run.saved[-1][0]) == (end, end)
    one, other = (
        [
            (line["step"], line["lr"], line["loss"])
            for line in map(json.loads, path.read_text().splitlines())
            if "loss" in line
        ]
        for path in (tmp_path / "whole" / "metrics.jsonl", tmp_path / "pieces" / "metrics.jsonl")
    )
    assert one == other
    assert len({lr for _, lr, _ in one}) == 5


@pytest.mark.parametrize(("keep", "missing"), [(2, [4]), (9, [])])
def test_a_run_names_the_steps_whose_weights_are_pruned(tmp_path: Path, keep: int, missing: list[int]) -> None:
    saves = f"--save-every 2 --save-model-every 4 --keep-last {keep} --mock-data --train-steps 9 --run-dir {tmp_path}"
    with open_run(cli.parse([*RUN, *saves.split()]).config, ParallelContext.single()) as run:
        fit(run)
    names = {path.name for path in (tmp_path / "checkpoints").glob("*_*")}
    assert [step for step in (4,) if not names & {f"model_{step:08d}", f"step_{step:08d}"}] == missing
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert [int(n) for n in re.findall(r"every (\d+) steps the weights", log)] == missing


def test_what_a_run_says_of_its_best_checkpoint_and_of_its_devices(data: str, tmp_path: Path) -> None:
    """A tracker hears of the best at the end, once; a line has what all ranks' devices did in twenty steps."""
    flags = ["--data", data, "--split", "90,10", "--train-steps", "20", "--eval-every", "10", "--save-every", "10"]
    command = [*RUN, *flags, "--keep-best", "1", "--run-dir", str(tmp_path)]
    named: list[tuple[str, float]] = []
    with open_run(cli.parse(command).config, ParallelContext.single()) as run:
        tracker = Tracker(lambda values, step: None, lambda: None, lambda path, loss: named.append((path.name, loss)))
        run.metrics._trackers.append(BackgroundTracker("heard", lambda: tracker))
        fit(run)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {f"step_{line['step']:08d}": line["loss"] for line in lines if line.get("event") == "eval"}
    assert len(losses) == 2
    assert named == [min(losses.items(), key=lambda item: item[1])]
    (devices,) = (line for line in lines if line.get("event") == "devices")
    assert devices["step"] == 20
    assert [len(devices[name]) for name in ("memory_gib", "cpu_utilization")] == [1, 1]
    assert devices["cpu_utilization"][0] > 0
