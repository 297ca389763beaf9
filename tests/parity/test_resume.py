"""A run stopped and taken up again is the run that never stopped: bit for bit in its layout, to 1e-5 in another."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.parity.harness import put_together
from tests.parity.runs import LAYOUTS, MODEL, carried, losses, train
from tests.ranks import finish, run_ranks, start_ranks
from tests.rows import always_run
from tests.workers import WorkerPool


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        "dp2-zero0-bf16",
        "pp2-vp2",
        "dp4-zero3-hybrid",
        "dp2-cp2",
        "dp2-tp2-powersgd",
        "dp2-pp2-tied-topk-fp16",
    ],
)
def test_same_layout_to_the_bit(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    world, flags = LAYOUTS[layout]
    whole = pool.run(world, train, [*MODEL, *flags, "--train-steps", "6", "--run-dir", str(tmp_path / "a")], world)
    halves = [*MODEL, *flags, "--run-dir", str(tmp_path / "b")]
    pool.run(world, train, [*halves, "--train-steps", "3"], world)
    resumed = pool.run(world, train, [*halves, "--train-steps", "6"], world)
    assert resumed == whole
    assert losses(tmp_path / "b") == losses(tmp_path / "a")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("dp4-zero3-hybrid", "dp2-pp2-zero2", marks=pytest.mark.full),
        ("dp2-cp2", "tp2-cp2"),
    ],
)
def test_another_layout_to_1e_5(pool: WorkerPool, tmp_path: Path, first: str, second: str) -> None:
    train(0, [*MODEL, "--train-steps", "6", "--run-dir", str(tmp_path / "a")], 1)
    for layout, steps in ((first, "3"), (second, "6")):
        world, flags = LAYOUTS[layout]
        arguments = [*MODEL, *flags, "--train-steps", steps, "--run-dir", str(tmp_path / "b")]
        pool.run(world, train, arguments, world)
    np.testing.assert_allclose(losses(tmp_path / "b"), losses(tmp_path / "a"), rtol=1e-5)


@pytest.mark.full
def test_states_survive_every_change_of_layout(pool: WorkerPool, tmp_path: Path) -> None:
    """From shards of ZeRO-3 to a pipeline, to one process and back: the same bits, and the same next loss."""
    layouts = {
        "dp4-zero3": (4, ["--zero", "3", "--zero-whole-below", "500"]),
        "dp2-pp2-zero1": (4, ["--pp", "2"]),
        "cp4": (4, ["--cp", "4", "--cp-comm", "gather"]),
        "dp2-cp2": LAYOUTS["dp2-cp2"],
        "one": (1, []),
        "dp4-zero3-again": (4, ["--zero", "3", "--zero-whole-below", "500"]),
    }
    model = [*MODEL, "--hidden-dropout", "0", "--precision", "bf16", "--train-steps", "3"]
    world, flags = layouts["dp4-zero3"]
    pool.run(world, train, [*model, *flags, "--train-steps", "2", "--run-dir", str(tmp_path / "start")], world)
    source, found = tmp_path / "start", []
    for name, (world, flags) in layouts.items():
        arguments = [*model, *flags, "--resume", str(source), "--run-dir", str(tmp_path / name)]
        ranks = pool.run(world, carried, arguments, world) if world > 1 else [carried(0, arguments, 1)]
        found.append((put_together([held for held, _ in ranks]), ranks[0][1]))
        source = tmp_path / name
    (states, loss), *others = found
    assert len(states) == 3 * (4 * 6 + 3)
    for other, next_loss in others:
        assert other.keys() == states.keys()
        assert all(other[name].tobytes() == states[name].tobytes() for name in states)
        assert next_loss == pytest.approx(loss, rel=2e-5)  # bf16: 1.1e-5 by kernels of torch
    assert others[-1][1] == loss


@pytest.mark.full
def test_a_checkpoint_of_another_model_is_refused_and_other_options_are_said(tmp_path: Path) -> None:
    run = [*MODEL, "--run-dir", str(tmp_path), "--train-steps", "1"]
    assert run_ranks(run)[0].code == 0
    (left,) = run_ranks([*run, "--rope-theta", "500000"])
    assert left.code == 2
    assert "rope_theta 10000.0 there, 500000.0 here" in left.errors[0]
    (left,) = run_ranks([*run, "--seed", "5"])
    assert left.code == 2
    assert "seed 1234 there, 5 here" in left.errors[0]
    # A refused start leaves the run as it was: its description, and no lock.
    assert "seed: 1234" in (tmp_path / "config.yaml").read_text()
    # What was done is not done again.
    (left,) = run_ranks([*run, "--lr", "5e-4", "--micro-batch-size", "2"])
    assert left.code == 0
    assert "options changed since that checkpoint: --micro-batch-size 1 -> 2, --lr 0.001 -> 0.0005" in left.err
    assert "nothing to do" in left.err
    assert "taking over" not in left.err


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    """Read what the rank says, up to these words."""
    assert process.stderr is not None
    while words not in (line := process.stderr.readline()):
        assert line, f"ended before it said {words!r}"


@pytest.mark.parametrize("ask", always_run([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_asked_to_stop_one_rank_stops_all_after_a_save(tmp_path: Path, ask: signal.Signals) -> None:
    arguments = [*MODEL, "--run-dir", str(tmp_path), "--train-steps", "100000", "--lr-decay", "constant"]
    processes = start_ranks(arguments, 2)
    # The first console line says that training is under way.
    wait_for(processes[0], "step 1/")
    processes[1].send_signal(ask)
    left = finish(processes)
    assert [rank.code for rank in left] == [0, 0], left
    assert re.search(r"stopped after step \d+ of 100000: the same command resumes from here", left[0].err)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["event"] == "save"
    assert lines[-1]["step"] == lines[-2]["step"]
    assert (tmp_path / "checkpoints" / f"step_{lines[-1]['step']:08d}" / "COMMIT").exists()


@pytest.mark.full
def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    arguments = [*MODEL, "--run-dir", str(tmp_path), "--train-steps", "100000", "--lr-decay", "constant"]
    # Steps of minutes: the second signal comes before the first has been obeyed.
    (process,) = start_ranks([*arguments, "--global-batch-size", "65536"], 1)
    assert process.stderr is not None
    # The last line before the first step.
    wait_for(process, "--save-every 0: nothing is saved before step 100000")
    process.send_signal(signal.SIGINT)
    first = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    (left,) = finish([process])
    assert left.code == 130
    assert "interrupted: exiting immediately, nothing more was saved" in first + left.err


@pytest.mark.full
def test_sigusr1_prints_stacks_and_goes_on(tmp_path: Path) -> None:
    arguments = [*MODEL, "--run-dir", str(tmp_path), "--train-steps", "100000", "--lr-decay", "constant"]
    (process,) = start_ranks(arguments, 1)
    wait_for(process, "step 1/")
    process.send_signal(signal.SIGUSR1)
    wait_for(process, "loop.py")
    wait_for(process, f"memory of process {process.pid}: 0.")
    wait_for(process, "/100000")
    process.send_signal(signal.SIGTERM)
    assert finish([process])[0].code == 0


@pytest.mark.full
def test_start_from_a_hugging_face_folder(tmp_path: Path) -> None:
    """A run exported and started anew in another layout has the evaluation loss that it had; from a store."""
    from megalite.extras.convert.hf import export_hf

    arguments = [*MODEL, "--train-steps", "3", "--eval-every", "3", "--run-dir", str(tmp_path / "a")]
    train(0, arguments, 1)
    export_hf(str(tmp_path / "a"), str(tmp_path / "hf"))
    ranks = run_ranks(
        [
            *("--init-from-hf", f"file://{tmp_path}/hf", "--cache-dir", str(tmp_path / "cache")),
            *("--seq-len", "16", "--mock-data", "--device", "cpu"),
            *("--tp", "2", "--pp", "2", "--lr", "1e-12", "--train-steps", "1", "--eval-every", "1"),
            *("--run-dir", str(tmp_path / "b")),
        ],
        4,
    )
    assert [rank.code for rank in ranks] == [0] * 4, ranks
    assert evaluation(tmp_path / "b") == pytest.approx(evaluation(tmp_path / "a"), rel=1e-6)


def evaluation(run_dir: Path) -> float:
    """Loss of the run's last evaluation."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return float([line["loss"] for line in lines if line.get("event") == "eval"][-1])
