"""Run a training step of one rank with its real engine, without peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from megalite.core import ops as kernels
from megalite.core.base.dtypes import DTYPES
from megalite.core.base.errors import UserError
from megalite.core.build import build_engine
from megalite.core.engine import Engine
from megalite.core.mesh import collectives
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.device import wants_one_queue
from megalite.core.mesh.grid import Grid
from megalite.core.microbatches import share_of_rank
from megalite.core.parts.ffn.experts import imbalance
from megalite.core.step import train_step
from megalite.core.sums import StepSums
from megalite.extras.estimate.backends import target_backends
from megalite.extras.estimate.fake_cuda import fake_cuda
from megalite.extras.estimate.record import Communication, Event, Kernel, recorded_world
from megalite.extras.estimate.rows import assumed_rows
from megalite.extras.estimate.tracker import Peak, Tracker
from megalite.runtime.options.run import Config


@dataclass
class Estimate:
    """One step of a rank.

    Attributes:
        grid, rank: all ranks, and this one.
        ops: backends of the kernels on the GPU, in one line.
        states: bytes held between steps.
        building: peak memory while the engine is built.
        peak: peak memory of the step.
        timeline: (pipeline operation, bytes before it, peak bytes during it) of each operation.
        spans: (kind, begin and end in the log) of each pipeline operation.
        held: holder -> bytes before each of them.
        log: kernels and communication, in the order in which the host starts them; first come the gathers of weights
            that the previous step would have started.
        first: index in the log at which the step begins.
        syncs: number of times the host waits for the device, by cause.
        one_queue: whether the run uses a single hardware queue.
    """

    grid: Grid
    rank: int
    ops: str
    states: int
    building: Peak
    peak: Peak
    timeline: list[tuple[str, int, int]]
    spans: list[tuple[str, int, int]]
    held: list[dict[str, int]]
    log: list[Event]
    first: int
    syncs: dict[str, int]
    one_queue: bool

    def launched(self) -> Iterator[tuple[Kernel, str]]:
        """Yield (kernel, "forward", "backward" or "") for each kernel of the step, collectives not included."""
        passes = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
        where = {i: passes.get(kind, "") for kind, begin, end in self.spans for i in range(begin, end)}
        for i, event in enumerate(self.log[self.first :], self.first):
            if isinstance(event, Kernel):
                yield event, where.get(i, "")

    @property
    def kernels(self) -> int:
        """Number of kernels that a step launches, collectives not included."""
        return sum(1 for _ in self.launched())

    @property
    def flops(self) -> int:
        """FLOPs of matrix products and attention."""
        return sum(kernel.flops for kernel, _ in self.launched())

    @property
    def calls(self) -> dict[str, dict[str, int]]:
        """Number of kernels by torch operator, in forward and in backward passes."""
        return self._by_operator(lambda kernel: 1)

    @property
    def moved(self) -> dict[str, dict[str, int]]:
        """Bytes that kernels read and write, by torch operator, in forward and in backward passes."""
        return self._by_operator(lambda kernel: kernel.nbytes)

    def _by_operator(self, figure: Callable[[Kernel], int]) -> dict[str, dict[str, int]]:
        sums: Counter[tuple[str, str]] = Counter()
        for kernel, direction in self.launched():
            sums[direction, kernel.name] += figure(kernel)
        return {way: {name: n for (at, name), n in sums.items() if at == way} for way in ("forward", "backward")}

    @property
    def collectives(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(axis, kind) -> number of operations, and bytes of their larger tensors (the full ones)."""
        count: Counter[tuple[str, str]] = Counter()
        nbytes: Counter[tuple[str, str]] = Counter()
        for event in self.log[self.first :]:
            if isinstance(event, Communication):
                count[event.axis, event.kind] += 1
                nbytes[event.axis, event.kind] += event.nbytes
        return {key: (count[key], nbytes[key]) for key in sorted(count)}


