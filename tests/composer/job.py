"""What every rank of a draw runs: a whole run, from the command line to its last save."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.composer.outcome import Boxes, Outcome, Task


def run(rank: int, task: Task) -> Outcome:
    """Run a task on one rank."""
    from megalite.core.base.errors import UserError
    from tests.composer.faults import planted

    # Thousands of runs: nobody reads what they say.
    logging.disable(logging.CRITICAL)
    try:
        with planted(task.fault, task.words, task.world):
            return _trained(task)
    except UserError as e:
        return Outcome(refused=str(e))
    finally:
        logging.disable(logging.NOTSET)


def _trained(task: Task) -> Outcome:
    import torch

    from megalite.core.mesh.context import ParallelContext
    from megalite.core.mesh.grid import Grid
    from megalite.runtime.loop.loop import steps
    from megalite.runtime.options import cli
    from megalite.runtime.start.start import open_run
    from tests.composer.data import OwnSamples

    torch.set_num_threads(1)
    cfg = cli.parse(list(task.words)).config
    own = OwnSamples(task.data, cfg.model.seq_len, cfg.train.seed) if task.data else None
    ctx = ParallelContext.create(Grid.from_config(cfg.parallel, task.world), torch.device("cpu"))
    figures: dict[int, dict[str, float]] = {}
    with ExitStack() as stack:
        stack.enter_context(_moved(task.move))
        grads = stack.enter_context(_first_gradients())
        engine_run = stack.enter_context(open_run(cfg, ctx, own))
        engine = engine_run.engine
        if task.weights_of:
            return _loaded(task.weights_of, engine)
        start = _masters(engine)
        for record in steps(engine_run):
            figures[record["step"]] = {key: value for key, value in record.items() if _is_figure(key, value)}
        engine.optimizer.wait_weights()
        weights, copies = _masters(engine), _copies(engine)
    for line in (cfg.run.folder / "metrics.jsonl").read_text().splitlines() if ctx.rank == 0 else ():
        if (event := json.loads(line)).get("event") == "eval":
            figures[event["step"]]["eval_loss"] = event["loss"]
    return Outcome(figures=figures, grads=grads, start=start, weights=weights, copies=copies)


def _loaded(folder: str, engine: Any) -> Outcome:
    """Return the weights of a Hugging Face folder."""
    from megalite.runtime.checkpoint.hf.start import load_hf

    load_hf(folder, engine.cfg.model, engine.optimizer.states(), engine.ctx)
    return Outcome(weights=_masters(engine))


def export(rank: int, run_dir: str, folder: str) -> str:
    """Export a run's last checkpoint; return the line of a `UserError`, or ""."""
    from megalite.core.base.errors import UserError
    from megalite.extras.convert.hf import export_hf

    logging.disable(logging.CRITICAL)
    try:
        export_hf(run_dir, Path(folder))
        return ""
    except UserError as e:
        return str(e)
    finally:
        logging.disable(logging.NOTSET)


def _is_figure(name: str, value: Any) -> bool:
    """Whether a layout must not change this part of a step's record."""
    same = ("loss", "grad_norm", "lr", "decoupled_lr", "weight_decay", "consumed_samples", "skipped_steps")
    routed = ("aux_loss", "z_loss", "expert", "mtp_loss", "router")
    return isinstance(value, int | float) and (name in same or name.startswith(routed))


@contextmanager
def _moved(move: int) -> Iterator[None]:
    """Move initial weights by one rounding, up where their last bit is set and else down, or the other way round."""
    import torch

    from megalite.core.sharding import Shard

    initial = Shard.initial

    def moved(self: Shard, *args: Any, **options: Any) -> torch.Tensor:
        out = initial(self, *args, **options)
        up = (out.view(torch.int32) & 1 == 1) == (move > 0)
        # A zero stays: padding of the vocabulary is one.
        to = torch.where(up, torch.inf, -torch.inf).where(out != 0, 0)
        return torch.nextafter(out, to)

    if move:
        Shard.initial = moved  # type: ignore[method-assign]
    try:
        yield
    finally:
        Shard.initial = initial  # type: ignore[method-assign]


@contextmanager
def _first_gradients() -> Iterator[Boxes]:
    """Provide the gradients of the first step, read before the update, in units of the mean loss."""
    from megalite.core import step as steps
    from megalite.core.optim.state_tensors import share_states

    update, boxes = steps.update, Boxes()

    def read(engine: Any, rates: Any, grad_norm: float, unscale: float) -> None:
        if not boxes:
            for bucket in engine.optimizer.buckets:
                _add(boxes, share_states(bucket, [bucket.grad_share]), unscale)
        update(engine, rates, grad_norm, unscale)

    steps.update = read
    try:
        yield boxes
    finally:
        steps.update = update


def _masters(engine: Any) -> Boxes:
    boxes = Boxes()
    _add(boxes, [state for state in engine.optimizer.states() if state.role == "master"])
    return boxes


def _add(boxes: Boxes, states: Any, factor: float = 1.0) -> None:
    """Add what this rank writes of some states, times a factor."""
    for state in states:
        if state.is_owner:
            held = boxes.setdefault(state.name, (state.shape, []))[1]
            for box in state.slices:
                part = state.flat[box.at : box.at + box.numel].view(box.shape).detach()
                held.append((box.index, (part * factor).numpy().copy() if factor != 1 else part.numpy().copy()))


def _copies(engine: Any) -> list[tuple[str, tuple[int, ...], dict[str, list[str]]]]:
    # Two axes, of the run's grid and of its experts', may have one name and the same ranks.
    table: dict[tuple[str, tuple[int, ...]], dict[str, list[str]]] = {}
    for axis, weights in engine.optimizer.copies():
        by_name = table.setdefault((axis.name, tuple(axis.ranks)), {})
        for name, weight in weights:
            digest = hashlib.sha256(weight.detach().contiguous().numpy().tobytes()).hexdigest()[:16]
            by_name.setdefault(name, []).append(digest)
    return [(*key, {name: sorted(digests) for name, digests in by_name.items()}) for key, by_name in table.items()]
