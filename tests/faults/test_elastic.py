"""Hosts lost under `--elastic`: the run goes on with fewer ranks, each step as if nothing had happened. Needs root.

Network namespaces stand for hosts. What is lost with one are all its processes, guards too; the disk is shared.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.torch import load_file

from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.checkpoint.manifest import read_manifest
from megalite.runtime.recover.hub import MET, UNFINISHED
from tests.faults.guarded_hosts import Hosts, end
from tests.faults.guarded_hosts import hosts as hosts
from tests.faults.harness import (
    FOREVER,
    RUN,
    STEPS,
    Alone,
    codes,
    committed,
    evaluations,
    events,
    in_batch,
    metrics,
    outcome,
    repeated,
    waits_at,
)
from tests.faults.harness import alone as alone
from tests.faults.zygote import Zygote, members_of, waiting_file
from tests.ranks import ROOT, reserve_port

pytestmark = pytest.mark.root

ELASTIC = ["--elastic", "--save-every", "0"]
KILLED = -signal.SIGKILL


def undisturbed(zygote: Zygote, folder: Path, flags: list[str], *faults: dict[str, Any], run: list[str] = RUN) -> Path:
    """A run of one replica that nothing happens to, but these faults."""
    folder.mkdir()
    axes = ("--tp", "--pp", "--cp", "--ep")
    world = math.prod(int(size) for axis, size in zip(flags, flags[1:]) if axis in axes)
    arguments = [*run, "--run-dir", str(folder / "run"), *flags]
    assert codes(zygote.start(arguments, world, folder, *faults).end()) == [0] * world
    return folder / "run"


def lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "event" not in line]


def assert_as(run: Path, whole: Path, until: int = STEPS) -> None:
    """Each line of a run, those of steps that were repeated too, is that of the run that nothing happened to."""
    expected = {line["step"]: line for line in lines(whole)}
    compared = [line for line in lines(run) if line["step"] <= until]
    assert {line["step"] for line in compared} == {*range(1, until + 1)} <= set(expected)
    for line in compared:
        want = expected[line["step"]]
        routers = [name for name in want if name.startswith(("aux_loss", "z_loss", "expert_load"))]
        for name in ("loss", "grad_norm", *routers):
            assert line[name] == (want[name] and pytest.approx(want[name], rel=1e-5)), (line["step"], name)
        for name in ("lr", "consumed_samples", "loss_scale", "skipped_steps", "global_batch_size", "nonfinite"):
            assert line.get(name) == want.get(name), (line["step"], name)


def lose(
    hosts: Hosts,
    folder: Path,
    flags: list[str],
    lost: dict[int, str],
    at: int = 5,
    each: int = 1,
    count: int = 4,
    run: list[str] = RUN,
    place: str = "step",
    faults: Sequence[dict[str, Any]] = (),
    until: int = STEPS,
) -> tuple[Path, Path]:
    """Lose hosts, one after the other, while rank 0 waits: each line of the run is as if nothing had happened.

    Args:
        lost: by host, what rank 0 says of its loss.
        at, place: step before which it waits, or another place.
        each: ranks of a host.
        count: hosts.
        faults: that happen to both runs.
        until: last step of both.

    Returns:
        The run, and the one that nothing happened to.
    """
    whole, hit = undisturbed(hosts.zygote, folder / "whole", flags, *faults, run=run), folder / "hit"
    waits = {**waits_at(at, hit), "place": place}
    jobs = hosts.begin(hit, [*flags, "--elastic"], 0, waits, *faults, each=each, count=count, run=run)
    hosts.zygote.until(lambda: waiting_file(hit / "go on", 0).exists() or jobs[0].ended())
    jobs[0].wait_for(0, MET)
    for number, (host, words) in enumerate(lost.items(), 1):
        hosts.power_off(host)
        hosts.zygote.until(lambda number=number: jobs[0].text(0).count("back to step ") >= number or jobs[0].ended())
        assert words in jobs[0].text(0), jobs[0].text(0)
    (hit / "go on").touch()
    left = end(jobs)
    assert codes(left) == [KILLED if rank // each in lost else 0 for rank in range(each * count)], left
    assert_as(hit / "run", whole, until)
    return hit / "run", whole


def test_a_host_of_four(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """Eight micro-batches on three ranks, as 2 3 3, and on four once it is back; no checkpoint could have been read."""
    flags, folder, run = ["--zero", "1"], tmp_path / "hit", tmp_path / "hit" / "run"
    whole = undisturbed(zygote, tmp_path / "whole", flags)
    later = {**waits_at(6, folder), "path": str(folder / "go further")}
    flags += [*ELASTIC, "--grow-after", "0"]
    jobs = hosts.begin(folder, flags, 0, waits_at(4, folder), later, count=4, launched=True)
    jobs[0].wait_for(0, "step 3/")
    hosts.power_off(1)
    jobs[0].wait_for(0, "back to step ")
    (folder / "go on").touch()
    jobs[0].wait_for(0, "step 5/")
    jobs.append(hosts.come_back(1))
    jobs[0].wait_for(0, "is back, in reserve")
    (folder / "go further").touch()
    left = end(jobs)
    assert codes(left) == [0, KILLED, 0, 0, 0], left
    assert "is lost (rank 1): dp 4 -> 3, 8 micro-batches as 2 3 3: back to step" in left[0].err
    assert "joins (rank 3): dp 3 -> 4, 8 micro-batches as 2 2 2 2: on from step" in left[0].err
    assert_as(run, whole)
    # No copy is made before the last but one has arrived on another host.
    assert repeated(run) <= 2
    sizes = [tuple(event[name] for name in ("from", "to", "reserve", "round")) for event in events(run, "resize")]
    assert sizes == [(4, 3, 0, 1), (3, 4, 0, 2)]
    assert [event["round"] for event in events(run, "recovery")] == [1]
    shrunk, grown = (metrics(run).index(event) for event in events(run, "resize"))
    for part, ranks in ((metrics(run)[:shrunk], 4), (metrics(run)[shrunk:grown], 3), (metrics(run)[grown:], 4)):
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
@pytest.mark.parametrize(
    ("layout", "told"), [("--pp 2", "dp 2 -> 1, 8 micro-batches as 8"), ("--num-experts 4 --ep 2", "dp 4 -> 2")]
)
def test_ranks_that_are_left_over_join_with_one_that_comes_back(
    hosts: Hosts, zygote: Zygote, tmp_path: Path, layout: str, told: str
) -> None:
    """A replica is complete again; evaluations and saves that are due at that step are not forgotten."""
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    flags = [*layout.split(), "--eval-every", "1", "--eval-steps", "1"]
    whole = undisturbed(zygote, tmp_path / "whole", flags)
    later = {**waits_at(6, folder), "path": str(folder / "go further")}
    flags += ["--elastic", "--save-every", "1", "--keep-last", "10", "--grow-after", "0"]
    jobs = hosts.begin(folder, flags, 0, waits_at(4, folder), later, count=4, launched=True)
    jobs[0].wait_for(0, "step 3/")
    hosts.power_off(1)
    jobs[0].wait_for(0, told)
    jobs[0].wait_for(0, ", 1 rank in reserve: back to step ")
    (folder / "go on").touch()
    jobs[0].wait_for(0, "step 5/")
    jobs.append(hosts.come_back(1))
    jobs[0].wait_for(0, "is back, in reserve")
    (folder / "go further").touch()
    left = end(jobs)
    assert codes(left) == [0, KILLED, 0, 0, 0], left
    assert_as(run, whole)
    assert [(event["from"], event["to"], event["reserve"]) for event in events(run, "resize")] == [(4, 2, 1), (2, 4, 0)]
    assert repeated(run) <= 2
    assert evaluations(run) == pytest.approx(evaluations(whole), rel=1e-5)
    # One that was still being written is made up for by that of the step that all go on from.
    assert {f"step_{step:08d}" for step in (*(event["step"] for event in events(run, "resize")), STEPS)} <= committed(
        run
    )


@pytest.mark.full
def test_a_host_comes_back_at_a_step_that_is_rewound(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """All were to wait after it; that they went back instead ended the run, as if it had been told to stop."""
    flags, folder, run = ["--on-spike", "rewind", "--train-steps", "13"], tmp_path / "hit", tmp_path / "hit" / "run"
    flags += ["--save-every", "4"]
    whole = undisturbed(zygote, tmp_path / "whole", flags, in_batch("spike", 88))
    later = {**waits_at(11, folder), "path": str(folder / "go further")}
    flags += ["--elastic", "--grow-after", "0"]
    jobs = hosts.begin(folder, flags, 0, waits_at(4, folder), later, in_batch("spike", 88), launched=True)
    jobs[0].wait_for(0, "step 3/")
    hosts.power_off(1)
    jobs[0].wait_for(0, "dp 3 -> 2")
    (folder / "go on").touch()
    jobs[0].wait_for(0, "step 10/")
    jobs.append(hosts.come_back(1))
    jobs[0].wait_for(0, "is back, in reserve")
    (folder / "go further").touch()
    left = end(jobs)
    assert codes(left) == [0, KILLED, 0, 0], left
    assert [(event["from"], event["to"]) for event in events(run, "resize")] == [(3, 2), (2, 3)]
    assert len(events(run, "rewind")) == len(events(whole, "rewind")) == 1
    last, expected = ({line["step"]: line for line in lines(folder)} for folder in (run, whole))
    assert {step: line["loss"] for step, line in last.items()} == pytest.approx(
        {step: line["loss"] for step, line in expected.items()}, rel=1e-5
    )
    assert last[13]["consumed_samples"] == expected[13]["consumed_samples"]


def test_the_first_host_is_lost(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """Hub, store and lock were on it: another guard is the hub, and takes in the host once it is back."""
    flags, folder, run = ["--zero", "1"], tmp_path / "hit", tmp_path / "hit" / "run"
    whole = undisturbed(zygote, tmp_path / "whole", flags)
    later = {**waits_at(6, folder, 1), "path": str(folder / "go further")}
    flags += [*ELASTIC, "--grow-after", "0"]
    flags += ["--save-every", "2", "--keep-last", "10"]
    jobs = hosts.begin(folder, flags, 0, waits_at(4, folder, 1), later, count=4, launched=True)
    jobs[0].wait_for(0, "step 3/")
    zygote.until(lambda: committed(run))
    hosts.power_off(0)
    zygote.until(lambda: events(run, "resize"))
    # Most often that of rank 1, whose turn it is first.
    (first,) = (host for host in (1, 2, 3) if "back to step " in jobs[host].text(0))
    (folder / "go on").touch()
    zygote.until(lambda: lines(run)[-1]["step"] >= 5 or jobs[first].ended())
    jobs.append(hosts.come_back(0))
    jobs[first].wait_for(0, "is back, in reserve")
    (folder / "go further").touch()
    left = end(jobs)
    assert codes(left) == [KILLED, 0, 0, 0, 0], left
    assert "is lost (rank 0): dp 4 -> 3, 8 micro-batches as 2 3 3: back to step" in left[first].err
    assert "joins (rank 3): dp 3 -> 4, 8 micro-batches as 2 2 2 2: on from step" in left[first].err
    assert_as(run, whole)
    assert repeated(run) <= 2
    sizes = [tuple(event[name] for name in ("from", "to", "reserve", "round")) for event in events(run, "resize")]
    assert sizes == [(4, 3, 0, 1), (3, 4, 0, 2)]
    # It is one run: what the lost host has saved is its own.
    saved = [run / "checkpoints" / name for name in ("step_00000002", "step_00000008")]
    assert len({read_manifest(path).run_id for path in saved}) == 1
    zygote.until(lambda: not members_of(tmp_path))


@pytest.mark.full
def test_a_host_that_is_told_to_stop(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """It leaves after a step, and the others go on; told all together, the run saves and ends."""
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    whole = undisturbed(zygote, tmp_path / "whole", [*FOREVER, "--exit-interval", "60"])
    jobs = hosts.begin(folder, [*ELASTIC, *FOREVER, "--grow-after", "0"], 0, launched=True)
    jobs[0].wait_for(0, "step 3/")
    os.kill(jobs[2].pid(0), signal.SIGTERM)
    jobs[0].wait_for(0, "leaves (rank 2): dp 3 -> 2, 8 micro-batches as 4 4: on from step ")
    assert codes(end(jobs[2:])) == [0]
    jobs[2] = hosts.come_back(2)
    jobs[0].wait_for(0, "joins (rank 2): dp 2 -> 3, 8 micro-batches as 2 3 3: on from step ")
    # The log has it before the record.
    zygote.until(lambda: len(events(run, "resize")) == 2)
    back = events(run, "resize")[1]["step"]
    jobs[0].wait_for(0, f"step {back + 2}/")
    for job in reversed(jobs):
        os.kill(job.pid(0), signal.SIGTERM)
    left = end(jobs)
    assert codes(left) == [0, 0, 0], left
    assert repeated(run) == 0
    assert not events(run, "recovery")
    assert committed(run) == {f"step_{lines(run)[-1]['step']:08d}"}
    assert_as(run, whole, until=min(lines(run)[-1]["step"], 60))


@pytest.mark.full
def test_all_that_train_are_lost(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """Those in reserve waited a minute for the next hub, and ended; now one is it, and they go on from disk."""
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    whole = undisturbed(zygote, tmp_path / "whole", [])
    flags = ["--elastic", "--save-every", "2"]
    jobs = hosts.begin(folder, flags, 2, waits_at(5, folder), count=4, launched=True)
    jobs[0].wait_for(0, "step 4/")
    zygote.until(lambda: "step_00000004" in committed(run))
    hosts.power_off(0)
    hosts.power_off(1)
    left = end(jobs)
    assert codes(left) == [KILLED, KILLED, 0, 0], left
    (event,) = events(run, "resize")
    assert (event["from"], event["to"], event["step"]) == (2, 2, 4)
    assert_as(run, whole)


@pytest.mark.full
def test_the_first_host_is_told_to_stop(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """It stopped the run; now it leaves as any other does, and so does the next one that has the hub."""
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    whole = undisturbed(zygote, tmp_path / "whole", [*FOREVER, "--exit-interval", "60"])
    jobs = hosts.begin(folder, [*ELASTIC, *FOREVER, "--grow-after", "0"], 0, count=4, launched=True)
    jobs[0].wait_for(0, "step 3/")
    os.kill(jobs[0].pid(0), signal.SIGTERM)
    zygote.until(lambda: len(events(run, "resize")) == 1)
    assert codes(end(jobs[:1])) == [0]
    jobs[0] = hosts.come_back(0)
    zygote.until(lambda: len(events(run, "resize")) == 2)
    back = events(run, "resize")[1]["step"]
    zygote.until(lambda: lines(run)[-1]["step"] >= back + 2)
    (first,) = (host for host in (1, 2, 3) if "taking its place" in jobs[host].text(0))
    os.kill(jobs[first].pid(0), signal.SIGTERM)
    zygote.until(lambda: len(events(run, "resize")) == 3)
    assert codes(end([jobs.pop(first)])) == [0]
    back = events(run, "resize")[2]["step"]
    zygote.until(lambda: lines(run)[-1]["step"] >= back + 2)
    for job in jobs:
        os.kill(job.pid(0), signal.SIGTERM)
    left = end(jobs)
    assert codes(left) == [0, 0, 0], left
    causes = [event["cause"] for event in events(run, "resize")]
    assert [cause.split(" ", 2)[2] for cause in causes] == ["leaves (rank 0)", "joins (rank 3)", "leaves (rank 0)"]
    assert repeated(run) == 0
    assert not events(run, "recovery")
    assert committed(run) == {f"step_{lines(run)[-1]['step']:08d}"}
    assert_as(run, whole, until=min(lines(run)[-1]["step"], 60))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "fewest", "count", "words"),
    [("--zero 1", "3", 3, "too few ranks are left"), ("--pp 2", "0", 2, "too few ranks are left")],
)
def test_fewer_than_the_minimum_without_the_first_host(
    hosts: Hosts, zygote: Zygote, tmp_path: Path, layout: str, fewest: str, count: int, words: str
) -> None:
    """The run ended without a last save; now those who are left save, in a guard that stands in for a stage, too."""
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    whole = undisturbed(zygote, tmp_path / "whole", layout.split())
    flags = [*layout.split(), *ELASTIC, "--min-ranks", fewest]
    jobs = hosts.begin(folder, flags, 0, waits_at(5, folder, 1), count=count)
    jobs[0].wait_for(0, "step 4/")
    hosts.power_off(0)
    left = end(jobs)
    assert codes(left) == [KILLED, *[UNFINISHED] * (count - 1)], left
    assert any(f"{words}: saving, then exiting" in rank.err for rank in left), left
    (saved,) = committed(run)
    assert saved in ("step_00000002", "step_00000003", "step_00000004")
    world = 2 if "pp" in layout else 1
    again = zygote.start([*RUN, *layout.split(), "--save-every", "0", "--run-dir", str(run)], world, folder)
    assert codes(again.end()) == [0] * world
    assert_as(run, whole)


@pytest.mark.full
def test_a_silent_reserve_and_a_host_of_another_version(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """A reserve that took a lost rank's place and said nothing more ended the run, as the other would have."""
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    whole = undisturbed(zygote, tmp_path / "whole", [])
    later = {**waits_at(7, folder), "path": str(folder / "go further")}
    jobs = hosts.begin(folder, ELASTIC, 1, waits_at(5, folder), later, count=4, launched=True)
    jobs[0].wait_for(0, "step 4/")
    os.kill(jobs[3].pid(0), signal.SIGSTOP)
    hosts.power_off(1)
    jobs[0].wait_for(0, "dp 3 -> 2, 8 micro-batches as 4 4: back to step ")
    os.kill(jobs[3].pid(0), signal.SIGCONT)
    (folder / "go on").touch()
    jobs[0].wait_for(0, "step 6/")
    (other,) = hosts.start(1, more=["--lr", "2e-3"]).end(120)
    (folder / "go further").touch()
    left = end(jobs)
    assert codes(left) == [0, KILLED, 0, KILLED], left
    assert other.code == KILLED
    assert "has other options or another version of megalite than the run" in other.err
    assert_as(run, whole)