def estimate(cfg: Config, grid: Grid, rank: int) -> Estimate:
    """Run one training step of a rank on fake CUDA tensors.

    Args:
        cfg: options of the run, vocabulary size known, without a schedule of batch sizes.
        grid: all ranks.
        rank: the rank to run.

    Raises:
        UserError: the run itself would refuse the options, or one of them requires a real GPU.
    """
    check_request(cfg, grid, rank)
    with ExitStack() as exit_stack:
        log = exit_stack.enter_context(recorded_world(rank, grid))
        device = exit_stack.enter_context(fake_cuda())
        exit_stack.enter_context(target_backends(cfg.train.ops))
        tracker = exit_stack.enter_context(Tracker(log))
        exit_stack.enter_context(_resizes_seen_by(tracker))
        ctx = ParallelContext.create(grid, device)
        tracker.start("building the engine")
        engine = build_engine(cfg, ctx)
        engine.executor.around_backward = partial(_entered, _modes())
        building = tracker.finish()
        _label_states(tracker, engine)
        states = tracker.live
        tracker.start("before the pipeline")
        with engine.executor.observed_by(tracker):
            with assumed_rows(cfg, ctx, imbalance(cfg.parallel), tracker.syncs):
                first = run_step(engine, log)
        ops = kernels.resolve(cfg.train.ops, device, DTYPES[cfg.train.precision]).describe()
        syncs = {"status of the step": 1, **tracker.syncs}
        return Estimate(
            grid=grid,
            rank=rank,
            ops=ops,
            states=states,
            building=building,
            peak=tracker.finish(),
            timeline=tracker.timeline,
            spans=tracker.spans,
            held=tracker.held,
            log=list(log),
            first=first,
            syncs=syncs,
            one_queue=wants_one_queue(cfg.parallel.tp, cfg.parallel.zero, cfg.train.offload, cfg.run.recover != "none"),
        )


def run_step(engine: Engine[Config], log: list[Event]) -> int:
    """Run one training step of zeros in a recorded world; returns the index in the log at which it begins.

    The log is cleared first; then come the gathers of weights that the previous step would have started.
    """
    cfg = engine.cfg
    batch = zeros(engine)
    log.clear()
    engine.optimizer.gather()
    first = len(log)
    with plausible_status(cfg):
        train_step(engine, batch, 1)
    return first


def zeros(engine: Engine[Config]) -> npt.NDArray[np.int64]:
    """Return a batch of zeros for a rank: [samples, tokens]."""
    cfg = engine.cfg
    return np.zeros((len(share_of_rank(engine, cfg.train.global_batch_size)), cfg.model.seq_len + 1), dtype=np.int64)


@contextmanager
def plausible_status(cfg: Config) -> Iterator[None]:
    """Replace the numbers that the ranks agree on at the end of a step by plausible ones."""
    tokens = float(cfg.train.global_batch_size * cfg.model.seq_len)
    plausible = {"loss": 10.0 * tokens, "targets": tokens, "squared norm": 1.0}
    real = StepSums.over_world

    def over_world(self: StepSums) -> Mapping[str, list[float]]:
        with mock.patch.object(collectives, "to_host", lambda status: [0.0] * status.numel()):
            totals = real(self)
        return {name: [plausible.get(name, 0.0)] * len(values) for name, values in totals.items()}

    with mock.patch.object(StepSums, "over_world", over_world):
        yield


def check_request(cfg: Config, grid: Grid, rank: int, streams: bool = False) -> None:
    """Refuse what cannot be estimated without a device, or, with `streams`, whose order of memory cannot be checked.

    Raises:
        UserError: which option, or that there is no such rank.
    """
    if not 0 <= rank < grid.world:
        raise UserError(f"--rank {rank}", f"a world of {grid.world} has ranks 0 to {grid.world - 1}", "choose one")
    t = cfg.train
    refused = {
        f"--offload {t.offload}": t.offload != "none" and not streams,
        f"--compress {t.compress}": t.compression is not None and t.compression.reads_values and streams,
        "--compile": t.compile,
    }
    for flag in (flag for flag, is_set in refused.items() if is_set):
        raise UserError(flag, "requires a real device: it cannot be estimated", "drop it")
    if cfg.parallel.device == "cpu":
        raise UserError("--device cpu", "estimates are for GPUs", "drop it")


def _modes() -> list[TorchFunctionMode | TorchDispatchMode]:
    """List the modes of this thread, from the outermost on."""
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


@contextmanager
def _entered(modes: Sequence[TorchFunctionMode | TorchDispatchMode]) -> Iterator[None]:
    """Enter modes on a thread that has none."""
    with ExitStack() as exit_stack:
        for mode in modes:
            exit_stack.enter_context(mode)
        yield


@contextmanager
def _resizes_seen_by(tracker: Tracker) -> Iterator[None]:
    """Show resized storages to the tracker: resizing is not a dispatched operator."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        resize(storage, nbytes)
        tracker.resized(storage)
        return storage

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


def _label_states(tracker: Tracker, engine: Engine[Config]) -> None:
    tracker.label("optimizer states", [state.flat for state in engine.optimizer.states()])
    for bucket in engine.optimizer.buckets:
        tracker.label("gradients", [bucket.grad, bucket.grad_share])
        tracker.label("weights", [bucket.weights, bucket.store.share])
    tracker.label_rest("other states")
    output = {id(stage.head.weight) for stage in engine.stages.values() if stage.last}
    for bucket in engine.optimizer.buckets:
        for param, start in zip(bucket.params, bucket.starts):
            if id(param) in output:
                tracker.mark_output(bucket.weights, start)
                tracker.mark_output(bucket.grad, start)
