"""Runs of two ranks that save snapshots as differences into an S3 server, and kills of one of the two."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from megalite.core.mesh.context import ParallelContext
from megalite.extras.command import find_main
from megalite.runtime.checkpoint import local_copies
from megalite.runtime.checkpoint.load import verify_together
from megalite.runtime.checkpoint.manifest import read_manifest
from megalite.runtime.places.store import Store
from tests.faults.harness import codes
from tests.faults.store_runs import MODEL
from tests.faults.zygote import Zygote
from tests.parity.runs import losses
from tests.stores import S3, BreakingProxy, Fault, environment
from tests.unit.checkpoint.differences import assert_same

STEPS = 16
IN_ORDER = {"rank": "all", "kind": "", "place": "settle"}
SAVES = ["--save-every", "4", "--save-model-every", "1", "--train-steps", str(STEPS), "--lr-decay-steps", str(STEPS)]


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to, on a local disk, whose snapshots are all whole."""
    folder = tmp_path_factory.mktemp("whole")
    assert codes(zygote.start([*MODEL, *SAVES, "--run-dir", str(folder / "run")], 2, folder).end()) == [0, 0]
    return folder / "run"


class Run:
    """A run in a store."""

    def __init__(self, s3: S3, proxy: BreakingProxy, zygote: Zygote, folder: Path) -> None:
        self.proxy, self.zygote, self.folder, self.cache = proxy, zygote, folder, folder / "cache"
        url = s3.url(f"runs/{folder.name}")
        self.arguments = [*MODEL, *SAVES, "--save-model-delta", "3", "--run-dir", url, "--cache-dir", str(self.cache)]
        self.disk = self.cache / "s3" / s3.bucket / "runs" / folder.name
        self.store = Store(f"{url}/checkpoints")

    def train(self, *flags: str, world: int = 2) -> None:
        arguments, env = [*self.arguments, *flags], environment(self.proxy.port)
        left = self.zygote.start(arguments, world, self.folder, IN_ORDER, env=env).end()
        assert codes(left) == [0] * world, left

    def killed(self, rank: int, fault: Fault) -> None:
        """Train until a request, and kill a rank there."""
        job = self.zygote.start(self.arguments, 2, self.folder, IN_ORDER, env=environment(self.proxy.port))
        pid = job.pid(rank)
        fault.action = lambda line: os.kill(pid, signal.SIGKILL)
        self.proxy.faults = [fault]
        left = job.end()
        self.proxy.faults = []
        assert left[rank].code == -signal.SIGKILL, left
        assert left[1 - rank].code != 0, left

    def there(self) -> list[str]:
        """What is committed in the store."""
        return sorted(
            {name.rstrip("/") for name in self.store.names() if self.store.names(name.rstrip("/")).get("COMMIT")}
        )

    def check(self, whole: Path, tmp_path: Path) -> int:
        """All that is committed, on the disk and in the store, is what the undisturbed run has; count differences.

        Of what is in the store copies are kept, and not fetched again.
        """
        copies = [local_copies.fetch(self.store, name, tmp_path / "copies") for name in self.there()]
        found = 0
        for path in [*copies, *(self.disk / "checkpoints").glob("[!.]*_*")]:
            if not (path / "COMMIT").exists():
                continue
            verify_together(path, ParallelContext.single())
            (name,) = re.findall(r"(?:model|step)_\d+", path.name)
            if name.startswith("model"):
                assert_same(path, whole / "checkpoints" / name)
                found += read_manifest(path).base is not None
        return found


@pytest.fixture
def run(s3: S3, proxy: BreakingProxy, zygote: Zygote, tmp_path: Path) -> Run:
    return Run(s3, proxy, zygote, tmp_path)


@pytest.mark.full
def test_differences_come_back_from_the_store(
    run: Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of a base is refused once: it is there before that of its differences all the same."""
    run.proxy.faults = [Fault("PUT .*/model_00000001-[^/]*/COMMIT", "403", 1)]
    run.train("--save-errors", "warn")
    assert run.proxy.faults[0].happened == 1
    names = run.there()
    models = {int(name[6:14]): name for name in names if name.startswith("model_")}
    shutil.rmtree(run.cache)
    assert run.check(whole, tmp_path) >= STEPS // 3
    commits = [line for line in run.proxy.requests if re.match("PUT .*/model_.*/COMMIT$", line)]
    for name in models.values():
        base = read_manifest(tmp_path / "copies" / name).base
        if base is not None:
            of_base, of_it = (max(i for i, line in enumerate(commits) if n in line) for n in (base[0], name))
            assert of_base < of_it, commits
    # The tools need nothing but the URL.
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    step, name = max(models.items())
    find_main("inspect")([f"{run.store.url}/{name}", "--verify", "--flatten", str(tmp_path / "flat")])
    assert_same(tmp_path / "flat", whole / f"checkpoints/model_{step:08d}")
    # Another layout goes on; its snapshots refer to none of an earlier process.
    run.train("--train-steps", str(STEPS + 3), world=1)
    more = {name: read_manifest(run.disk / "checkpoints" / name).base for name in ("model_00000017", "model_00000018")}
    assert [base and base[0] for base in more.values()] == [None, "model_00000017"]
    assert set(names) <= {*run.there(), *(name for name in names if name.startswith("step_"))}


@pytest.mark.full
def test_kills_of_one_of_two_ranks(run: Run, whole: Path, tmp_path: Path) -> None:
    """In the middle of a difference's shards, before and after its commit, and while its base is sent."""
    faults = [
        (0, Fault(r"PUT .*/model_.*/rank_00001\.coded", "call-before", 1, skip=1)),
        (1, Fault(r"PUT .*/model_.*/rank_00001\.coded", "call-after", 1)),
        (1, Fault(r"PUT .*/model_.*/rank_00000\.coded", "call-before", 1, skip=1)),
        (0, Fault(r"PUT .*/model_.*/manifest\.json", "call-after", 1, skip=1)),
        (1, Fault("PUT .*/model_.*/COMMIT", "call-before", 1, skip=1)),
        (0, Fault("PUT .*/model_.*/COMMIT", "call-after", 1)),
        (0, Fault(r"PUT .*/step_.*/rank_00001\.safetensors", "call-before", 1)),
    ]
    differences = 0
    for rank, fault in faults:
        run.killed(rank, fault)
        differences += run.check(whole, tmp_path)
    run.train()
    shutil.rmtree(tmp_path / "copies")
    assert differences + run.check(whole, tmp_path) > 0
    assert losses(run.disk) == losses(whole)
    last = f"checkpoints/step_{STEPS:08d}"
    for shard in (whole / last).glob("*.safetensors"):
        assert shard.read_bytes() == (run.disk / last / shard.name).read_bytes()
