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
from megalite.base.store import Store, cached_at
from megalite.checkpoint.mirror import Mirror
from megalite.checkpoint.save import Checkpointer
from megalite.data import IndexedDataset, bring_prefix, build_datasets
from megalite.dist.context import ParallelContext
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.sharding import StateTensor

SEQ_LEN = 2048
# Tokens that a step reads: two units of what is downloaded at a time.
PER_STEP = 1 << 18


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Start a server; a URL in it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark", "NO_PROXY": "127.0.0.1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], **quiet)
    try:
        while True:
            with contextlib.suppress(OSError):
                request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
                urllib.request.urlopen(request).close()
                break
            if server.poll() is not None:
                raise RuntimeError("moto did not start: pip install 'moto[server]' s3fs")
            time.sleep(0.1)
        yield "s3://bucket/benchmark"
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
    code = "import hashlib, os; os.nice(15); data = bytes(1 << 20)\nwhile True: hashlib.sha256(data).digest()"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


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

    def steps(self, states: Sequence[StateTensor], step: Callable[[], None]) -> tuple[float, float, float, int]:
        """Time steps during an upload, with what the loop asks of it after each.

        Returns:
            Over the median of steps before and after it: the median of those during it, the time of the asking alone,
            and the median beside a process that keeps another core busy; and the number of steps during the upload.
        """
        polls = list[float]()

        def whole() -> None:
            step()
            polls.append(seconds_of(self.checkpointer.poll))

        alone = [timed(self._ctx, whole) for _ in range(20)]
        with busy_core():
            beside = [timed(self._ctx, whole) for _ in range(20)]
        self._save(states)
        during = []
        polls.clear()
        while self._mirror.is_busy:
            during.append(timed(self._ctx, whole))
        asking = statistics.median(polls)
        usual = statistics.median(alone + [timed(self._ctx, whole) for _ in range(20)])
        # The upload ended somewhere in the last.
        return (
            statistics.median(during[:-1]) / usual,
            asking / usual,
            statistics.median(beside) / usual,
            len(during) - 1,
        )

    def _save(self, states: Sequence[StateTensor]) -> None:
        self._count += 1
        self.checkpointer.save(self._count, states, {}, background=True)
        self.checkpointer.finish()


def measure(url: str, root: Path, mb: float, step_s: float, rounds: int) -> dict[str, float]:
    ctx = ParallelContext.single()
    (root / "disk").mkdir()
    local = write_data(root / "disk", mb, f"{url}/data")
    states, step = states_of(ctx, mb), make_step(ctx, step_s)
    size, steps = sum(s.flat.numel() * 4 for s in states) / 1e6, int(mb * 1e6 / 2 / PER_STEP)
    here = Checkpointer(root / "here", ctx)
    # A folder takes what is uploaded without a server that works on the same cores.
    runs = {"store": Run(ctx, f"{url}/run", root / "run"), "folder": Run(ctx, f"file://{root}/far", root / "other")}
    seen: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seen.setdefault(name, []).append(value)

    for i in range(rounds):
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
        note("save_disk_mb_per_s", size / seconds_of(lambda i=i: here.save(i, states, {})))
        for name, run in runs.items():
            note(f"upload_{name}_mb_per_s", size / run.upload(states))
            during, asking, beside, count = run.steps(states, step)
            note(f"step_uploading_{name}_over_step", during)
            note("step_beside_busy_core_over_step", beside)
            note("asking_over_step", asking)
            note(f"steps_uploading_{name}", count)
    for checkpointer in (here, *(run.checkpointer for run in runs.values())):
        checkpointer.close()
    ratios_first = sorted(seen.items(), key=lambda item: "over" not in item[0])
    middle = {name: statistics.median(values) for name, values in ratios_first}
    writers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        **middle,
        "checkpoint_mb": size,
        "data_mb": os.path.getsize(f"{local}.bin") / 1e6,
        # Of all writers: each checkpoint was written once and uploaded.
        "writer_processor_s_per_gb": (writers.ru_utime + writers.ru_stime) / (5 * rounds * size / 1e3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a folder in a store, in which a new one is made (default: moto's server)")
    parser.add_argument("--mb", type=float, default=64.0, help="MB of data, and of a checkpoint")
    parser.add_argument("--step", type=float, default=0.1, help="seconds per synthetic training step, of one thread")
    parser.add_argument("--rounds", type=int, default=3, help="all is measured so often; medians are reported")
    parser.add_argument("--folder", help="where to write locally (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        url = args.url or stack.enter_context(moto())
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)))
        result = measure(f"{url}/{secrets.token_hex(4)}", root, args.mb, args.step, args.rounds)
    result |= {"cores": os.cpu_count() or 0, "load_before": before, "load_after": os.getloadavg()[0]}
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:32} {value:10.3f}")


if __name__ == "__main__":
    main()
