"""Measure data and uploads in an object store beside the local disk, and what they add to a step. Ratios first; --json.

Without --url it starts moto's server on this machine, which speaks S3 and shares the machine's cores with the step.

python benchmarks/store.py --mb 64
python benchmarks/store.py --url s3://bucket/benchmark
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.checkpoint import make_step, states_of, timed
from megalite.core.mesh.context import ParallelContext
from megalite.core.sharding import StateTensor
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.base.urls import cached_at
from megalite.runtime.checkpoint.mirror import Mirror
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.data import IndexedDataset, bring_prefix, build_datasets
from megalite.runtime.places.store import Store

SEQ_LEN = 2048
# Tokens that a step reads: two units of what is downloaded at a time.
PER_STEP = 1 << 18
ENDS = {"least": min, "most": max}


@contextlib.contextmanager
def moto() -> Iterator[tuple[str, int]]:
    """Start a server; a URL in it, and its process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError):
                request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
                urllib.request.urlopen(request).close()
                break
            if server.poll() is not None:
                raise RuntimeError("moto did not start: pip install 'moto[server]' s3fs")
            time.sleep(0.1)
        yield "s3://bucket/benchmark", server.pid
    finally:
        server.kill()
        server.wait()


def seconds_of(action: Callable[[], object]) -> float:
    """Measure the time of an action."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def write_data(folder: Path, mb: float, url: str) -> str:
    """Write token files of about `mb` MB, and copy them to the store; the local prefix."""
    with IndexedDatasetWriter(folder / "text", np.dtype("<u2")) as writer:
        for seed in range(max(1, round(mb))):
            writer.add_documents(np.random.default_rng(seed).integers(0, 60_000, 500_000), [500_000])
        writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 60_000})
    for path in folder.iterdir():
        Store(url).upload(path.name, str(path), path.stat().st_size)
    return str(folder / "text")


def read_all(prefix: str) -> float:
    """Read every sample in the order of training, all blocks checked; MB per second."""
    train = build_datasets([prefix], split="100", seq_len=SEQ_LEN, seed=1).train
    size = os.path.getsize(f"{prefix}.bin")
    return size / 1e6 / seconds_of(lambda: [train.sample(i) for i in range(size // (2 * SEQ_LEN) - 1)])


def step_while_reading(ctx: ParallelContext, step: Callable[[], None], prefix: str, steps: int) -> list[float]:
    """Time steps during each of which a thread reads tokens that nobody has read, as a loader does ahead of a step."""
    data, times = IndexedDataset(prefix), []
    for i in range(steps):
        thread = threading.Thread(target=data.tokens, args=(i * PER_STEP, (i + 1) * PER_STEP))
        thread.start()
        times.append(timed(ctx, step))
        thread.join()
    return times


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """A process of little priority, as a writer is, that only computes."""
    code = "import hashlib\ndata = bytes(1 << 20)\nwhile True: hashlib.sha256(data).digest()"
    process = subprocess.Popen([sys.executable, "-c", code])
    os.setpriority(os.PRIO_PROCESS, process.pid, 15)
    # Where the step has a core of its own, on another.
    os.sched_setaffinity(
        process.pid, {*range(os.cpu_count() or 1)} - os.sched_getaffinity(0) or os.sched_getaffinity(0)
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def keep_apart(others: Sequence[int]) -> None:
    """Give the step's thread a core and the highest priority, and other processes the rest: only what a rank does for
    its uploads, and what they share besides cores, is left to slow it. Needs root.
    """
    cores = sorted(os.sched_getaffinity(0))
    for pid in others:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores[1:])
    os.sched_setaffinity(0, cores[:1])
    os.setpriority(os.PRIO_PROCESS, 0, -20)


class Run:
    """A run's checkpoints in a place, and what uploading them costs."""

    def __init__(self, ctx: ParallelContext, url: str, folder: Path) -> None:
        self._ctx, self._mirror, self._count = ctx, Mirror(url, folder), 0
        self.checkpointer = Checkpointer(folder / "checkpoints", ctx, mirror=self._mirror)
        self.checkpointer.take()

    def upload(self, states: Sequence[StateTensor]) -> float:
        """Save, and measure the upload that follows, in seconds."""
        self._save(states)
        return seconds_of(self.checkpointer.settle)

    @property
    def writer(self) -> int:
        """Process that uploads."""
        return self.checkpointer._writer.process.pid

    def steps(self, states: Sequence[StateTensor], step: Callable[[], None]) -> dict[str, float]:
        """Time steps during an upload, with what the loop asks of it after each.

        Returns:
            Over the median of steps before and after it: the median of those during it ("uploading"), the same of the
            thread's processor time ("uploading_processor"), the time of the asking alone, and the median beside a
            process that keeps another core busy. Of those after it over those before it: "again", which is 1 but for
            noise. The number of steps during the upload.
        """
        polls, processor = list[float](), list[float]()

        def whole() -> None:
            begun = time.thread_time()
            step()
            polls.append(seconds_of(self.checkpointer.poll))
            processor.append(time.thread_time() - begun)

        def times(count: int = 40) -> list[float]:
            return [timed(self._ctx, whole) for _ in range(count)]

        before = times()
        with busy_core():
            beside = times()
        self._save(states)
        during = list[float]()
        polls.clear()
        count = len(processor)
        while self._mirror.is_busy:
            during.append(timed(self._ctx, whole))
        asking = statistics.median(polls)
        after = times()
        usual = statistics.median(before + after)
        ran = processor[count : count + len(during) - 1]
        ran_alone = processor[: len(before)] + processor[count + len(during) :]
        # The upload ended somewhere in the last.
        return {
            "uploading_over_step": statistics.median(during[:-1]) / usual,
            "uploading_processor_over_step": statistics.median(ran) / statistics.median(ran_alone),
            "asking_over_step": asking / usual,
            "beside_busy_core_over_step": statistics.median(beside) / usual,
            "again_over_step": statistics.median(after) / statistics.median(before),
            "uploading_count": len(during) - 1,
        }

    def _save(self, states: Sequence[StateTensor]) -> None:
        self._count += 1
        self.checkpointer.save(self._count, states, {}, background=True)
        self.checkpointer.finish()


