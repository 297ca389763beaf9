"""Run a schedule's program on this rank: the one place where forward and backward passes happen.

The program holds all that a schedule decides (order, transfers); the executor only follows it. Shapes: S sequence, B
micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.dist.collectives import Pending
from megalite.pipeline.observe import Observer
from megalite.pipeline.p2p import Channel
from megalite.pipeline.schedule import MAX_SENDS, Op, Program


@dataclass(frozen=True)
class MicroBatch:
    """Samples that pass through the stages together. Every stage has them: nothing of them is sent.

    Attributes:
        tokens_SB: token ids, int64 [S, B].
        targets_SB: int64 [S, B], ids to predict, negative ones are ignored; with None the last stage returns logits.
        starts_SB: int64 [S, B], position in the sample at which each token's document starts: attention looks back no
            further, and the token's own position counts from there. None: a sample is one document.
        weights_SB: fp32 [S, B], weight of each target in the loss; None: 1.
        bounds: int32 [documents + 1], where documents start in the samples laid end to end, then S B; on a GPU only.
        longest: tokens of the longest of these documents.
    """

    tokens_SB: torch.Tensor
    targets_SB: torch.Tensor | None
    starts_SB: torch.Tensor | None = None
    weights_SB: torch.Tensor | None = None
    bounds: torch.Tensor | None = None
    longest: int = 0

    def samples(self, begin: int, end: int) -> MicroBatch:
        """Cut every field [S, B] alike: samples `begin` up to, but not including, `end`."""
        fields = (self.tokens_SB, self.targets_SB, self.starts_SB, self.weights_SB)
        return MicroBatch(*(None if x is None else x[:, begin:end].contiguous() for x in fields))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pass:
    """One micro-batch's way through the stages; the key of its dropout masks.

    Attributes:
        step: number of the optimizer step.
        replica: data-parallel rank.
        microbatch: index of the micro-batch among those of the replica.
        training: whether dropout and label smoothing apply, and backward follows.
        grad_scale: gradient of the sum of all token losses that backward will start from.
    """

    step: int
    replica: int
    microbatch: int
    training: bool
    grad_scale: float = 1.0


class WeightGradQueue(Protocol):
    """Keeps weight gradients for later (see tensor_parallel.linear.WgradQueue)."""

    def defer(self, microbatch: int) -> AbstractContextManager[None]: ...
    def run(self, microbatch: int) -> None: ...


class Stage(Protocol):
    """What the executor requires of a pipeline stage (see model.gpt.GPTStage).

    Called as `stage(x, batch, this)`: x holds token ids on the first stage, else hidden states, `batch` is the
    `MicroBatch` and `this` the `Pass`. Returns hidden states, or token losses on the last stage.
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

    Attributes:
        observers: watch every operation, in this order.
    """

    def __init__(self, stages: Mapping[int, Stage], activations: Channel, gradients: Channel) -> None:
        self.stages, self.activations, self.gradients = stages, activations, gradients
        self.observers: tuple[Observer, ...] = ()

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Add an observer inside the context."""
        before = self.observers
        self.observers = (*before, observer)
        try:
            yield
        finally:
            self.observers = before

    def run(
        self, program: Program, microbatches: Sequence[MicroBatch], step: int, replica: int, grad_scale: float = 1.0
    ) -> torch.Tensor:
        """Run one program.

        Args:
            program: this rank's operations, in order; forward operations only for evaluation (under `no_grad`).
            microbatches: this data-parallel rank's share of the batch.
            step, replica: see `Pass`.
            grad_scale: gradient of the sum of all token losses.

        Returns:
            Sum of the (weighted) token losses of the batch, fp64 0-dim, on the rank of the last stage; 0 on the others.
        """
        training = torch.is_grad_enabled()
        passes = [Pass(step, replica, i, training, grad_scale) for i in range(len(microbatches))]
        run = _Run(self, microbatches, passes)
        for op in program:
            for observer in self.observers:
                observer.begin(op)
            run.do(op)
            for observer in self.observers:
                observer.end(op)
        for observer in self.observers:
            observer.finished()
        return run.finish()


class _Run:
    """Tensors of one run of a program, keyed by (micro-batch, stage)."""

    def __init__(self, executor: Executor, microbatches: Sequence[MicroBatch], passes: Sequence[Pass]) -> None:
        self.executor, self.microbatches, self.passes = executor, microbatches, passes
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=executor.activations.device)
        self.received: dict[tuple[str, int, int], tuple[torch.Tensor, Pending]] = {}
        self.inputs: dict[tuple[int, int], torch.Tensor] = {}
        self.outputs: dict[tuple[int, int], torch.Tensor] = {}
        self.edges: dict[tuple[int, int], GradientEdge] = {}
        self.input_grads: dict[tuple[int, int], torch.Tensor] = {}
        self.sends: deque[Pending] = deque()
        self.loss_shape = torch.Size()

    def do(self, op: Op) -> None:
        key = (op.microbatch, op.stage)
        match op.kind:
            case "F":
                self.forward(*key)
            case "B":
                self.backward(*key, nullcontext())
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
        stage, batch, this = self.executor.stages[index], self.microbatches[mb], self.passes[mb]
        if stage.first:
            x = batch.tokens_SB
        else:
            # Sent by another rank, or passed on by the previous stage on this rank.
            x = self.take("F", mb, index) if ("F", mb, index) in self.received else self.outputs.pop((mb, index - 1))
            x.requires_grad_(this.training)
        y = stage(x, batch, this)
        if this.training:
            self.inputs[mb, index] = x
            # Backward needs only the graph: the output's memory is free once it is sent or passed on.
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
            torch.autograd.backward(self.edges.pop((mb, index)), grad)
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

    def keep(self, work: Pending) -> None:
        self.sends.append(work)
        # On CUDA no wait of the host: the compute stream comes after the oldest send, which its peer has long received.
        if len(self.sends) > MAX_SENDS:
            self.sends.popleft().wait()

    def finish(self) -> torch.Tensor:
        while self.sends:
            self.sends.popleft().wait()
        return self.loss_sum


def forward_program(program: Program) -> Program:
    """Keep the forward half of a program, for evaluation."""
    return tuple(op for op in program if op.kind in ("F", "SF", "RF"))
