"""cluster_check: nothing to say of a sound cluster; each fault, injected for real, is found and pinned on its rank."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT, finish
from tests.unit.extras.diagnose.cluster_ranks import PRODUCTS, STOPS, check_in_pool, copy_with_version, start, tampered
from tests.workers import WorkerPool

SHIFTED_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec += 100;
    return result;
}
"""


def run_in_pool(pool: WorkerPool, folder: Path, flip: str, *flags: str) -> tuple[str, dict[str, Any]]:
    answers = pool.run(4, check_in_pool, str(folder), flip, flags)
    codes, said, found = [a[0] for a in answers], answers[0][1], answers[0][2]
    assert [a[1] for a in answers[1:]] == ["", "", ""]  # rank 0 speaks alone
    assert codes == [0 if found["ok"] else 1] * 4
    return said, found


def blamed(found: dict[str, Any], check: str) -> set[tuple[int, ...]]:
    return {tuple(p["ranks"]) for p in found["problems"] if p["check"] == check}


def test_a_sound_cluster_passes_and_all_is_measured(pool: WorkerPool, tmp_path: Path) -> None:
    said, found = run_in_pool(pool, tmp_path, "none", "--pp", "2", "--burn")
    assert found["ok"], said
    assert found["layout"] == {"world": 4, "dp": 1, "cp": 1, "pp": 2, "tp": 2}
    groups = {(g["axis"], tuple(g["ranks"])) for g in found["groups"]}
    everyone = (0, 1, 2, 3)
    assert groups == {
        *[("tp", (0, 1)), ("tp", (2, 3)), ("pp", (0, 2)), ("pp", (1, 3))],
        ("world", everyone),
    }
    assert all(g["bandwidth_bps"] > 0 and g["latency_s"] > 0 for g in found["groups"])
    sent = sorted((m["group"], m["sender"], m["receiver"]) for r in found["ranks"] for m in r["links"])
    assert sent == [(g, a, b) for g in ("pp", "pp_grad") for a, b in ((0, 2), (1, 3), (2, 0), (3, 1))]
    assert "all is well" in said
    assert "run directory: seen by all ranks" in said
    assert "burn: skipped, there is no GPU" in said
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("flip", ["share", "sum"])
def test_a_wrong_sum_names_the_rank(pool: WorkerPool, tmp_path: Path, flip: str) -> None:
    said, found = run_in_pool(pool, tmp_path, flip)
    assert blamed(found, "all-reduce") == {(3,)}
    assert {p["text"].split(" over ")[1].split(" ")[0] for p in found["problems"]} == {"tp", "dp", "world"}
    assert "PROBLEM all-reduce: rank 3 on " in said


def test_a_wrong_message_names_its_link(pool: WorkerPool, tmp_path: Path) -> None:
    _, found = run_in_pool(pool, tmp_path, "message")
    assert blamed(found, "p2p") == {(3, 1)}
    assert {p["text"].split(" ")[3] for p in found["problems"]} == {"pp", "pp_grad"}


def test_a_run_directory_of_its_own_names_the_rank(pool: WorkerPool, tmp_path: Path) -> None:
    said, found = run_in_pool(pool, tmp_path, "none", "--own-folder")
    assert blamed(found, "run dir") == {(3,)}
    assert "is not shared" in said


@pytest.mark.full
def test_another_version_is_told_before_anything_else(tmp_path: Path) -> None:
    other = copy_with_version(tmp_path, "0.0.9")
    left = finish(start(["--tp", "2"], 2, {1: {"PYTHONPATH": str(tmp_path)}}, {1: other}))
    assert [rank.code for rank in left] == [1, 1]
    problems = [line for line in left[0].out.splitlines() if line.startswith("PROBLEM")]
    assert len(problems) == 2
    assert all(line.startswith("PROBLEM versions: rank 1 on ") for line in problems)
    assert problems[1].endswith("megalite is 0.0.9, and 0.1.0 on the others")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, for a clock that is wrong in one process")
def test_a_slow_rank_and_a_wrong_clock_are_named(tmp_path: Path) -> None:
    (tmp_path / "clock.c").write_text(SHIFTED_CLOCK)
    shim = tmp_path / "clock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, tmp_path / "clock.c", "-ldl"], check=True)
    flags = ["--json", str(tmp_path / "check.json"), "--size-mb", "0.1"]
    counts = {0: 1, 1: 20, 2: 1}
    scripts = {r: tampered(tmp_path / f"{r}.py", f"COUNT = {count}\n{PRODUCTS}") for r, count in counts.items()}
    left = finish(start(flags, 3, {2: {"LD_PRELOAD": str(shim)}}, scripts))
    assert [rank.code for rank in left] == [1, 1, 1], left
    found = json.loads((tmp_path / "check.json").read_text())
    assert blamed(found, "speed") == {(1,)}
    assert blamed(found, "clock") == {(2,)}
    assert found["ranks"][2]["clock_s"] == pytest.approx(100, abs=1)


@pytest.mark.full
def test_a_rank_that_hangs_is_named_by_the_others(tmp_path: Path) -> None:
    ranks = start(["--timeout", "20"], 3, scripts={1: tampered(tmp_path / "stops.py", STOPS)})
    hung = ranks.pop(1)
    try:
        left = finish(ranks)
        assert hung.poll() is None
    finally:
        hung.kill()
        hung.communicate()
    assert [rank.code for rank in left] == [1, 1]
    for rank in left:
        assert "stuck for 20 s in: all-reduce over dp, ranks 0, 1, 2; no sign of life from rank 1: stopped" in rank.err


STORE_GONE = """
import time
import torch.distributed as dist
from megalite.extras.diagnose.stuck import StuckWatch

watch = StuckWatch(0, "here", 2.0)
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
watch._store, watch._world = dist.TCPStore("127.0.0.1", server.port, is_master=False), 2
del server
with watch.stage("all-reduce over dp"):
    time.sleep(600)
"""


def test_a_rank_whose_store_has_gone_leaves_too() -> None:
    done = subprocess.run([sys.executable, "-c", STORE_GONE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "[rank 0, here] stuck for 2 s in: all-reduce over dp; "
        "the rendezvous store does not answer: is its host stopped or cut off?"
    )