@pytest.mark.full
def test_a_host_with_other_data(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """It was found out when all ranks had met, which ended the run; so did a host that could not open its data."""
    folder, data = tmp_path / "hit", tmp_path / "tokens"

    def write(first: int) -> None:
        with IndexedDatasetWriter(tmp_path / "new", np.dtype(np.uint16)) as writer:
            writer.add_documents((np.arange(4000) + first) % 64, [4000])
            writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 64})
        for kind in ("bin", "idx", "json"):
            (tmp_path / f"new.{kind}").replace(f"{data}.{kind}")  # the files that the others have opened stay

    write(0)
    flags = [*(word for word in RUN if word != "--mock-data"), "--data", str(data), "--split", "1"]
    whole = undisturbed(zygote, tmp_path / "whole", [], run=flags)
    later = {**waits_at(6, folder), "path": str(folder / "go further")}
    more = [*ELASTIC, "--grow-after", "0"]
    jobs = hosts.begin(folder, more, 0, waits_at(4, folder), later, launched=True, run=flags)
    jobs[0].wait_for(0, "step 3/")
    hosts.power_off(1)
    jobs[0].wait_for(0, "dp 3 -> 2")
    (folder / "go on").touch()
    jobs[0].wait_for(0, "step 5/")
    write(1)
    (other,) = hosts.come_back(1).end()
    Path(f"{data}.bin").unlink()
    (without,) = hosts.come_back(1).end()
    write(0)
    jobs.append(hosts.come_back(1))
    jobs[0].wait_for(0, "is back, in reserve")
    (folder / "go further").touch()
    left = end(jobs)
    assert codes([other, without, *left]) == [KILLED, KILLED, 0, KILLED, 0, 0], [other, without, *left]
    assert "has other data than the run" in other.err
    assert f"error: data prefix {data}: " in without.err
    assert [(event["from"], event["to"]) for event in events(folder / "run", "resize")] == [(3, 2), (2, 3)]
    assert_as(folder / "run", whole)


