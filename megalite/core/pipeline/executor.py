"""Run a schedule's program on this rank: the one place where forward and backward passes happen.

The program contains every decision of the schedule (order, transfers); the executor only follows it. Shapes: S
sequence, B micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from megalite.core.batch import ForwardPass, MicroBatch
from megalite.core.mesh.collectives import PendingWork
from megalite.core.mesh.turns import Turns
from megalite.core.pipeline.observe import Observer
from megalite.core.pipeline.order import together
from megalite.core.pipeline.p2p import Channel
from megalite.core.pipeline.schedule import MAX_SENDS, Op, Program


class WeightGradQueue(Protocol):
    """Defers weight gradients (see `tensor_parallel.linear.WgradQueue`)."""

    def defer(self, microbatch: int) -> AbstractContextManager[None]: ...
    def run(self, microbatch: int) -> None: ...
    def backward(self) -> AbstractContextManager[None]: ...


class Stage(Protocol):
    """The interface of a pipeline stage (see `model.gpt.GPTStage`).

    Called as `stage(x, batch, fwd)`, with token ids (first stage) or hidden states x, a `MicroBatch` and a
    `ForwardPass`. Returns hidden states, or token losses on the last stage.
    """

    __call__: Callable[..., Any]

    @property
    def first(self) -> bool: ...
    @property
    def last(self) -> bool: ...
    @property
    def queue(self) -> WeightGradQueue: ...


class Executor:
    """Executes programs over the stages of one pipeline rank.

    Args:
        stages: this rank's stages by global index.
        activations, gradients: channels of the two directions.
        turns: what the passes of a pair take, where they wait for exchanges.

    Attributes:
        observers: observers of every operation, called in this order. To them a pair is its forward pass, and the
            backward pass takes no time.
        around_backward: makes the context of the backward pass of a pair, which runs on another thread: there, nothing
            is in effect that is so for this thread alone.
    """

    def __init__(
        self, stages: Mapping[int, Stage], activations: Channel, gradients: Channel, turns: Turns | None = None
    ) -> None:
        self.stages = stages
        self.activations = activations
        self.gradients = gradients
        self.turns = turns or Turns()
        self.observers: tuple[Observer, ...] = ()
        device = activations.device
        on_device = partial(torch.cuda.device, device) if device.type == "cuda" else nullcontext
        self.around_backward: Callable[[], AbstractContextManager[Any]] = on_device
        self.beside = ThreadPoolExecutor(1, "backward")

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Add an observer inside the context."""
        before = self.observers
        self.observers = (*before, observer)
        try:
            yield
        finally:
            self.observers = before

    @contextmanager
    def _observed(self, op: Op) -> Iterator[None]:
        for observer in self.observers:
            observer.begin(op)
        yield
        for observer in self.observers:
            observer.end(op)

    def run(
        self, program: Program, microbatches: Sequence[MicroBatch], step: int, first: int, grad_scale: float = 1.0
    ) -> torch.Tensor:
        """Run one program.

        Args:
            program: this rank's operations, in order; for evaluation (under `no_grad`), only the forward ones.
            microbatches: micro-batches of this data-parallel rank.
            step: number of the optimizer step.
            first: number of their first sample in the global batch; the others follow it.
            grad_scale: gradient of the sum of all token losses.

        Returns:
            Sum of the (weighted) token losses of the micro-batches, fp64, 0-dim; 0 on ranks without the last stage.
        """
        training, passes = torch.is_grad_enabled(), list[ForwardPass]()
        for i, batch in enumerate(microbatches):
            samples = range(first, first + batch.tokens_SB.shape[1])
            passes.append(ForwardPass(step, i, training, grad_scale, samples, batch.positions))
            first = samples.stop
        run = _Run(self, microbatches, passes)
        for op, *beside in together(program):
            with self._observed(op):
                run.do(op, *beside)
            for other in beside:
                with self._observed(other):
                    pass
        for observer in self.observers:
            observer.finished()
        return run.finish()


