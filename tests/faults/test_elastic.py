"""Hosts lost under `--elastic`: the run goes on with fewer ranks, each step as if nothing had happened. Needs root.

Network namespaces stand for hosts. What is lost with one are all its processes, guards too; the disk is shared.
"""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest

from megalite.runtime.recover.hub import UNFINISHED
from tests.faults.guarded_hosts import Hosts, end
from tests.faults.guarded_hosts import hosts as hosts
from tests.faults.harness import FOREVER, RUN, codes, committed, events, metrics, repeated, waits_at
from tests.faults.zygote import Zygote, members_of

pytestmark = pytest.mark.root

ELASTIC = ["--elastic", "--save-every", "0"]
KILLED = -signal.SIGKILL


def undisturbed(zygote: Zygote, folder: Path, flags: list[str], run: list[str] = RUN) -> Path:
    """A run of one replica that nothing happens to."""
    folder.mkdir()
    axes = ("--tp", "--pp", "--cp", "--ep")
    world = math.prod(int(size) for axis, size in zip(flags, flags[1:]) if axis in axes)
    arguments = [*run, "--run-dir", str(folder / "run"), *flags]
    assert codes(zygote.start(arguments, world, folder).end()) == [0] * world
    return folder / "run"


def lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "event" not in line]


def assert_as(run: Path, whole: Path) -> None:
    """Each line of a run, those of steps that were repeated too, is that of the run that nothing happened to."""
    expected = {line["step"]: line for line in lines(whole)}
    assert {line["step"] for line in lines(run)} == set(expected)
    for line in lines(run):
        want = expected[line["step"]]
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(want[name], rel=1e-5), (line["step"], name)
        assert (line["lr"], line["consumed_samples"]) == (want["lr"], want["consumed_samples"])


