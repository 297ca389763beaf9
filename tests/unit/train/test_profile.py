"""--profile: every rank's trace and table, and where the time of a step goes; --memory-snapshot on a CPU is refused."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.extras.view.metrics import read_metrics
from megalite.extras.view.phases import BACKWARD, FORWARD, PHASES
from megalite.runtime.options import cli
from megalite.runtime.options.run import RunConfig
from megalite.runtime.options.windows import step_range, step_windows
from megalite.runtime.record.profile import StepProfiler
from tests.faults.zygote import Zygote

LAYERS, MICROBATCHES = 4, 4
# What TensorBoard's profiler plugin looks for: worker, and time (torch_tb_profiler/consts.py).
TENSORBOARD = r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$"
TINY = [
    *["--device", "cpu", "--mock-data", "--seq-len", "32", "--hidden-size", "32", "--num-heads", "4"],
    *["--num-layers", str(LAYERS), "--micro-batch-size", "2", "--global-batch-size", "8", "--vocab-size", "96"],
]


@pytest.mark.parametrize(("given", "steps"), [("10:13", [10, 11, 12]), ("1:2", [1]), (None, [])])
def test_profiled_steps(given: str | None, steps: list[int]) -> None:
    assert list(step_range("--profile", given)) == steps


@pytest.mark.parametrize("given", ["", "5", "5:5", "6:5", "0:2", "a:b", "1:", "-1:2"])
def test_a_range_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(UserError, match=r"--profile .*must be A:B"):
        RunConfig(profile=given)
    with pytest.raises(UserError, match=r"--tensor-stats .*must be A:B"):
        RunConfig(tensor_stats=f"1:2,{given}")


def test_windows() -> None:
    assert step_windows("--profile", None) == ()
    assert step_windows("--profile", "10:13,13:14,100:103") == (range(10, 13), range(13, 14), range(100, 103))
    for given in ("10:13,12:14", "10:13,2:4", "10:13,10:13"):
        with pytest.raises(UserError, match="must be windows in order that share no step"):
            step_windows("--profile", given)


def read_table(path: Path) -> tuple[float, dict[str, tuple[float, float, int | None]]]:
    """(milliseconds of a step, {phase: (milliseconds, percent, calls)})."""
    first, _, *rows = path.read_text().splitlines()
    found = re.search(r"2 steps of ([\d.]+) ms", first)
    assert found, first
    table: dict[str, tuple[float, float, int | None]] = {}
    for row in rows:
        phase, numbers = row[:26].strip(), row[26:].split()
        table[phase] = (float(numbers[0]), float(numbers[1].rstrip("%")), int(numbers[2]) if numbers[2:] else None)
    return float(found[1]), table


@pytest.mark.full
def test_every_rank_has_a_trace_and_its_time_by_phase(zygote: Zygote, tmp_path: Path) -> None:
    flags = ["--tp", "1", "--pp", "2", "--profile", "2:4,5:6", "--record-schedule", "3:4", "--eval-every", "2"]
    flags = [*TINY, *flags, "--train-steps", "5", "--eval-steps", "1", "--run-dir", str(tmp_path)]
    left = zygote.start(flags, 2, tmp_path).end()
    assert [rank.code for rank in left] == [0, 0], left
    steps, _ = read_metrics(tmp_path)
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5]
    for rank in range(2):
        wall, table = read_table(tmp_path / f"profile/rank_{rank}_step_2.txt")
        assert set(table) == set(PHASES)
        # What a step consists of, nothing twice: evaluation between the two steps is not in it.
        assert sum(row[0] for row in table.values()) == pytest.approx(wall, rel=0.01, abs=0.1)
        assert sum(row[1] for row in table.values()) == pytest.approx(100, abs=1)
        products = MICROBATCHES * (LAYERS // 2 * 4 + (rank == 1))  # qkv, output, gate and up, down; the head
        assert table[FORWARD][2] == products
        assert table[BACKWARD][2] == 2 * products
        assert table["attention"][0] > 0
        assert table["optimizer"][0] > 0
        assert table["collectives"][0] > 0
        first, second = sorted((tmp_path / "profile").glob(f"rank_{rank}.*.pt.trace.json.gz"))
        found = re.match(TENSORBOARD, first.name)
        assert found, first.name
        assert found[1] == f"rank_{rank}"
        events = trace(first)
        names = {e.get("name") for e in events}
        assert {"step: 2", "step: 3", "step: optimizer"} <= names
        assert not names & {"step: 1", "step: 4"}
        for kind in ("F", "[BI]"):
            assert sum(bool(re.match(f"step: {kind} ", str(e.get("name")))) for e in events) == 2 * MICROBATCHES
        # The other window.
        names = {e.get("name") for e in trace(second)}
        assert {"step: 5", "step: optimizer"} <= names
        assert not names & {"step: 3", "step: 4"}
        alone = (tmp_path / f"profile/rank_{rank}_step_5.txt").read_text()
        assert alone.startswith(f"rank {rank} on cpu: 1 steps of ")
    # The other recorder of operations was at work inside the second of the steps.
    recorded = (tmp_path / "schedule/pipeline_rank_1.jsonl").read_text().splitlines()
    assert json.loads(recorded[1])["step"] == 3
    assert len(json.loads(recorded[1])["ops"]) >= 2 * MICROBATCHES
    assert "gpu_power_w" not in steps[0]
    for rank in range(2):
        log = (tmp_path / f"logs/rank_{rank}.log").read_text()
        assert f"[rank {rank}] INFO profile of 2 steps: " in log
    # Only rank 0 speaks on the console, but for warnings.
    assert "profile of 2 steps" in left[0].err
    assert "profile of 1 steps" in left[0].err
    assert "profile of 2 steps" not in left[1].err


@pytest.mark.full
def test_weights_on_their_way_when_the_profile_starts_and_ends(zygote: Zygote, tmp_path: Path) -> None:
    """A send that outlives the profile it began in would write into the profiler's freed memory."""
    big = ["--vocab-size", "16384", "--hidden-size", "256", "--global-batch-size", "4"]
    flags = [*TINY, *big, "--profile", "2:4", "--train-steps", "5", "--run-dir", str(tmp_path)]
    left = zygote.start(flags, 2, tmp_path).end()
    assert [rank.code for rank in left] == [0, 0], left


def trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as f:
        return list(json.load(f)["traceEvents"])


@pytest.mark.parametrize(
    ("flags", "does"),
    [
        ("--memory-snapshot", "records the allocations of CUDA"),
        ("--profile 1:2 --profiler nsight", "marks the steps for a profiler of CUDA"),
    ],
)
def test_what_needs_cuda(flags: str, does: str) -> None:
    cfg = cli.parse([*TINY, *flags.split()]).config
    with pytest.raises(UserError) as error:
        StepProfiler(cfg, ParallelContext.single())
    flag = flags.removeprefix("--profile 1:2 ")
    remedy = "drop the flag, or run with --device cuda"
    assert str(error.value) == f"{flag} on cpu: {does}, which this device does not use; {remedy}"