class _Run:
    """Tensors of one run of a program, keyed by (micro-batch, stage)."""

    def __init__(self, executor: Executor, microbatches: Sequence[MicroBatch], passes: Sequence[ForwardPass]) -> None:
        self.executor = executor
        self.microbatches = microbatches
        self.passes = passes
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=executor.activations.device)
        self.received: dict[tuple[str, int, int], tuple[torch.Tensor, PendingWork]] = {}
        self.inputs: dict[tuple[int, int], torch.Tensor] = {}
        self.outputs: dict[tuple[int, int], torch.Tensor] = {}
        self.edges: dict[tuple[int, int], GradientEdge] = {}
        self.input_grads: dict[tuple[int, int], torch.Tensor] = {}
        self.sends: deque[PendingWork] = deque()
        self.loss_shape = torch.Size()

    def do(self, op: Op, beside: Op | None = None) -> None:
        """Run an operation, or a pair."""
        if beside is not None:
            executor = self.executor

            def backward() -> None:
                with executor.around_backward():
                    self.do(beside)

            executor.turns.run(partial(self.do, op), backward, executor.beside)
            return
        key = (op.microbatch, op.stage)
        match op.kind:
            case "F":
                self.forward(*key)
            case "B":
                self.backward(*key, self.executor.stages[op.stage].queue.backward())
            case "I":
                self.backward(*key, self.executor.stages[op.stage].queue.defer(op.microbatch))
            case "W":
                self.executor.stages[op.stage].queue.run(op.microbatch)
            case "RF":
                assert op.peer is not None
                self.received[("F", op.microbatch, op.stage)] = self.executor.activations.receive(op.peer)
            case "RB":
                assert op.peer is not None
                self.received[("B", op.microbatch, op.stage)] = self.executor.gradients.receive(op.peer)
            case "SF":
                assert op.peer is not None
                self.keep(self.executor.activations.send(self.outputs.pop(key), op.peer))
            case "SB":
                assert op.peer is not None
                self.keep(self.executor.gradients.send(self.input_grads.pop(key), op.peer))

    def forward(self, mb: int, index: int) -> None:
        stage = self.executor.stages[index]
        batch = self.microbatches[mb]
        fwd = self.passes[mb]
        if stage.first:
            x = batch.tokens_SB
        else:
            # From another rank, or from the previous stage on this rank.
            x = self.take("F", mb, index) if ("F", mb, index) in self.received else self.outputs.pop((mb, index - 1))
            x.requires_grad_(fwd.training)
        y = stage(x, batch, fwd)
        if fwd.training:
            self.inputs[mb, index] = x
            # The backward pass needs only the graph: the output is freed once it has been sent or passed on.
            self.edges[mb, index] = get_gradient_edge(y)
        if stage.last:
            self.loss_sum += y.detach().sum(dtype=torch.float64)
            self.loss_shape = y.shape
        else:
            self.outputs[mb, index] = y.detach()

    def backward(self, mb: int, index: int, weight_grads: AbstractContextManager[None]) -> None:
        stage = self.executor.stages[index]
        if stage.last:
            grad = torch.full(self.loss_shape, self.passes[mb].grad_scale, device=self.loss_sum.device)
        elif ("B", mb, index) in self.received:
            grad = self.take("B", mb, index)
        else:
            grad = self.input_grads.pop((mb, index + 1))
        with weight_grads:
            # What torch.autograd.backward calls, after an import of sympy that compares two shapes.
            edge = self.edges.pop((mb, index))
            _engine_run_backward((edge,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        x = self.inputs.pop((mb, index))
        if not stage.first:
            assert x.grad is not None
            self.input_grads[mb, index] = x.grad

    def take(self, kind: str, mb: int, index: int) -> torch.Tensor:
        buffer, work = self.received.pop((kind, mb, index))
        work.wait()
        for observer in self.executor.observers:
            observer.arrived()
        return buffer

    def keep(self, work: PendingWork) -> None:
        self.sends.append(work)
        # On CUDA the host does not block: the compute stream waits for the oldest send, usually long complete.
        if len(self.sends) > MAX_SENDS:
            self.sends.popleft().wait()

    def finish(self) -> torch.Tensor:
        while self.sends:
            self.sends.popleft().wait()
        return self.loss_sum


def forward_program(program: Program) -> Program:
    """Return the forward operations of a program, for evaluation."""
    return tuple(op._replace(beside=False) for op in program if op.kind in ("F", "SF", "RF"))