def lose(
    hosts: Hosts,
    folder: Path,
    flags: list[str],
    lost: dict[int, str],
    at: int = 5,
    each: int = 1,
    count: int = 4,
    run: list[str] = RUN,
) -> tuple[Path, Path]:
    """Lose hosts, one after the other, before a step: each line of the run is as if nothing had happened.

    Args:
        lost: by host, what rank 0 says of its loss.
        each: ranks of a host.
        count: hosts.

    Returns:
        The run, and the one that nothing happened to.
    """
    whole, hit = undisturbed(hosts.zygote, folder / "whole", flags, run), folder / "hit"
    jobs = hosts.begin(hit, [*flags, "--elastic"], 0, waits_at(at, hit), each=each, count=count, run=run)
    jobs[0].wait_for(0, f"step {at - 1}/")
    for number, (host, words) in enumerate(lost.items(), 1):
        hosts.power_off(host)
        hosts.zygote.until(lambda number=number: jobs[0].text(0).count("back to step ") >= number or jobs[0].ended())
        assert words in jobs[0].text(0), jobs[0].text(0)
    (hit / "go on").touch()
    left = end(jobs)
    assert codes(left) == [KILLED if rank // each in lost else 0 for rank in range(each * count)], left
    assert_as(hit / "run", whole)
    return hit / "run", whole


def test_a_host_of_four(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """Eight micro-batches on three ranks, as 2 3 3; there is no checkpoint that could have been read."""
    said = "is lost (rank 1): dp 4 -> 3, 8 micro-batches as 2 3 3: back to step"
    run, _ = lose(hosts, tmp_path, ["--zero", "1", "--save-every", "0"], {1: said})
    assert repeated(run) <= 1
    (resize,) = events(run, "resize")
    assert (resize["from"], resize["to"], resize["reserve"], resize["round"]) == (4, 3, 0, 1)
    at = metrics(run).index(resize)
    for part, ranks in ((metrics(run)[:at], 4), (metrics(run)[at:], 3)):
        assert {line["ranks"] for line in part if "event" not in line} == {ranks}
    zygote.until(lambda: not members_of(tmp_path))


@pytest.mark.full
def test_a_pipeline_of_two_replicas(hosts: Hosts, tmp_path: Path) -> None:
    """A stage is lost: two of three ranks are the replica that is left, the third fills the next loss."""
    said = "dp 2 -> 1, 8 micro-batches as 8, 1 rank in reserve: back to step "
    run, _ = lose(hosts, tmp_path, ["--pp", "2", "--save-every", "0"], {1: said, 2: ""}, at=4)
    resized = [(event["from"], event["to"], event["reserve"]) for event in events(run, "resize")]
    # Where the two ranks had no copy of their own yet, these come from the four of before once more.
    assert resized in ([(4, 2, 1)], [(4, 2, 1), (2, 2, 0)])


@pytest.mark.full
def test_two_hosts_one_after_the_other_with_zero_3(hosts: Hosts, tmp_path: Path) -> None:
    """The second is lost before the first copy of the layout of three ranks is made."""
    flags = ["--zero", "3", "--zero-whole-below", "100", "--save-every", "0"]
    lose(hosts, tmp_path, flags, {1: "dp 4 -> 3", 2: "dp 3 -> 2"})


EVALUATED = ["--eval-every", "2", "--eval-steps", "2"]
# Flags, hosts, ranks of each, and ranks that go on.
ROWS = {
    "tensor parallel, with saves and evaluations": (["--tp", "2", "--save-every", "2", *EVALUATED], 3, 2, 4),
    "experts of two ranks": (["--num-experts", "4", "--ep", "2", "--zero", "2"], 4, 1, 2),
    "interleaved": (["--num-layers", "4", "--pp", "2", "--vp", "2", "--schedule", "interleaved"], 6, 1, 4),
    "Muon, and a module that predicts further": (["--optimizer", "muon", "--mtp-num-layers", "1"], 4, 1, 3),
    "offloaded, in fp16": (["--offload", "optimizer+params", "--zero", "3", "--precision", "fp16"], 4, 1, 3),
    "rings": (["--cp", "2", "--num-heads", "2", "--hidden-dropout", "0"], 4, 1, 2),
}


@pytest.mark.full
@pytest.mark.parametrize(("flags", "count", "each", "after"), ROWS.values(), ids=ROWS)
def test_what_runs_in_parts(hosts: Hosts, tmp_path: Path, flags: list[str], count: int, each: int, after: int) -> None:
    run, whole = lose(hosts, tmp_path, ["--save-every", "0", *flags], {count - 1: ""}, each=each, count=count)
    assert [event["to"] for event in events(run, "resize")] == [after]
    assert [(e["step"], pytest.approx(e["loss"], rel=1e-5)) for e in events(whole, "eval")] == [
        (e["step"], e["loss"]) for e in events(run, "eval")
    ]


@pytest.mark.full
def test_text_as_data(hosts: Hosts, tmp_path: Path) -> None:
    """Each rank knows the lanes that it has read: those who go on are told of all."""
    (tmp_path / "text").mkdir()
    for number in range(4):
        words = [json.dumps({"text": f"file {number} line {i} " + "ab" * i}) for i in range(4)]
        (tmp_path / "text" / f"{number}.jsonl").write_text("\n".join(words))
    flags = [
        *("--num-layers", "1", "--hidden-size", "16", "--num-heads", "2", "--seq-len", "16", "--device", "cpu"),
        *("--global-batch-size", "4", "--lr", "1e-3", "--train-steps", "16", "--hidden-dropout", "0.1"),
        *("--tokenizer", "bytes", "--data-lanes", "3", "--shuffle-tokens", "64", "--data-workers", "1"),
        *("--document-mask", "--data", str(tmp_path / "text"), "--cache-dir", str(tmp_path / "cache")),
        *("--save-every", "0"),
    ]
    said = "dp 3 -> 2, 4 micro-batches as 2 2: back to step "
    lose(hosts, tmp_path, [], {2: said}, at=12, count=3, run=flags)


@pytest.mark.full
def test_fewer_than_the_minimum(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """Two of three go on; then the last state is saved, and one rank resumes it."""
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    whole = undisturbed(zygote, tmp_path / "whole", [])
    later = {"rank": 0, "kind": "await", "place": "step", "at": 7, "path": str(folder / "go further")}
    jobs = hosts.begin(folder, [*ELASTIC, "--min-ranks", "2"], 0, waits_at(5, folder), later, count=3)
    jobs[0].wait_for(0, "step 4/")
    hosts.power_off(1)
    jobs[0].wait_for(0, "dp 3 -> 2")
    (folder / "go on").touch()
    jobs[0].wait_for(0, "step 6/")
    hosts.power_off(2)
    left = end(jobs)
    assert codes(left) == [UNFINISHED, KILLED, KILLED], left
    assert "no rank is left in reserve: saving, then exiting" in left[0].err
    (saved,) = committed(run)
    assert saved in ("step_00000005", "step_00000006")
    assert codes(zygote.start([*RUN, "--save-every", "0", "--run-dir", str(run)], 1, folder).end()) == [0]
    assert_as(run, whole)


@pytest.mark.full
def test_a_host_under_torchrun(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """The store is in the first host's torchrun, which knows nothing of a number of ranks that changes."""
    run = tmp_path / "run"
    flags = [*RUN, *FOREVER, *ELASTIC, "--recover", "host", "--run-dir", str(run)]
    with hosts.torchrun(tmp_path, flags) as launchers:

        def said(words: str) -> bool:
            text = (tmp_path / "said_0").read_text()
            assert launchers[0].poll() is None, text
            return words in text

        zygote.until(lambda: said("step 5/"))
        hosts.power_off(2)
        zygote.until(lambda: said("is lost (rank 2): dp 3 -> 2, 8 micro-batches as 4 4: back to step "))
        zygote.until(lambda: events(run, "resize"))
        back = events(run, "resize")[0]["step"]
        zygote.until(lambda: said(f"step {back + 3}/"))
