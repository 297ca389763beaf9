"""`--tensor-stats A:B`: statistics of every parameter, its gradient and the output of every block, in any layout.

RUN_DIR/tensor_stats/step_N.jsonl has a line per tensor: name, min, max, mean, std, nan, inf. Parameters are those of
the forward pass, by their names in the unsharded model, each followed by its gradient (NAME.grad) before clipping and
without loss scale; then come layers.0.output and so on, over all tokens of the step. NaN and infinite elements are
counted and left out of the other numbers, which are null where nothing is left; std divides by the number of elements.

Each piece of a tensor is reduced in fp64 to its number of elements, their mean and the squared deviations from it, and
pieces are put together as in Chan, Golub and LeVeque 1979: a mean far from 0 costs the deviation no digits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.core.engine import Engine
from megalite.core.mesh import collectives
from megalite.core.mesh.context import ParallelContext
from megalite.core.microbatches import share_of_rank
from megalite.core.model.gpt import GPTStage
from megalite.core.model.parameters import param_map
from megalite.core.step import StepResult
from megalite.core.sums import Counter
from megalite.runtime.options.run import Config
from megalite.runtime.options.windows import step_windows
from megalite.runtime.record.metrics import json_line
from megalite.runtime.record.profile import warn_on_error

# Elements that are widened to fp64 at a time.
_PIECE = 1 << 22


class TensorStats:
    """Writes the statistics of the steps that `--tensor-stats` names, and finds what was not finite in skipped ones.

    Args:
        engine: what this rank trains with.

    Attributes:
        first_bad: where the first number that is not finite arose in the last step, if that was skipped: of what was
            read, which is no outputs in other steps than those named; "" if all of that was finite.
    """

    def __init__(self, engine: Engine[Config]) -> None:
        cfg = engine.cfg
        self._engine, self._windows = engine, step_windows("--tensor-stats", cfg.run.tensor_stats)
        self._folder = cfg.run.folder / "tensor_stats"
        self._params = [spec.name for spec in param_map(cfg.model).values() if spec.tied_to is None]
        self._outputs = [_output(i) for i in (*range(cfg.model.num_layers), *cfg.model.mtp_layers)]
        self.first_bad = ""

    def watch(self, step: int, train: Callable[[], StepResult]) -> StepResult:
        """Run a step, and read what is to be known of it; every rank calls it."""
        reading, asked = _Reading(self._engine, step), any(step in window for window in self._windows)
        if asked:
            with reading.during_step():
                result = train()
        else:
            result = train()
            if result.skipped:
                reading.sums()
        self.first_bad = ""
        if result.failed or not (asked or result.skipped):
            return result
        gradients = [_gradient(name) for name in self._params]
        in_turn = [name for pair in zip(self._params, gradients) for name in pair]
        found = _over_world(reading.rows, [*in_turn, *self._outputs], self._engine.ctx)
        if result.skipped:
            loss = [] if math.isfinite(result.loss) else ["the loss"]
            bad = {*loss, *(name for name, tensor in found.items() if tensor.bad)}
            # In the order in which they are computed.
            order = (*self._params, *self._outputs, "the loss", *reversed(gradients))
            self.first_bad = next((name for name in order if name in bad), "")
        if asked and self._engine.ctx.rank == 0:
            full = self._engine.cfg.train.global_batch_size * self._engine.cfg.model.seq_len
            # As in `train_step`: gradients are of the loss sum over the tokens of the largest batch, times the scale.
            unscale = full / (result.targets * result.loss_scale) if result.targets else 0.0
            factors = dict.fromkeys(gradients, unscale)
            lines = [json_line(tensor.line(name, factors.get(name, 1.0))) for name, tensor in found.items()]
            path = self._folder / f"step_{step}.jsonl"
            with warn_on_error(path):
                path.write_text("".join(lines))
        return result


class _Statistics(NamedTuple):
    """Statistics of one tensor over all ranks.

    Attributes:
        numel: number of finite elements.
        mean, squares: their mean, and the sum of their squared deviations from it.
        low, high: the least and the largest of them.
        nan, inf: number of the other elements.
        bad: whether some rank has such elements, also in a copy that does not count.
    """

    numel: float
    mean: float
    squares: float
    low: float
    high: float
    nan: float
    inf: float
    bad: bool

    def line(self, name: str, factor: float) -> dict[str, Any]:
        """Return the line of the file, of the tensor times `factor`."""
        std = math.sqrt(self.squares / max(1.0, self.numel))
        numbers = {"min": self.low, "max": self.high, "mean": self.mean, "std": std}
        known = {key: value * factor if self.numel else None for key, value in numbers.items()}
        return {"name": name, **known, "nan": int(self.nan), "inf": int(self.inf)}


class _Reading(Counter):
    """What this rank reads in one step.

    The step asks its counters for their sums when gradients are complete, and before the update changes them.

    Args:
        engine: what this rank trains with.
        step: number of the step.

    Attributes:
        rows: by tensor, what this rank has of it: (`_measure`, whether it counts or is a copy of what does).
    """

    name = "tensor statistics"

    def __init__(self, engine: Engine[Config], step: int) -> None:
        t = engine.cfg.train
        self._engine = engine
        self._microbatches = len(share_of_rank(engine, t.batches.size(step))) // t.micro_batch_size
        self.rows: defaultdict[str, list[tuple[Tensor, bool]]] = defaultdict(list)

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Read the step that runs inside the context."""
        engine, before = self._engine, self._engine.counters
        hooks = [
            block.register_forward_hook(self._hook(_output(index), stage))
            for stage in engine.stages.values()
            for index, block in stage.layers.items()
        ]
        engine.counters = [*before, self]
        try:
            yield
        finally:
            engine.counters = before
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str, stage: GPTStage) -> Callable[[Any, Any, Tensor], None]:
        # Ranks of tp have all tokens each, unless they cut the sequence.
        counts = self._engine.ctx.tp.rank == 0 or self._engine.cfg.sequence_parallel

        def note(_module: Any, _args: Any, x: Tensor) -> None:
            # The last passes may have no samples.
            if not stage.log.recomputing and len(self.rows[name]) < self._microbatches:
                self.rows[name].append((_measure(x.detach()), counts))

        return note

    @torch.no_grad()
    def sums(self) -> Tensor:
        """Read parameters and gradients, and add nothing to the step's sums."""
        device = self._engine.ctx.device
        for bucket in self._engine.optimizer.buckets:
            for own in bucket.param_shares:
                spec = own.param.shard.spec
                name = spec.tied_to or spec.name
                for box in own.param.shard.flat_slices(own.start, own.stop):
                    at = own.at + box.at - own.start
                    for key, flat in ((name, bucket.store.share), (_gradient(name), bucket.grad_share)):
                        # A share may be in the host's memory.
                        self.rows[key].append((_measure(flat[at : at + box.numel]).to(device), bucket.is_owner))
        return torch.zeros(0)

    def figures(self, sums: Sequence[float], targets: float) -> None:
        """Return nothing: what is read is put together after the step."""


