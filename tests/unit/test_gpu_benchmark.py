"""benchmarks/gpu.sh without a GPU: an accident costs its row alone, and every row runs with tiny sizes."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_checks, gpu_rows, gpu_steps, gpus, gpus_row
from benchmarks.rows import end_marked, run_rows
from megalite.core.mesh.grid import Grid
from megalite.runtime.options import cli
from tests.gpu import faulty_rows
from tests.ranks import PYTHONPATH, ROOT


def run(tmp_path: Path, module: str, names: list[str], seconds: float, lanes: int = 2) -> list[tuple[str, Any]]:
    """Run rows of a module on a CPU; return what was reported of each, in the order of its end."""
    found: list[tuple[str, Any]] = []
    with open(tmp_path / "log", "ab", buffering=0) as log:
        until = time.monotonic() + seconds
        run_rows(module, "cpu", names, until, log, lambda name, figures: found.append((name, figures)), lanes)
    return found


def alive(word: str) -> bool:
    """Whether a process has a word among its arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # Of the processes of other tests some end between the listing and the reading.
        with contextlib.suppress(OSError):
            if word in path.read_bytes().decode(errors="replace"):
                return True
    return False


@pytest.mark.full
def test_an_accident_costs_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash, a hang, an exception: all other rows are there, and nothing that any of them started lives on."""
    monkeypatch.setenv("MEGALITE_ROWS_CHILD", str(tmp_path))
    names = [row.name for row in faulty_rows.ROWS if row.name != "hang for long"]
    found = dict(run(tmp_path, "tests.gpu.faulty_rows", names, 300))
    assert sorted(found) == sorted(names)
    assert found["crash"]["error"] == "its process ended with -11"
    assert found["hang"]["error"] == "cut off after 1 s"
    assert found["out of memory"]["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    kept = {name: figures["pid"] for name, figures in found.items() if "pid" in figures}
    assert len(kept) == len(names) - 3
    assert len({kept[f"together {i}"] for i in range(4)}) == 2
    assert len({kept["first"], kept["after crash"], kept["after hang"]}) == 3
    assert kept["last"] == kept["after hang"]  # an exception costs no start
    assert "noise" in (tmp_path / "log").read_text()
    assert not alive(str(tmp_path))


@pytest.mark.full
def test_a_process_that_is_being_started_is_ended_too() -> None:
    """One of a hundred lived on: in exec it had no environment by which to be found."""
    for i in range(400):
        mark = f"starting {os.getpid()} {i}"
        started = subprocess.Popen(
            ["sleep", "600"], env={**os.environ, "MEGALITE_ROWS_MARK": mark}, start_new_session=True
        )
        try:
            end_marked(mark)
            assert started.wait(120) == -signal.SIGKILL
        finally:
            started.kill()


@pytest.mark.full
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    """While a row hangs on a child in a session of its own."""
    script = (
        # A suite that runs in the background ignores SIGINT, and its children would.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys, time; from benchmarks.rows import run_rows; log = open(sys.argv[1] + '/log', 'ab', buffering=0)\n"
        "run_rows('tests.gpu.faulty_rows', 'cpu', ['hang for long', 'last'], time.monotonic() + 600, log, print)"
    )
    env = {**os.environ, "MEGALITE_ROWS_CHILD": str(tmp_path), "PYTHONPATH": PYTHONPATH}
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, env=env, start_new_session=True)
    while not alive(f"# {tmp_path}"):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) != 0
    assert not alive(f"# {tmp_path}")


def test_rows_that_no_longer_fit_are_skipped(tmp_path: Path) -> None:
    ((name, figures),) = run(tmp_path, "tests.gpu.faulty_rows", ["last"], 5)
    assert name == "last"
    assert figures["skipped"].endswith("s are left of the time for all rows")


def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, dict[str, Any]]:
    """Run gpu.py; return its exit code and the results."""
    monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu", "--out", str(tmp_path), *words])
    return gpu.main(), json.loads((tmp_path / "rehearsal.json").read_text())


@pytest.mark.full
def test_every_row_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for most models and slices of the kernels' contract, and what differs from others by the sizes that a CPU
    does not have, as all steps do; a second call adds to the first.
    """
    skipped = ["model: *", "kernels: *", "step: Llama-3-*", "step: Llama-3.2-1B,*", "step: [!L]*", "host: Qwen3-30B*"]
    skipped += ["products: 8b", "experts: 128", "attention: 32 heads of 128"]
    code, found = main(tmp_path, monkeypatch, "--skip", *skipped)
    assert code == 0, found
    left_out = {name for pattern in skipped for name in fnmatch.filter((row.name for row in gpu_rows.ROWS), pattern)}
    assert set(found) == {row.name for row in gpu_rows.ROWS} - left_out
    figures = {"step": "tokens_per_s", "products": "qkv_forward_tflops", "experts": "torch_wgrad_tflops"}
    figures |= {"attention": "math_backward_tflops", "plain torch": "tokens_per_s", "ops": "copy_gb_per_s"}
    for name, row in found.items():
        kind = name.partition(":")[0]
        assert row.get(figures.get(kind, "seconds")), name
        assert kind not in ("step", "host", "products") or "torch: " in row["ran"][0], name  # what has run
    code, more = main(tmp_path, monkeypatch, "--only", "model: qwen3-moe", "kernels: auto bf16 1/4")
    assert code == 0
    assert {**found, **more} == more
    assert more["model: qwen3-moe"]["fp32_grad_norm"] == 0
    page = (tmp_path / "rehearsal.md").read_text()
    assert "## step" in page
    assert "add_rmsnorm backward" in page


