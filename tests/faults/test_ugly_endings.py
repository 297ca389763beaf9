"""Disks that are full or not writable around a run, and crashes: one line each, the same exit code on every rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.zygote import Left, Zygote
from tests.ranks import ROOT

RUN = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-heads", "2", "--seq-len", "16", "--vocab-size", "64"),
    *("--global-batch-size", "4", "--train-steps", "4", "--mock-data", "--device", "cpu"),
]


def start(zygote: Zygote, folder: Path, *flags: str) -> list[Left]:
    return zygote.start([*RUN, "--run-dir", str(folder / "run"), *flags], 2, folder).end()


def test_a_full_disk_under_the_log_files(zygote: Zygote, tmp_path: Path) -> None:
    """Reported once per rank; the run trains and saves. Without a word of the logging module's own."""
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    for rank in range(2):
        (logs / f"rank_{rank}.log").symlink_to("/dev/full")
    left = start(zygote, tmp_path)
    assert [rank.code for rank in left] == [0, 0], left
    for rank in range(2):
        (line,) = [line for line in left[rank].err.splitlines() if "cannot be written" in line]
        assert f"rank_{rank}.log cannot be written (No space left on device)" in line
        assert "Logging error" not in left[rank].err
    assert "saved " in left[0].err
    assert (tmp_path / "run/checkpoints/latest").exists()


@pytest.mark.parametrize("blocked", ["config.yaml", "logs/rank_1.log", "metrics.jsonl"])
def test_what_cannot_be_written_is_one_line_and_2_on_every_rank(zygote: Zygote, tmp_path: Path, blocked: str) -> None:
    (tmp_path / "run" / blocked / "in the way").mkdir(parents=True)
    left = start(zygote, tmp_path)
    assert [rank.code for rank in left] == [2, 2], left
    text = left[0].err + left[1].err
    (line,) = [line for line in text.splitlines() if "error:" in line]
    assert Path(blocked).name in line
    assert "cannot be written (Is a directory)" in line
    assert "Traceback" not in text


def test_an_earlier_config_survives_a_full_disk(tmp_path: Path) -> None:
    """In a process whose files may have 100 bytes: the kernel's own refusal, as of a full disk."""
    (tmp_path / "config.yaml").write_text("earlier")
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from megalite.runtime.start.run_dir import write_config\n"
        "from megalite.extras.tool import run_tool\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "run_tool(lambda: write_config(Path(sys.argv[1]), 'x' * 1000))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path}/config.yaml: cannot be written (File too large); make room, or choose another --run-dir\n"
    )
    assert (tmp_path / "config.yaml").read_text() == "earlier"
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_a_crash_is_not_silent(tmp_path: Path) -> None:
    """SIGBUS of a mapped file that was cut: the stack names the place, in a rank and in a tool."""
    crash = (
        "import mmap, os, sys\n"
        "def read_a_mapped_file():\n"
        "    with open(sys.argv[1], 'w+b') as f:\n"
        "        f.write(bytes(8192)); f.flush()\n"
        "        data = mmap.mmap(f.fileno(), 8192)\n"
        "        os.truncate(sys.argv[1], 0)\n"
        "        data[5000]\n"
    )
    tool = "from megalite.extras.tool import run_tool\nrun_tool(read_a_mapped_file)\n"
    rank = (
        "from megalite.runtime.start.exit import leaving_together\nwith leaving_together():\n    read_a_mapped_file()\n"
    )
    for around in (tool, rank):
        done = subprocess.run(
            [sys.executable, "-c", crash + around, str(tmp_path / "file")],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == -signal.SIGBUS
        assert "Fatal Python error: Bus error" in done.stderr
        assert "in read_a_mapped_file" in done.stderr


def test_a_metrics_event_without_a_step(tmp_path: Path) -> None:
    from megalite.extras.view.metrics import read_metrics

    lines = [
        {"event": "eval", "step": "x", "loss": 1.0},
        {"step": 1, "loss": 3.0},
        {"event": "resume", "step": [1]},
        {"event": "resume", "step": 0},
        {"step": 1, "loss": 2.0},
        {"step": True},
    ]
    nested = '{"step": ' * 50_000
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), nested]))
    steps, events = read_metrics(tmp_path)
    assert [step["loss"] for step in steps] == [2.0]
    assert [event["event"] for event in events] == ["eval", "resume", "resume"]