def measure(url: str, root: Path, mb: float, step_s: float, rounds: int, servers: list[int] | None) -> dict[str, float]:
    ctx = ParallelContext.single()
    (root / "disk").mkdir()
    local = write_data(root / "disk", mb, f"{url}/data")
    states, step = states_of(ctx, mb), make_step(ctx, step_s)
    size, steps = sum(s.flat.numel() * 4 for s in states) / 1e6, int(mb * 1e6 / 2 / PER_STEP)
    here = Checkpointer(root / "here", ctx)
    # A folder takes what is uploaded without a server that works on the same cores.
    runs = {"store": Run(ctx, f"{url}/run", root / "run"), "folder": Run(ctx, f"file://{root}/far", root / "other")}
    if servers is not None:
        keep_apart([*servers, *(run.writer for run in runs.values())])
    seen: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seen.setdefault(name, []).append(value)

    def read_and_save(i: int) -> None:
        cached = []
        for cache in (str(root / f"a{i}"), str(root / f"b{i}")):
            bring_prefix(f"{url}/data/text", cache, 1 << 40)
            cached.append(str(cached_at(f"{url}/data/text", cache)))
        reading = [statistics.median(step_while_reading(ctx, step, prefix, steps)) for prefix in (local, cached[0])]
        note("step_reading_store_over_disk", reading[1] / reading[0])
        note("step_s", reading[0])
        note("data_disk_mb_per_s", read_all(local))
        note("data_store_mb_per_s", read_all(cached[1]))
        note("data_cached_mb_per_s", read_all(cached[1]))
        note("save_disk_mb_per_s", size / seconds_of(lambda: here.save(i, states, {})))

    for i in range(rounds):
        if servers is None:
            read_and_save(i)
        for name, run in runs.items():
            note(f"upload_{name}_mb_per_s", size / run.upload(states))
            for what, value in run.steps(states, step).items():
                note(f"{name}: {what}", value)
    for checkpointer in (here, *(run.checkpointer for run in runs.values())):
        checkpointer.close()
    ratios_first = sorted(seen.items(), key=lambda item: "over" not in item[0])
    middle = {name: statistics.median(values) for name, values in ratios_first}
    middle |= {
        f"{name}, {end}": of(seen[name])
        for name in seen
        if ": uploading_" in name and "over" in name
        for end, of in ENDS.items()
    }
    writers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        **middle,
        "checkpoint_mb": size,
        "data_mb": os.path.getsize(f"{local}.bin") / 1e6,
        # Of all writers: each checkpoint was written once and uploaded.
        "writer_processor_s_per_gb": (writers.ru_utime + writers.ru_stime)
        / ((4 + (servers is None)) * rounds * size / 1e3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a folder in a store, in which a new one is made (default: moto's server)")
    parser.add_argument("--mb", type=float, default=64.0, help="MB of data, and of a checkpoint")
    parser.add_argument("--step", type=float, default=0.1, help="seconds per synthetic training step, of one thread")
    parser.add_argument("--rounds", type=int, default=3, help="all is measured so often; medians are reported")
    parser.add_argument("--apart", action="store_true", help="the step on a core of its own, all else on the others")
    parser.add_argument("--folder", help="where to write locally (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        url, *servers = (args.url,) if args.url else stack.enter_context(moto())
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)))
        result = measure(
            f"{url}/{secrets.token_hex(4)}", root, args.mb, args.step, args.rounds, servers if args.apart else None
        )
    result |= {"cores": os.cpu_count() or 0, "load_before": before, "load_after": os.getloadavg()[0]}
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:32} {value:10.3f}")


if __name__ == "__main__":
    main()