def test_a_model_that_differs_from_the_cpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    train = gpu_checks.train
    calls: list[str] = []

    def wrong(flags: str, device: torch.device) -> Any:
        calls.append(flags)
        return train(flags, device) * (1 + 1e-4 * (len(calls) == 2))

    monkeypatch.setattr(gpu_checks, "train", wrong)
    with pytest.raises(AssertionError, match="over the limit: .*'fp32_loss': 9.99"):
        gpu_checks.check_model("llama", torch.device("cpu"))


def test_gaps_between_kernels() -> None:
    events = [(0.0, 10.0, "a"), (5.0, 30.0, "b"), (8.0, 12.0, "c"), (100.0, 110.0, "d"), (115.0, 120.0, "e")]
    assert gpu_steps.gaps(events) == {"gaps": 1, "gaps_ms": 0.07, "longest_gaps": [[70.0, "b", "d"]]}


def test_forecasts_stand_beside_the_steps() -> None:
    """Those in the tree are of the models that are measured."""
    due = json.loads((ROOT / "benchmarks" / "results" / "gpu_forecast.json").read_text())
    assert due.keys() == {name for name, (flags, _) in gpu_rows.STEPS.items() if "--compile" not in flags}
    name, figures = "Llama-3.2-1B", {"ms": 504.0}
    shown = gpu.with_forecast(f"step: {name}", figures, "nvidia-h200")
    assert shown == {"forecast_ms": due[name]["h200"], "forecast_launches": due[name]["kernels"], **figures}
    assert gpu.with_forecast(f"step: {name}", figures, "nvidia-a100") == figures
    assert gpu.with_forecast("ceilings", figures, "nvidia-h200") == figures


def test_layouts_for_all_gpus() -> None:
    parts = gpus.parts_of(8, tiny=False)
    assert list(parts) == ["check", "ranks", *gpus.LAYOUTS]
    assert sum(seconds for seconds, _ in parts.values()) <= 1100
    for _, command in list(parts.values())[2:]:
        cfg = cli.parse(command[command.index("--preset") :]).config
        assert cfg.num_microbatches(Grid.from_config(cfg.parallel, 8)["dp"]) >= 4
    assert list(gpus.parts_of(2, tiny=False))[2:] == ["ZeRO-2", "ZeRO-3", "tp 2"]


@pytest.mark.parametrize(
    ("end", "seconds", "outcome"),
    [("time.sleep(600)", 0.5, "cut off after 0 s"), ("raise SystemExit(3)", 300.0, "failed with exit code 3")],
)
def test_what_a_part_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, seconds: float, outcome: str
) -> None:
    """And its ranks end with it, which have sessions of their own."""
    log = tmp_path / "log"

    class Measured(subprocess.Popen[bytes]):
        """Its time begins when it has measured, however long a busy machine takes to start it."""

        def wait(self, timeout: float | None = None) -> int:
            while "measured" not in log.read_text() and self.poll() is None:
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(gpus.subprocess, "Popen", Measured)
    monkeypatch.setattr(gpus, "_KILL_AFTER_S", 0.5)
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "with open(os.environ['MEGALITE_ROWS'], 'a') as out: out.write('{\"ms\": 1.5}\\n{\"ms\": 2')\n"
        f"child = 'import time; time.sleep(600)  # {tmp_path}'\n"
        "subprocess.Popen([sys.executable, '-c', child], start_new_session=True)\n"
        f"print('measured', flush=True)\n{end}\n"
    )
    part = gpus.run_part("step", ("-c", script), seconds, "cpu", log, dict(os.environ))
    assert part["outcome"] == outcome
    assert part["rows"] == [{"ms": 1.5}]
    assert part["last_line"] == "measured"
    assert not alive(f"# {tmp_path}")


@pytest.mark.full
def test_a_row_of_all_gpus(tmp_path: Path) -> None:
    _, command = gpus.parts_of(2, tiny=True)["tp 2"]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    # Two starts and some steps; a busy machine has taken 80 s.
    part = gpus.run_part("tp 2", command, 500.0, "cpu", tmp_path / "log", env)
    assert part["outcome"] == "passed", (tmp_path / "log").read_text()
    (row,) = part["rows"]
    assert row["exposed"].keys() >= {"tp all_gather", "tp reduce_scatter", "world all_reduce"}
    # A mean, which a slow step can carry above the median of the steps.
    assert row["exposed_ms"] == pytest.approx(sum(row["exposed"].values()), abs=0.01)
    assert row["exposed_ms"] > 0
    assert row["tokens_per_s_per_gpu"] == pytest.approx(8 * 32 / 2 / row["step_ms"] * 1e3, rel=1e-4)
    assert "| tp 2 |" in gpus.page({"gpus": "2"}, {"tp 2": part})


def test_a_rank_that_fails_ends_the_others() -> None:
    script = "import os, time; int(os.environ['RANK']) and os._exit(3); time.sleep(600)"
    assert gpus_row.start(2, ["-c", script]) == 3


def test_without_a_gpu_the_error_names_the_way() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--device cpu" in done.stderr