def _gradient(name: str) -> str:
    return f"{name}.grad"


def _output(index: int | str) -> str:
    return f"layers.{index}.output"


def _measure(x: Tensor) -> Tensor:
    """Reduce a tensor of any shape to fp64 [7]: numel, mean, squares, low, high, nan, inf (see `_Statistics`)."""
    return _merge(torch.stack([_measure_piece(piece) for piece in x.reshape(-1).split(_PIECE)]))


def _measure_piece(x: Tensor) -> Tensor:
    x = x.double()
    finite, infinite = x.isfinite(), x.isinf()
    numel = finite.sum()
    mean = torch.where(finite, x, 0.0).sum() / numel.clamp(min=1)
    squares = torch.where(finite, x - mean, 0.0).square().sum()
    low, high = torch.where(finite, x, math.inf).amin(), torch.where(finite, x, -math.inf).amax()
    return torch.stack([numel, mean, squares, low, high, x.isnan().sum(), infinite.sum()])


def _merge(rows: Tensor) -> Tensor:
    """Put rows of `_measure` [k, 7] together: [7]."""
    numel, means, squares, low, high, nan, inf = rows.unbind(1)
    mean = (numel * means).sum() / numel.sum().clamp(min=1)
    squares = squares + numel * (means - mean).square()
    return torch.stack([numel.sum(), mean, squares.sum(), low.amin(), high.amax(), nan.sum(), inf.sum()])


def _over_world(
    rows: dict[str, list[tuple[Tensor, bool]]], names: Sequence[str], ctx: ParallelContext
) -> dict[str, _Statistics]:
    """Put together what the ranks have read, on every rank; all name the same tensors in the same order."""
    nothing = torch.tensor([0, 0, 0, math.inf, -math.inf, 0, 0], dtype=torch.float64, device=ctx.device)
    table, bad = [], torch.zeros(len(names), dtype=torch.float64, device=ctx.device)
    for i, name in enumerate(names):
        read = rows.get(name, [])
        table.append(_merge(torch.stack([nothing, *(row for row, counts in read if counts)])))
        for row, _ in read:
            bad[i] += row[5:].sum()
    numel, means, squares, low, high, nan, inf = torch.stack(table, 1)
    totals = torch.stack([numel, numel * means, nan, inf])
    peaks = torch.stack([-low, high, bad])
    collectives.all_reduce(totals, ctx.world).wait()
    collectives.all_reduce(peaks, ctx.world, collectives.MAX).wait()
    mean = totals[1] / totals[0].clamp(min=1)
    squares = squares + numel * (means - mean).square()
    collectives.all_reduce(squares, ctx.world).wait()
    columns = torch.stack([totals[0], mean, squares, -peaks[0], peaks[1], totals[2], totals[3], peaks[2] > 0], 1)
    return {name: _Statistics(*values) for name, values in zip(names, columns.tolist())}
