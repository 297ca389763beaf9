"""Measure one rank: its host, sums and messages on every axis, bandwidth, speed, clock, run directory.

verdict.py compares the ranks and judges.
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import torch

import megalite
from megalite.core.base.hardware import nvlink_speed
from megalite.core.batch import Message
from megalite.core.mesh import collectives
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.pipeline.p2p import Channel
from megalite.extras.launch import probe

_CLOCK_ROUNDS = 7
_VISIBLE_WITHIN_S = 5.0


@dataclass(frozen=True)
class HostFacts:
    """Where one rank runs.

    Attributes:
        host: host name.
        versions: versions that must be the same on all ranks; `code` is a hash of megalite's sources.
        device: kind ("cpu" or "cuda") and name of the device.
        variables: environment variables that change what ranks do.
        nvlink_bps: NVLink bandwidth of one GPU, one direction, bytes per second; None if unknown or absent.
        network_bps: sum over the host's active InfiniBand / RoCE ports, bytes per second; None if there are none.
        local_world: number of ranks on this host.
    """

    host: str
    versions: dict[str, str]
    device: tuple[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    nvlink_bps: float | None = None
    network_bps: float | None = None
    local_world: int = 1


@dataclass(frozen=True)
class AxisReading:
    """One rank's view of one axis.

    Attributes:
        axis: name of the axis.
        ranks: global ranks of the group.
        wrong: global ranks whose contribution arrived wrong here.
        latency_s: median time of an all-reduce of 4 bytes.
        bandwidth_bps: bus bandwidth, 2 (n - 1) / n x bytes / shortest time.
    """

    axis: str
    ranks: tuple[int, ...]
    wrong: tuple[int, ...]
    latency_s: float
    bandwidth_bps: float


@dataclass(frozen=True)
class LinkReading:
    """Messages from one pipeline rank to another, as the receiver got them.

    Attributes:
        group: "pp" (activations) or "pp_grad" (gradients).
        sender, receiver: global ranks.
        right: whether what arrived is what was sent.
        bandwidth_bps: bytes / shortest time.
    """

    group: str
    sender: int
    receiver: int
    right: bool
    bandwidth_bps: float


@dataclass(frozen=True)
class Burn:
    """Result of repeated matrix products.

    Attributes:
        products: number of matrix products.
        wrong: number of wrong results.
        checksum: checksum of the first result; the same on every device.
        tflops: rate in 1e12 FLOP/s.
    """

    products: int
    wrong: int
    checksum: int
    tflops: float


def host_facts(device: torch.device, environment: Mapping[str, str]) -> HostFacts:
    """Collect the facts about this rank; `environment` is that of the process."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megalite": megalite.__version__,
        "code": str(probe.code_hash(str(Path(megalite.__file__).parent))),
    }
    name, nvlink = platform.processor() or platform.machine(), None
    if device.type == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        name = torch.cuda.get_device_name(device)
        nvlink = nvlink_speed(name, probe.nvidia_smi("topo", "-m", timeout=20))
    local_world = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    kind = (device.type, name)
    variables = probe.variables(environment)
    return HostFacts(socket.gethostname(), versions, kind, variables, nvlink, probe.network_speed(), local_world)


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meet(axis: Axis, device: torch.device) -> None:
    """Wait until every rank of the axis has reached this point."""
    meeting = torch.zeros(1, device=device)
    collectives.all_reduce(meeting, axis).wait()
    meeting.item()


