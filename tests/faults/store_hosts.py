"""Two hosts that share no disk, with data and checkpoints in a store, and kills at chosen requests."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.checkpoint.manifest import Manifest, commit_text
from megalite.runtime.places.names import step_of
from megalite.runtime.places.store import Store
from megalite.runtime.places.store_place import StorePlace
from tests.faults.networks import networks
from tests.faults.zygote import Job, Zygote
from tests.parity.runs import losses
from tests.ranks import reserve_port
from tests.stores import S3, BreakingProxy, Fault, environment

BLOCK = 8 << 20
# Where a run is killed: pattern of the request, and how many of those may pass before it.
MID_PART = [("PUT .*/rank_00000.safetensors", 1), ("PUT .*/rank_00001.safetensors", 1)]
PLACES = [
    *MID_PART,
    (r"PUT .*/rank_0000\d\.json", 2),
    ("PUT .*/manifest.json", 1),
    ("PUT .*/COMMIT", 1),
    ("PUT .*/(latest|owner|metrics.jsonl)", 2),
    ("DELETE", 3),
    (r"GET .*(text\.bin|safetensors)", 2),
    (".", 60),
]
# Answers whose content is checked; no checksum covers lists and sizes.
DAMAGE = ("short", "corrupt")
OBJECTS = r"GET .*\.(bin|idx|json|safetensors)$"


class Host:
    """A rank's machine: its disk, and its own network.

    Attributes:
        disk: the home folder of what runs on it, by which its processes are known.
    """

    def __init__(self, zygote: Zygote, rank: int, disk: Path, network: str, env: dict[str, str]) -> None:
        self.zygote, self.rank, self.network = zygote, rank, network
        self.disk, self.env = disk, {**env, "HOME": str(disk)}
        self.log = disk.with_name(f"said_{rank}")
        self.log.mkdir()

    def start(self, arguments: list[str], port: int) -> Job:
        self.disk.mkdir(exist_ok=True)
        place = {"RANK": str(self.rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        return self.zygote.start(arguments, 1, self.log, env={**self.env, **place}, network=self.network)

    def power_off(self, rank: int) -> None:
        """Kill the rank and all that it has started."""
        home = f"HOME={self.disk}\0".encode()
        for pid in [rank, *map(int, filter(str.isdigit, os.listdir("/proc")))]:
            with contextlib.suppress(OSError):
                if pid == rank or home in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def two_hosts(s3: S3, zygote: Zygote, folder: Path) -> Iterator[tuple[BreakingProxy, list[Host]]]:
    """Hosts on networks of their own, which reach the store through a proxy alone."""
    with ExitStack() as undo:
        address, names = undo.enter_context(networks(2))
        first = address.replace(".254", ".1")
        proxy = BreakingProxy(s3.port, address)
        undo.callback(proxy.close)
        interface = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
        env = {**environment(proxy.port, address), "MASTER_ADDR": first, **interface}
        yield proxy, [Host(zygote, rank, folder / f"host{rank}", names[rank], env) for rank in range(2)]


def newest_whole(store: Store) -> int:
    """Step of the newest checkpoint in the store, 0 without one; all that counts as committed is whole."""
    steps = [0]
    for name in StorePlace(store).committed():
        data = store.read(f"{name}/manifest.json")
        assert store.read(f"{name}/COMMIT") == commit_text(data)
        for entry in Manifest.from_json(data, name).files:
            shard = store.read(f"{name}/{entry.name}")
            sums = [zlib.crc32(shard[at : at + BLOCK]) for at in range(0, len(shard), BLOCK)]
            assert (len(shard), sums) == (entry.size, list(entry.crc32))
        steps.append(step_of(name))
    return max(steps)


def killed(
    proxy: BreakingProxy,
    hosts: list[Host],
    arguments: list[str],
    place: tuple[str, int],
    rng: random.Random,
    others: Sequence[Fault] = (),
) -> str:
    """Train until a request at that place, then turn off one host or both; the request, "" if the run ended before.

    The host whose shard it is about is among them. The rest of the run is told to end, as a launcher would, and killed
    if it does not. `others` happen until then.
    """
    off = set(rng.choice([[0], [1], [0, 1]]))
    port, done, hit = reserve_port(), threading.Event(), list[str]()
    jobs = [host.start(arguments, port) for host in hosts]
    pids = [job.pid(0) for job in jobs]

    def act(line: str) -> None:
        hit.append(line)
        off.update(int(rank) for rank in re.findall(r"rank_0000(\d)\.safetensors", line))
        for rank in off:
            hosts[rank].power_off(pids[rank])
        done.set()

    half = rng.random() < 0.5 or place in MID_PART
    kind, skip = "call-before" if half else "call-after", rng.randrange(place[1])
    proxy.faults = [Fault(place[0], kind, 1, skip=skip, action=act), *others]
    # Ranks may have ended while what they started is still being killed.
    hosts[0].zygote.until(lambda: done.is_set() or (not hit and all(job.ended() for job in jobs)))
    proxy.faults = []
    for rank in {0, 1} - off:
        if hit and not jobs[rank].ended():
            os.kill(pids[rank], signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                hosts[rank].zygote.until(jobs[rank].ended, 20)
            hosts[rank].power_off(pids[rank])
    left = [job.end()[0] for job in jobs]
    assert hit or [rank.code for rank in left] == [0, 0], left
    for rank in off if hit and rng.random() < 0.5 else set[int]():
        shutil.rmtree(hosts[rank].disk)
    return hit[0] if hit else ""


def drawn(broken: Sequence[str], rng: random.Random) -> list[Fault]:
    """Draw what else happens to requests; one answer is damaged at most, as two running are taken for damaged data."""
    kinds = [kind for kind in broken if rng.random() < 0.5]
    faults = [Fault(".", kind, 2, skip=rng.randrange(60), seconds=0.5) for kind in kinds if kind not in DAMAGE]
    damage = [kind for kind in kinds if kind in DAMAGE]
    return faults + [Fault(OBJECTS, kind, 1, skip=rng.randrange(10)) for kind in damage[:1]]


def kill_to_the_end(
    s3: S3, zygote: Zygote, folder: Path, rng: random.Random, kills: int, broken: Sequence[str] = ()
) -> list[str]:
    """Kill a run again and again; return the requests at which it was.

    After every kill what counts as committed is whole, and none is lost; the end is that of an undisturbed run, to the
    bit. The first kills are in the middle of a rank's part.

    Args:
        s3: a store; what the run leaves there is under the folder's name.
        zygote: starts all ranks.
        folder: an empty one, for data, disks of hosts and what they say.
        rng: draws places of kills, hosts, disks that are lost.
        kills: number of kills.
        broken: kinds of a `Fault` that also happen now and then.
    """
    (folder / "data").mkdir()
    with IndexedDatasetWriter(folder / "data/text", np.dtype("<u2")) as writer:
        writer.add_documents(np.random.default_rng(0).integers(0, 90, 300_000), [1000] * 300)
        writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 90})
    for path in (folder / "data").iterdir():
        Store(s3.url(f"{folder.name}/data")).write(path.name, path.read_bytes())
    model = [
        *("--num-layers", "2", "--hidden-size", "32", "--num-heads", "4", "--vocab-size", "90", "--seq-len", "16"),
        *("--global-batch-size", "4", "--device", "cpu", "--lr", "3e-4", "--hidden-dropout", "0.1"),
        *("--lr-decay-steps", "1000", "--save-every", "2", "--micro-batch-size", "2"),
    ]
    url, steps, hits = s3.url(f"{folder.name}/run"), 4, list[str]()
    flags = [*model, "--data", s3.url(f"{folder.name}/data/text"), "--run-dir", url]
    store, newest = Store(f"{url}/checkpoints"), 0
    with two_hosts(s3, zygote, folder) as (proxy, hosts):
        while len(hits) < kills:
            place = MID_PART[len(hits)] if len(hits) < 2 else rng.choice(PLACES)
            others = drawn(broken, rng)
            # An end that nobody disturbed has saved all its steps.
            ended = killed(proxy, hosts, [*flags, "--train-steps", str(steps)], place, rng, others)
            hits += [ended] if ended else []
            before, newest = newest, newest_whole(store)
            assert newest >= before if ended else newest == steps
            steps += 2
        assert killed(proxy, hosts, [*flags, "--train-steps", str(steps)], ("never", 1), rng) == ""
        assert "the hosts share no folder" in "".join(path.read_text() for path in hosts[0].log.iterdir())
    whole = folder / "whole"
    undisturbed = [*model, "--data", str(folder / "data/text"), "--train-steps", str(steps), "--run-dir", str(whole)]
    assert [rank.code for rank in zygote.start(undisturbed, 2, folder).end()] == [0, 0]
    last = StorePlace(store).committed()[0]
    for shard in (whole / f"checkpoints/step_{steps:08d}").glob("*.safetensors"):
        assert store.read(f"{last}/{shard.name}") == shard.read_bytes()
    assert step_of(last) == steps
    assert losses(folder / "host0/.cache/megalite/s3" / s3.bucket / folder.name / "run") == losses(whole)
    return hits
