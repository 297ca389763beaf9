"""Out of memory: the page says what is in it, and what it advises fits; run out for real under a limit on memory."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.core.model import parameters
from megalite.core.parts.schedules import choose
from megalite.core.pipeline import schedule
from megalite.extras.diagnose.memory import (
    MemoryContext,
    is_out_of_memory,
    page,
    predicted_seconds,
    remedies,
    usable_bytes,
)
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.time.step import step_time
from megalite.runtime.options.cli import parse
from tests.ranks import ROOT

BIG = ["--preset", "llama-3-8b", "--global-batch-size", "64", "--mock-data", "--device", "cuda"]


def needs(flags: list[str], world: int) -> int:
    """Bytes of the fullest rank; no memory is enough for flags that are refused."""
    try:
        cfg = parse(flags).config
    except UserError:
        return 2**60
    return max(m.total for m in memory_per_rank(cfg, Grid.from_config(cfg.parallel, world)))


def cluster(world: int) -> Cluster:
    return Cluster.parse("h100:8").with_gpus(world)


def pace(flags: list[str], world: int) -> float:
    """The predicted time of the step."""
    return predicted_seconds(parse(flags).config, world, cluster(world))


@pytest.mark.parametrize(
    ("flags", "world", "gib"),
    [
        (["--micro-batch-size", "8"], 8, 140),
        (["--micro-batch-size", "4", "--tp", "2"], 8, 60),
        (["--micro-batch-size", "1", "--zero", "0"], 16, 79),
        (["--micro-batch-size", "2", "--pp", "4"], 16, 40),
        (["--micro-batch-size", "1"], 1, 76),
    ],
)
def test_every_remedy_fits_and_no_part_of_it_would_do_as_fast(flags: list[str], world: int, gib: int) -> None:
    given = [*BIG, *flags]
    cfg, budget = parse(given).config, gib * 2**30
    assert needs(given, world) > budget
    found = remedies(cfg, Grid.from_config(cfg.parallel, world), budget, cluster(world), host=2**37)
    assert 1 <= len(found) <= 3
    assert [r.slower for r in found] == sorted(r.slower for r in found)
    for remedy in found:
        # A later flag of the command line stands.
        words = [flag.split() for flag in remedy.flags]
        assert needs([*given, *sum(words, [])], world) == remedy.total <= budget
        for left_out in range(len(words)):
            rest = sum(words[:left_out] + words[left_out + 1 :], [])
            if rest and needs([*given, *rest], world) <= budget:
                # A larger tp alone might fit, say, but with a larger micro-batch the bubble is larger too.
                assert pace([*given, *rest], world) > pace([*given, *sum(words, [])], world)


def test_the_cheapest_comes_first() -> None:
    cfg = parse([*BIG, "--micro-batch-size", "2", "--zero", "0"]).config
    total = needs([*BIG, "--micro-batch-size", "2", "--zero", "0"], 32)
    first = remedies(cfg, Grid.of(32), total - 1, cluster(32))[0]
    assert first.flags == ("--zero 1",)
    sharded = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, zero=1))
    steps = [step_time(one, Grid.of(32), cluster(32)).total for one in (sharded, cfg)]
    assert first.slower == steps[0] / steps[1]


@pytest.mark.parametrize(
    ("world", "gib", "host", "flags"),
    [
        (8, 40, 0, ("--recompute full", "--zero 2")),
        (32, 16, 0, ("--recompute full", "--zero 3")),
        (1, 76, 2**37, ("--recompute full", "--offload optimizer")),
        (1, 44, 2**37, ("--recompute full", "--zero 3", "--offload optimizer+params")),
    ],
)
def test_sharding_and_offload_are_offered_where_they_fit(
    world: int, gib: int, host: int, flags: tuple[str, ...]
) -> None:
    """8 billion weights; one GPU's optimizer states take 90 GiB of the host."""
    cfg, budget = parse([*BIG, "--micro-batch-size", "1", "--precision", "bf16"]).config, gib * 2**30
    assert flags in [remedy.flags for remedy in remedies(cfg, Grid.of(world), budget, cluster(world), host)]
    less = remedies(cfg, Grid.of(world), budget, cluster(world), host=2**36)
    assert all("--offload" not in " ".join(remedy.flags) for remedy in less)