def check_axis(axis: Axis, device: torch.device, size: int) -> AxisReading:
    """Check the sum, and measure latency and bandwidth of an axis of at least two ranks.

    Every rank contributes its own block, and zeros elsewhere: a wrong block tells the rank it came from.

    Args:
        size: bytes of the large all-reduce.
    """
    block = max(1, size // 4 // axis.size)
    x = torch.zeros(axis.size, block, device=device)
    x[axis.rank] = _pattern(axis.ranks[axis.rank], block, device)
    collectives.all_reduce(x, axis).wait()
    wrong = tuple(r for i, r in enumerate(axis.ranks) if not torch.equal(x[i], _pattern(r, block, device)))
    small = torch.zeros(1, device=device)
    latencies = _times(lambda: collectives.all_reduce(small, axis).wait(), device, 20)
    x.zero_()
    best = min(_times(lambda: collectives.all_reduce(x, axis).wait(), device, 5))
    bandwidth = 2 * (axis.size - 1) / axis.size * x.nbytes / best
    return AxisReading(axis.name, axis.ranks, wrong, median(latencies), bandwidth)


def _pattern(rank: int, length: int, device: torch.device) -> torch.Tensor:
    """Make whole numbers below 2^11, whose sums are exact in fp32."""
    return (torch.arange(length, device=device) * (rank + 3) % 1999 + 1).float()


def _times(act: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    act()
    synchronize(device)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        act()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return times


def check_pipeline(ctx: ParallelContext, size: int) -> tuple[LinkReading, ...]:
    """Exchange messages over every boundary of the pipeline: activations downstream, gradients upstream.

    The last rank and the first are neighbors too, as in interleaved schedules. Empty if pp is 1.
    """
    n, here = ctx.pp.size, ctx.pp.rank
    readings = []
    for axis, hop in ((ctx.pp, 1), (ctx.pp_grad, -1)):
        for first in range(n if n > 1 else 0):
            meet(ctx.pp, ctx.device)
            sender, receiver = first, (first + hop) % n
            channel = Channel(axis, Message((max(1, size // 4),), torch.float32), ctx.device)
            if here == sender:
                # Made before the sends: the receiver's clock runs from its post on.
                message = _pattern(ctx.rank, channel.message.shape[0], ctx.device)
                for _ in range(4):
                    channel.send(message, receiver).wait()
                synchronize(ctx.device)
            elif here == receiver:
                readings.append(_receive(channel, axis, sender))
    return tuple(readings)


def _receive(channel: Channel, axis: Axis, sender: int) -> LinkReading:
    times, right = [], True
    source = axis.ranks[sender]
    expected = _pattern(source, channel.message.shape[0], channel.device)
    for _ in range(4):
        started = time.perf_counter()
        buffer, work = channel.receive(sender)
        work.wait()
        synchronize(channel.device)
        times.append(time.perf_counter() - started)
        right = right and torch.equal(buffer, expected)
    return LinkReading(axis.name, source, axis.ranks[axis.rank], right, buffer.nbytes / min(times[1:]))


def compute_time(device: torch.device) -> float:
    """Measure the mean seconds of ten equal matrix products: a slow, throttled or crowded rank stands out.

    The mean, not the minimum: a rank that stalls now and then is slow too.
    """
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a = torch.ones(size, size, dtype=dtype, device=device)
    return mean(_times(lambda: torch.mm(a, a), device, 10))


def clock_offset(world: Axis, device: torch.device) -> float:
    """Measure this rank's clock minus rank 0's, in seconds, as accurately as ranks leave an all-reduce together."""
    offsets = []
    for _ in range(_CLOCK_ROUNDS):
        meet(world, device)
        now = torch.tensor([time.time()], dtype=torch.float64, device=device)
        all_nows = torch.empty(world.size, dtype=torch.float64, device=device)
        collectives.all_gather(all_nows, now, world).wait()
        offsets.append(float(all_nows[world.rank] - all_nows[0]))
    return median(offsets)


def unseen_files(run_dir: Path, world: Axis, device: torch.device) -> tuple[tuple[int, ...], str]:
    """Write one file per rank into the run directory and look for those of all ranks.

    Returns:
        (ranks whose file this rank does not see, reason why this rank could not write its own).
    """
    token = gather_texts(secrets.token_hex(8), world, device)[0]
    folder = run_dir.absolute() / f".cluster_check_{token}"
    mine, problem = folder / f"rank_{world.rank}", ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine.write_text(token)
    except OSError as e:
        problem = f"{folder.parent}: {e.strerror}"
    meet(world, device)
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while missing := [r for r in range(world.size) if not (folder / f"rank_{r}").exists()]:
        # A network file system may show another host's file late.
        if problem or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    meet(world, device)
    mine.unlink(missing_ok=True)
    meet(world, device)
    # All ranks on this file system try; one of them succeeds.
    with contextlib.suppress(OSError):
        folder.rmdir()
    return tuple(missing), problem


def burn(device: torch.device, seconds: float, size: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Burn:
    """Repeat a matrix product for `seconds`, checked against a verified result, to catch silent data corruption.

    The matrices contain -1, 0 and 1: all sums are small enough to be exact in `dtype`, so every device must compute the
    same bits. The first result is checked against A (B v) in fp64 (Freivalds 1977), each later one against the first,
    bit by bit.

    Args:
        size: number of rows of the square matrices. At 4096, 256 (up to which bf16 represents all integers) is 8
            standard deviations of a sum.
    """
    generator = torch.Generator().manual_seed(1)
    # A third of zeros in one and two thirds in the other: a sum of `size` terms has variance 2/9 of size.
    a = torch.randint(-1, 2, (size, size), generator=generator).to(device, dtype)
    keep = torch.randint(0, 2, (size, size), generator=generator)
    b = (torch.randint(-1, 2, (size, size), generator=generator) * keep).to(device, dtype)
    first = torch.mm(a, b)
    v = torch.randint(-3, 4, (size, 1), generator=generator).to(device, torch.float64)
    right = torch.equal(torch.mm(first.double(), v), torch.mm(a.double(), torch.mm(b.double(), v)))
    checksum = int(first.double().mul(torch.arange(1, size + 1, device=device) % 1021).sum())
    wrong, products = torch.zeros((), dtype=torch.int64, device=device), 1
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for _ in range(10):
            wrong += (torch.mm(a, b) != first).any()
            products += 1
        wrong.item()
    elapsed = time.perf_counter() - started
    return Burn(products, int(wrong) + (not right), checksum, 2 * size**3 * (products - 1) / elapsed / 1e12)
