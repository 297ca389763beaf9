"""Replay a log on modeled GPU streams: when each kernel runs, and how long computation waits for communication.

A GPU runs the kernels of one stream in order, and different streams at the same time. Besides the compute stream, each
NCCL communicator has its own: one per axis, and one per pair of ranks that exchange messages. A communication starts
when its stream is free and the compute stream has reached the point where it was posted. With one hardware queue
(CUDA_DEVICE_MAX_CONNECTIONS=1) a kernel also starts no earlier than any kernel enqueued before it, on any stream: one
that waits for its own stream delays all that follow.

The model covers one rank and assumes that its peers are never behind, so it does not contain the pipeline bubble.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from megalite.core.base.hardware import DEVICES
from megalite.extras.estimate.record import Communication, Event, Kernel, Wait

_H100 = DEVICES["h100"]


@dataclass(frozen=True)
class Machine:
    """Rates that a GPU and its network reach in practice; the defaults are 75 to 80 % of the peaks of H100 SXM hosts.

    Attributes:
        flops: FLOP/s of bf16 matrix products.
        memory: bytes/s read from and written to its memory.
        in_host, between_hosts: bytes/s that a GPU sends to GPUs of its own host, and of other hosts.
        latency: seconds before the first byte of a collective.
        gpus_per_host: number of consecutive ranks that share a host.
    """

    flops: float = 0.75 * _H100.peak
    memory: float = 0.8 * _H100.hbm
    in_host: float = 0.8 * _H100.nvlink
    between_hosts: float = 0.8 * _H100.network
    latency: float = 10e-6
    gpus_per_host: int = _H100.domain

    def seconds(self, event: Communication | Kernel) -> float:
        """Compute the time of a kernel, or of a ring collective, that runs alone."""
        if isinstance(event, Kernel):
            return max(event.flops / self.flops, event.nbytes / self.memory)
        size = len(event.ranks)
        share = 1.0 if event.kind in ("send", "recv") else (size - 1) / size
        times = 2 if event.kind == "all_reduce" else 1
        hosts = {rank // self.gpus_per_host for rank in event.ranks}
        speed = self.in_host if len(hosts) == 1 else self.between_hosts
        return self.latency + times * share * event.nbytes / speed


@dataclass
class Times:
    """Seconds of a step.

    Attributes:
        step: seconds from its first kernel to the end of its last one.
        busy: sum over the kernels of the compute stream.
        exposed: seconds that the compute stream waited, by (axis, kind) of the communication.
    """

    step: float = 0.0
    busy: float = 0.0
    exposed: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))


def simulate_streams(log: Sequence[Event], machine: Machine, one_queue: bool) -> Times:
    """Replay a log on the model of a GPU."""
    times = Times()
    now = 0.0  # when the compute stream is free
    free: dict[object, float] = {}  # when other streams are
    ends: dict[int, float] = {}
    started = 0.0  # when the kernel enqueued last starts
    last: Event | None = None

    def wait(moment: float, communication: Event) -> float:
        assert isinstance(communication, Communication)
        times.exposed[communication.axis, communication.kind] += max(0.0, moment - now)
        return max(now, moment)

    for place, event in enumerate(log):
        if isinstance(event, Wait):
            now = wait(ends[event.index], log[event.index])
            continue
        if one_queue and isinstance(last, Communication) and isinstance(event, Kernel):
            now = wait(started, last)
        seconds = machine.seconds(event)
        if isinstance(event, Kernel):
            started, last = now, event
            now += seconds
            times.busy += seconds
            continue
        stream = (event.axis, event.peer) if event.kind in ("send", "recv") else event.axis
        start = max(now, free.get(stream, 0.0), started if one_queue else 0.0)
        free[stream] = ends[place] = start + seconds
        started, last = start, event
    times.step = now
    return times
