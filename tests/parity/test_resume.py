"""A run stopped and taken up again is the run that never stopped: bit for bit in its layout, to 1e-5 in another."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.faults.zygote import Left, Zygote
from tests.parity import runs
from tests.parity.harness import put_together
from tests.parity.runs import LAYOUTS, carried, losses, train
from tests.rows import always_run
from tests.workers import WorkerPool

MODEL = [*runs.MODEL, "--micro-batch-size", "2"]


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
    whole = pool.run(world, train, [*MODEL, *flags, "--train-steps", "5", "--run-dir", str(tmp_path / "a")], world)
    halves = [*MODEL, *flags, "--run-dir", str(tmp_path / "b")]
    pool.run(world, train, [*halves, "--train-steps", "3"], world)
    resumed = pool.run(world, train, [*halves, "--train-steps", "5"], world)
    assert resumed == whole
    assert losses(tmp_path / "b") == losses(tmp_path / "a")


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [(["--moe-overlap"], []), ([], ["--moe-overlap"])])
def test_pairs_begin_and_end_in_the_middle_of_a_run(
    pool: WorkerPool, tmp_path: Path, first: list[str], second: list[str]
) -> None:
    """A checkpoint knows nothing of them, and they change no bit."""
    model = [*MODEL, "--arch", "mixtral", "--num-experts", "8", "--ffn-hidden-size", "32", "--ep", "2"]
    whole = pool.run(2, train, [*model, "--train-steps", "6", "--run-dir", str(tmp_path / "a")], 2)
    for flags, steps in ((first, "3"), (second, "6")):
        arguments = [*model, *flags, "--train-steps", steps, "--run-dir", str(tmp_path / "b")]
        resumed = pool.run(2, train, arguments, 2)
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
    train(0, [*MODEL, "--train-steps", "5", "--run-dir", str(tmp_path / "a")], 1)
    for layout, steps in ((first, "3"), (second, "5")):
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
def test_a_checkpoint_of_another_model_is_refused_and_other_options_are_said(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def start(*flags: str) -> Left:
        (left,) = zygote.start([*MODEL, "--run-dir", str(run), "--train-steps", "1", *flags], 1, tmp_path).end()
        return left

    assert start().code == 0
    left = start("--rope-theta", "500000")
    assert left.code == 2
    assert "rope_theta 10000.0 there, 500000.0 here" in left.err
    left = start("--seed", "5")
    assert left.code == 2
    assert "seed 1234 there, 5 here" in left.err
    # A refused start leaves the run as it was: its description, and no lock.
    assert "seed: 1234" in (run / "config.yaml").read_text()
    # What was done is not done again.
    left = start("--lr", "5e-4", "--micro-batch-size", "4")
    assert left.code == 0
    assert "options changed since that checkpoint: --micro-batch-size 2 -> 4, --lr 0.001 -> 0.0005" in left.err
    assert "nothing to do" in left.err
    assert "taking over" not in left.err


LONG = [*MODEL, "--train-steps", "100000", "--lr-decay", "constant"]


@pytest.mark.parametrize("ask", always_run([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_asked_to_stop_one_rank_stops_all_after_a_save(zygote: Zygote, tmp_path: Path, ask: signal.Signals) -> None:
    run = tmp_path / "run"
    job = zygote.start([*LONG, "--run-dir", str(run)], 2, tmp_path)
    # The first console line says that training is under way.
    job.wait_for(0, "step 1/")
    os.kill(job.pid(1), ask)
    left = job.end()
    assert [rank.code for rank in left] == [0, 0], left
    assert re.search(r"stopped after step \d+ of 100000: the same command resumes from here", left[0].err)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("event") for line in lines[-3:]] == [None, "save", "saved"]
    assert lines[-1]["step"] == lines[-3]["step"]
    assert (run / "checkpoints" / f"step_{lines[-1]['step']:08d}" / "COMMIT").exists()


@pytest.mark.full
def test_a_second_ctrl_c_leaves_at_once(zygote: Zygote, tmp_path: Path) -> None:
    # Steps of minutes: the second signal comes before the first has been obeyed.
    job = zygote.start([*LONG, "--global-batch-size", "65536", "--run-dir", str(tmp_path / "run")], 1, tmp_path)
    # The last line before the first step.
    job.wait_for(0, "--save-every 0: nothing is saved before step 100000")
    os.kill(job.pid(0), signal.SIGINT)
    job.wait_for(0, "SIGINT: saving after this step")
    os.kill(job.pid(0), signal.SIGINT)
    (left,) = job.end()
    assert left.code == 130
    assert "interrupted: exiting immediately, nothing more was saved" in left.err


@pytest.mark.full
def test_sigusr1_prints_stacks_and_goes_on(zygote: Zygote, tmp_path: Path) -> None:
    job = zygote.start([*LONG, "--run-dir", str(tmp_path / "run")], 1, tmp_path)
    job.wait_for(0, "step 1/")
    os.kill(job.pid(0), signal.SIGUSR1)
    memory = f"memory of process {job.pid(0)}: 0."
    zygote.until(lambda: "/100000" in job.text(0).partition("loop.py")[2].partition(memory)[2])
    os.kill(job.pid(0), signal.SIGTERM)
    assert job.end()[0].code == 0


@pytest.mark.full
def test_start_from_a_hugging_face_folder(zygote: Zygote, tmp_path: Path) -> None:
    """A run exported and started anew in another layout has the evaluation loss that it had; from a store."""
    from megalite.extras.convert.hf import export_hf

    evaluated = ["--eval-steps", "2", "--eval-every"]
    train(0, [*MODEL, "--train-steps", "3", *evaluated, "3", "--run-dir", str(tmp_path / "a")], 1)
    export_hf(str(tmp_path / "a"), str(tmp_path / "hf"))
    arguments = [
        *("--init-from-hf", f"file://{tmp_path}/hf", "--cache-dir", str(tmp_path / "cache")),
        *("--seq-len", "16", "--mock-data", "--device", "cpu"),
        *("--tp", "2", "--pp", "2", "--lr", "1e-12", "--train-steps", "1", *evaluated, "1"),
        *("--run-dir", str(tmp_path / "b")),
    ]
    assert [rank.code for rank in zygote.start(arguments, 4, tmp_path).end()] == [0] * 4
    assert evaluation(tmp_path / "b") == pytest.approx(evaluation(tmp_path / "a"), rel=1e-6)


def evaluation(run_dir: Path) -> float:
    """Loss of the run's last evaluation."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return float([line["loss"] for line in lines if line.get("event") == "eval"][-1])
