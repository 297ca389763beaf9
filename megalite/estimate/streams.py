"""When would the kernels of a log run on a GPU, and for how long would computation wait for communication?

A GPU runs kernels of one stream in order, and those of several at the same time. The compute stream is one; each
communicator of NCCL has its own: one for an axis, one for each pair of ranks that exchange messages. An operation of a
communicator starts when its stream is free and the compute stream has reached the place where it was posted. With one
hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) a kernel also starts no earlier than all that were enqueued before it, on
any stream: one that waits for the predecessor on its stream holds up all that follow.

The model is of one rank. Its peers are as far as it is, so the bubble of a pipeline is not in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from megalite.estimate.record import Event, Posted, Ran, Waited


@dataclass(frozen=True)
class Machine:
    """What a GPU and its network reach in practice. The defaults are 75 to 80 % of the peaks of H100 SXM hosts.

    Attributes:
        flops: of matrix products in bf16, per second.
        memory: bytes per second to and from its memory.
        in_host, between_hosts: bytes per second that a GPU sends to others of its host, and of other hosts.
        latency: seconds before a collective's first byte.
        gpus_per_host: neighboring ranks that share a host.
    """

    flops: float = 0.75 * 989e12
    memory: float = 0.8 * 3.35e12
    in_host: float = 0.8 * 450e9
    between_hosts: float = 0.8 * 50e9
    latency: float = 10e-6
    gpus_per_host: int = 8

    def seconds(self, event: Posted | Ran) -> float:
        """Time of a kernel or of a collective in rings, were it alone."""
        if isinstance(event, Ran):
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
        step: from its first kernel to the end of its last one.
        busy: sum of its kernels on the compute stream.
        exposed: for which the compute stream waited, by (axis, kind) of what it waited for.
    """

    step: float = 0.0
    busy: float = 0.0
    exposed: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))


def simulate_streams(log: Sequence[Event], machine: Machine, one_queue: bool) -> Times:
    """Run a log on the model of a GPU."""
    times = Times()
    now = 0.0  # the compute stream is free
    free: dict[object, float] = {}  # other streams
    ends: dict[int, float] = {}
    started = 0.0  # the latest kernel that was enqueued starts
    last: Event | None = None

    def wait(moment: float, posted: Event) -> float:
        assert isinstance(posted, Posted)
        times.exposed[posted.axis, posted.kind] += max(0.0, moment - now)
        return max(now, moment)

    for place, event in enumerate(log):
        if isinstance(event, Waited):
            now = wait(ends[event.posted], log[event.posted])
            continue
        if one_queue and isinstance(last, Posted) and isinstance(event, Ran):
            now = wait(started, last)
        seconds = machine.seconds(event)
        if isinstance(event, Ran):
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