def test_remedies_of_a_large_run_take_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An out-of-memory page must not keep 256 ranks waiting: counted, since time depends on the machine."""
    counts: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            counts["operations"] += sum(map(len, args[0])) if name == "lowered" else 0
            return real(*args, **kwargs)

        return run

    flags = ["--preset", "llama-3-70b", "--global-batch-size", "1024", "--mock-data", "--device", "cuda"]
    flags += ["--precision", "bf16"]
    # Sizes that no other test has left in a cache.
    cfg = parse([*flags, "--pp", "8", "--tp", "4", "--init-std", "0.0203"]).config
    for cache in (schedule._build, schedule._orders, choose._choose, choose._within):
        cache.cache_clear()
    monkeypatch.setattr(schedule, "lower", counting("lowered", schedule.lower))
    monkeypatch.setattr(choose, "simulate", counting("simulated", choose.simulate))
    monkeypatch.setattr(parameters, "norm", counting("norms", parameters.norm))
    grid = Grid.of(256, tp=4, pp=8)
    budget = int(0.9 * max(m.total for m in memory_per_rank(cfg, grid)))
    assert remedies(cfg, grid, budget, cluster(256), host=2**40)
    assert counts["norms"] == 2 * 80 + 1  # one table of 80 layers
    assert counts["lowered"] <= 8
    assert counts["simulated"] <= 8
    assert counts["operations"] < 4_000


def test_nothing_fits_is_said() -> None:
    cfg = parse(BIG).config
    assert remedies(cfg, Grid.of(1), 20 * 2**30, cluster(1)) == []
    assert remedies(cfg, Grid.of(1), 20 * 2**30, cluster(1), host=2**40) == []
    text = page(MemoryContext(cfg, Grid.of(1), torch.device("cpu"), 0, 20 * 2**30), "no")
    assert "no layout, micro-batch, recomputation or --zero on 1 rank fits into 17.89 GiB: use more ranks" in text


def test_the_account_is_the_planners() -> None:
    cfg = parse([*BIG, "--tp", "2", "--pp", "2"]).config
    grid = Grid.of(8, tp=2, pp=2)
    text = page(MemoryContext(cfg, grid, torch.device("cpu"), 6, 2**30), "Tried to allocate 2.00 GiB")
    memory = memory_per_rank(cfg, grid)[1]
    for name in ("weights", "main_grad", "optimizer", "activations", "logits", "total"):
        row = re.search(rf"^  {name} +([\d.]+) (GiB|MiB) +(\d+)%$", text, re.M)
        assert row, text
        size = float(row[1]) * {"GiB": 2**30, "MiB": 2**20}[row[2]]
        assert size == pytest.approx(getattr(memory, name), rel=0.01)
        assert int(row[3]) == pytest.approx(100 * getattr(memory, name) / memory.total, abs=0.6)
    assert "rank 6 (pp rank 1 of 2" in text
    assert len(text.splitlines()) < 40


def test_which_errors_are_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(MemoryError) as of_python:
        bytearray(2**62)
    assert is_out_of_memory(of_python.value)
    for words in ("ncclUnhandledCudaError: Cuda failure 2 'out of memory'", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"):
        assert is_out_of_memory(RuntimeError(words))
    assert not is_out_of_memory(RuntimeError("Connection reset by peer"))


def test_the_hosts_memory_is_a_limit() -> None:
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    assert 0 < usable_bytes(torch.device("cpu")) < total


LIMITED = """
import resource, runpy, sys
import megalite.runtime.loop.loop
from pathlib import Path
data = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (data + 250 * 2**20, data + 250 * 2**20))
runpy.run_path("pretrain_gpt.py", run_name="__main__")
"""
RUN = [
    *["--device", "cpu", "--mock-data", "--num-layers", "1", "--hidden-size", "16", "--num-heads", "2"],
    *["--seq-len", "1024", "--vocab-size", "2048", "--micro-batch-size", "32", "--global-batch-size", "32"],
    *["--train-steps", "1", "--watchdog-timeout", "0"],
]


def run_limited(*flags: str) -> subprocess.CompletedProcess[str]:
    # One thread: each has a stack, which counts.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", LIMITED, *RUN, *flags],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.full
def test_out_of_memory_for_real_and_its_advice_followed(tmp_path: Path) -> None:
    failed = run_limited("--run-dir", str(tmp_path / "a"))
    assert failed.returncode == 1
    text = (tmp_path / "a/logs/out_of_memory_rank_0.txt").read_text()
    assert text in failed.stderr
    assert "allocate memory" in text
    available = re.search(r"available when the run began: ([\d.]+) MiB", text)
    assert available, text
    assert 200 < float(available[1]) <= 250
    assert re.search(r"^  logits +256.0 MiB +\d+%$", text, re.M)
    advice = re.search(r"^  (--micro-batch-size \d+) ", text, re.M)
    assert advice, text
    done = run_limited("--run-dir", str(tmp_path / "b"), *advice[1].split())
    assert done.returncode == 0, done.stderr
    assert "out of memory" not in done.stderr