@pytest.mark.full
def test_two_hosts_one_after_the_other_with_zero_3(hosts: Hosts, tmp_path: Path) -> None:
    """The second is lost before the first copy of the layout of three ranks is made."""
    flags = ["--zero", "3", "--zero-whole-below", "100", "--save-every", "0"]
    lose(hosts, tmp_path, flags, {1: "dp 4 -> 3", 2: "dp 3 -> 2"})


EVALUATED = ["--eval-every", "2", "--eval-steps", "2"]
BIASED = ["--num-experts", "4", "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]


class Row(NamedTuple):
    """A run of hosts, the last of which is lost.

    Attributes:
        flags: of the run.
        after: ranks that go on.
        more: arguments of `lose`.
    """

    flags: list[str]
    after: int = 3
    more: dict[str, Any] = {}


ROWS = {
    "tensor parallel, with saves and evaluations": Row(
        ["--tp", "2", "--save-every", "2", *EVALUATED], 4, {"count": 3, "each": 2}
    ),
    "experts of two ranks": Row(["--num-experts", "4", "--ep", "2", "--zero", "2"], 2),
    "experts chosen with biases": Row(BIASED),
    "experts of two ranks, chosen with biases": Row([*BIASED, "--ep", "2"], 2),
    "zero bubbles": Row(["--pp", "2", "--schedule", "zb-h1"], 2),
    "nothing sharded": Row(["--zero", "0"]),
    "interleaved": Row(["--num-layers", "4", "--pp", "2", "--vp", "2", "--schedule", "interleaved"], 4, {"count": 6}),
    "Muon, and a module that predicts further": Row(["--optimizer", "muon", "--mtp-num-layers", "1"]),
    "LAMB": Row(["--optimizer", "lamb"]),
    "FP8": Row(["--fp8", "rowwise", "--fp8-emulate"]),
    "offloaded, in fp16": Row(["--offload", "optimizer+params", "--zero", "3", "--precision", "fp16"]),
    # One before the loss and one after it: at the second the scale falls, as the first was counted.
    "overflows": Row(["--precision", "fp16"], more={"faults": [in_batch("overflow", 16), in_batch("overflow", 48)]}),
    "batches that grow": Row(["--batch-size-schedule", "0:4 5:8"]),
    "rings": Row(["--cp", "2", "--num-heads", "2", "--hidden-dropout", "0"], 2),
    "the first step": Row([], more={"at": 1}),
    "the last step": Row([], more={"at": STEPS}),
    "after the last step": Row(EVALUATED, more={"at": STEPS, "place": "end"}),
    "after the step at which the run is to end": Row(
        ["--exit-interval", "4", *EVALUATED], more={"at": 4, "place": "end", "until": 4}
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_runs_in_parts(hosts: Hosts, tmp_path: Path, row: Row) -> None:
    last = row.more.get("count", 4) - 1
    run, whole = lose(hosts, tmp_path, ["--save-every", "0", *row.flags], {last: ""}, **row.more)
    assert [event["to"] for event in events(run, "resize")] == [row.after]
    # One that a copy had not left behind yet is made again.
    assert evaluations(run) == pytest.approx(evaluations(whole), rel=1e-5)
    assert biases(run) == biases(whole), "they count tokens, whoever has these"
    assert bool(biases(run)) == (BIASED[-1] in row.flags)


def biases(run: Path) -> dict[str, list[float]]:
    """Those of routers, in the last checkpoint."""
    found = dict[str, list[float]]()
    for path in (run / "checkpoints" / "latest").glob("*.safetensors"):
        found |= {name: tensor.tolist() for name, tensor in load_file(path).items() if ".router.bias" in name}
    return found


@pytest.mark.full
def test_saved_by_fewer_ranks_and_resumed_by_all(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    runs = lose(hosts, tmp_path, ["--exit-interval", "6", "--save-every", "0"], {3: ""}, until=6)
    saved = [read_manifest(run / "checkpoints" / "latest") for run in runs]
    assert [(manifest.step, manifest.topology["dp"]) for manifest in saved] == [(6, 3), (6, 1)]
    for run, world in zip(runs, (4, 1)):
        job = zygote.start([*RUN, "--save-every", "0", "--run-dir", str(run)], world, tmp_path)
        assert codes(job.end()) == [0] * world
    assert_as(*runs)


@pytest.mark.full
@pytest.mark.parametrize("flags", [[], ["--elastic"]], ids=["host", "elastic"])
def test_bits_are_those_of_a_run_without_it(hosts: Hosts, tmp_path: Path, alone: Alone, flags: list[str]) -> None:
    """Where no host is lost."""
    jobs, run = hosts.begin(tmp_path, flags, 0, count=4), tmp_path / "run"
    assert codes(end(jobs)) == [0] * 4
    assert outcome(run) == outcome(alone(4, "--micro-batch-size", "1"))


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
    # None is made before the last but one has arrived on the other host.
    assert saved in ("step_00000004", "step_00000005", "step_00000006")
    assert codes(zygote.start([*RUN, "--save-every", "0", "--run-dir", str(run)], 1, folder).end()) == [0]
    assert_as(run, whole)


@pytest.mark.full
def test_a_host_under_torchrun(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """The store is in the first host's torchrun, which knows nothing of a number of ranks that changes.

    One that is started again joins; told to stop, torchrun has its ranks leave in order.
    """
    run = tmp_path / "run"
    flags = [*RUN, *FOREVER, *ELASTIC, "--grow-after", "0", "--recover", "host", "--run-dir", str(run)]
    with hosts.torchrun(tmp_path, flags) as launchers:

        def said(words: str, times: int = 1) -> bool:
            text = (tmp_path / "said_0").read_text()
            assert launchers[0].poll() is None, text
            return text.count(words) >= times

        zygote.until(lambda: said("step 5/"))
        hosts.power_off(2)
        zygote.until(lambda: said("is lost (rank 2): dp 3 -> 2, 8 micro-batches as 4 4: back to step "))
        hosts.again(2)
        zygote.until(lambda: said("joins (rank 2): dp 2 -> 3, 8 micro-batches as 2 3 3: on from step "))
        launchers[3].send_signal(signal.SIGTERM)
        zygote.until(lambda: said("leaves (rank 2): dp 3 -> 2, 8 micro-batches as 4 4: on from step "))
        zygote.until(lambda: launchers[3].poll() is not None)
        back = events(run, "resize")[2]["step"]
        zygote.until(lambda: said(f"step {back + 3}/"))
        assert len(events(run, "recovery")) == 1
        # One that was not among them, from the run's folder alone.
        hosts.again(3, "-m", "megalite", "join", str(run))
        zygote.until(lambda: said("dp 2 -> 3, 8 micro-batches as 2 3 3: on from step ", 2))
        launchers[4].send_signal(signal.SIGTERM)
        zygote.until(lambda: launchers[4].poll() is not None)


@pytest.mark.full
@pytest.mark.parametrize("how", ["join", "train"])
def test_the_first_host_under_torchrun(hosts: Hosts, zygote: Zygote, tmp_path: Path, how: str) -> None:
    """Its torchrun had the store for all hosts; `megalite join` or `megalite train` brings it back, without that."""
    run = tmp_path / "run"
    flags = [*RUN, *FOREVER, *ELASTIC, "--grow-after", "0", "--recover", "host", "--run-dir", str(run)]
    with hosts.torchrun(tmp_path, flags) as launchers:

        def said(host: int, words: str) -> bool:
            assert launchers[1].poll() is None
            return words in (tmp_path / f"said_{host}").read_text()

        zygote.until(lambda: said(0, "step 5/"))
        hosts.power_off(0)
        zygote.until(lambda: len(events(run, "resize")) == 1)
        place = f"--nproc 1 --nnodes 3 --node-rank 0 --master-addr {hosts.address} --master-port {reserve_port()}"
        words = [str(run)] if how == "join" else [*place.split(), str(ROOT / "pretrain_gpt.py"), *flags]
        hosts.again(0, "-m", "megalite", how, *words)
        zygote.until(lambda: len(events(run, "resize")) == 2)
        back = events(run, "resize")[1]["step"]
        zygote.until(lambda: lines(run)[-1]["step"] > back + 2)
        sizes = [(event["from"], event["to"]) for event in events(run, "resize")]
        assert sizes == [(3, 2), (2, 3)]
        assert "is lost (rank 0)" in events(run, "resize")[0]["cause"]
        for launcher in launchers[1:]:
            launcher.send_signal(signal.SIGTERM)
        zygote.until(lambda: all(launcher.poll() is not None for launcher in launchers))
        assert committed(run) == {f"step_{lines(run)[-1]['step']:08d}"}
