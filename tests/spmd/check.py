"""Checks the types of all tensors in a training step: see `tests.spmd.types`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megalite.core.build import build_engine
from megalite.core.engine import Engine
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.mesh.grid import Grid
from megalite.core.model import layers
from megalite.core.optim import bucket, weight_store
from megalite.core.pipeline.observe import Observer
from megalite.core.pipeline.schedule import Op
from megalite.core.sharding.parameter import ShardedParameter
from megalite.core.step import train_step
from megalite.core.tensor_parallel import linear
from megalite.runtime.options.run import Config
from tests.spmd import ranks as threads
from tests.spmd.ranks import World, collectives_of_threads, context_of
from tests.spmd.types import COLLECTIVES, OWN_STATISTICS, SIGNATURES, SpmdTypeError, Tag, close, demand, found_types


class Checker(Observer):
    """Follows the step of a rank, or of the one process (`rank` None), whose tensors it keeps for the ranks."""

    def __init__(self, world: World, rank: int | None, sequence_parallel: bool) -> None:
        self.world, self.rank = world, rank
        self.residual = "S(0)" if sequence_parallel else "I"
        self.microbatch: int | None = None
        # Gradients of parameters before and after their reduction; of the latter this rank's shares: (from, elements).
        self.params: dict[str, ShardedParameter] = {}
        self.raw: dict[str, torch.Tensor] = {}
        self.shares: dict[str, tuple[int, torch.Tensor]] = {}
        self._names: dict[int, str] = {}
        self._counts: Counter[object] = Counter()
        threads.of_thread.member = self

    def begin(self, op: Op) -> None:
        # Each data-parallel rank has one micro-batch; the one process takes them one after the other.
        replica = 0 if self.rank is None else self.world.grid.coords(self.rank)["dp"]
        self.microbatch = op.microbatch + replica

    def finished(self) -> None:
        self.microbatch = None

    def _tag(self, what: str) -> Tag:
        self._counts[self.microbatch, what] += 1
        return self.microbatch, what, self._counts[self.microbatch, what]

    def check(self, what: str, x: torch.Tensor, wanted: str, packing: Sequence[int] = ()) -> None:
        """Check a tensor's type over tp; the last rank that comes here does."""
        tag, x = self._tag(what), x.detach().clone()
        if self.rank is None:
            self.world.whole[tag] = x
            return
        group = next(ranks for ranks in self.world.grid.groups("tp") if self.rank in ranks)
        if parts := self.world.bring(tag, self.rank, group, x):
            self._demand(what, "tp", wanted, tag, parts, packing)

    def _demand(
        self, what: str, axis: str, wanted: str, tag: Tag, parts: list[torch.Tensor], packing: Sequence[int] = ()
    ) -> None:
        whole = self.world.whole.get(tag)
        if whole is None:
            raise SpmdTypeError(f"{what}: one process has no such tensor")
        self.world.seen.add(tag)
        demand(what, axis, wanted, found_types(parts, whole, packing), whole.dim())

    def watch(self, engine: Engine) -> None:
        """Check what enters and leaves the modules of an engine.

        Raises:
            SpmdTypeError: a module with parameters has no signature.
        """
        for stage in engine.stages.values():
            for name, module in stage.named_modules():
                self._names[id(module)] = name
                if type(module) in SIGNATURES:
                    self._watch(name, module, *SIGNATURES[type(module)])
                elif any(True for _ in module.parameters(recurse=False)):
                    raise SpmdTypeError(f"{name}: {type(module).__name__} has no signature")
            self.params.update((p.shard.spec.name, p) for p in stage.parameters() if isinstance(p, ShardedParameter))

    def _watch(self, name: str, module: Any, enters: str | None, leaves: str) -> None:
        packing = module.weight.shard.spec.parts if type(module) is linear.ColumnParallelLinear else ()

        def follow(what: str, x: torch.Tensor, kind: str) -> torch.Tensor:
            kind = {"residual": self.residual, "features": "S(-1)"}.get(kind, kind)
            self.check(f"{name}: its {what}", x, kind, packing)
            if x.requires_grad:
                # Of a view that nothing else uses: the gradient that comes from here alone.
                x = x.view_as(x)
                x.register_hook(lambda g: self.check(f"{name}: the gradient of its {what}", g, kind, packing))
            return x

        if enters is not None:
            module.register_forward_pre_hook(lambda _, args: (follow("input", args[0], enters), *args[1:]))
        module.register_forward_hook(lambda _, args, y: follow("output", y, leaves))
        if isinstance(module, layers.Norm):
            add = module.add

            def add_and_follow(x_SBH: torch.Tensor, residual_SBH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                y, total = add(follow("input", x_SBH, leaves), follow("residual", residual_SBH, leaves))
                return follow("output", y, leaves), follow("sum", total, leaves)

            module.add = add_and_follow  # type: ignore[method-assign]

    def place(self) -> tuple[str, bool]:
        """Find who calls a collective: (module or function, and direction; whether its operand is typed)."""
        frame: Any = sys._getframe(1)
        backward, typed, module, caller = False, True, "", ""
        while frame is not None and not module:
            code, local = frame.f_code, frame.f_locals
            backward |= code.co_name == "backward"
            typed &= code.co_name not in OWN_STATISTICS and code.co_filename not in (
                bucket.__file__,
                weight_store.__file__,
            )
            if code.co_filename not in (__file__, threads.__file__, collectives.__file__):
                caller = caller or code.co_name
            module = getattr(local.get("ctx"), "place", "")
            for key in ("layer", "self"):
                module = module or self._names.get(id(local.get(key)), "")
            frame = frame.f_back
        return f"{module or caller} ({'backward' if backward else 'forward'})", typed

    def exchange(self, kind: str, x: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
        """Check what enters a collective; returns what all its ranks have brought."""
        if axis.name == "own":  # of a layer that does not communicate
            return [x]
        place, typed = self.place()
        what, x = f"{kind} over {axis.name} in {place}: its operand", x.detach().clone()
        tag = self._tag(what)
        if self.rank is None:
            if typed:
                self.world.whole[tag] = x
            return [x]
        self._counts[axis.name] += 1
        parts = self.world.meet((axis.name, self._counts[axis.name]), what, self.rank, axis.ranks, x)
        if typed and self.microbatch is not None and axis.name != "tp":
            raise SpmdTypeError(f"{what} is S(samples) over {axis.name}; it must be {COLLECTIVES[kind]}")
        if typed:
            self._demand(what, axis.name, COLLECTIVES[kind], tag, parts)
        return parts

    def keep_gradients(self, engine: Engine, finish: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Finish the gradients of a step, and keep them from before and after."""
        self.raw = {name: p.main_grad.clone() for name, p in self.params.items()}
        result = finish()
        for made in engine.optimizer.buckets:
            for own in made.param_shares:
                self.shares[own.param.shard.spec.name] = own.start, made.grad_share[own.span].clone()
        if self.rank is None:
            self.world.one_process = self
            return result
        everyone = tuple(range(self.world.grid.world))
        checkers = self.world.meet("gradients", "the end of backward", self.rank, everyone, self)
        if self.rank == 0:
            check_gradients(self.world, checkers)
        return result


def run_step(cfg: Config, grid: Grid, checker: Checker, spoil: Callable[[Engine], None]) -> None:
    """Run a training step of a rank, or of the one process."""
    engine = build_engine(cfg, context_of(grid, checker.rank or 0))
    engine.optimizer.init_parameters(cfg.train.seed)
    for stage in engine.stages.values():
        modules: Iterator[Any] = stage.modules()
        for module in modules:
            if hasattr(module, "sequence_parallel"):
                module.sequence_parallel = checker.residual == "S(0)"
    spoil(engine)
    checker.watch(engine)
    samples = cfg.train.global_batch_size // engine.ctx.dp.size
    tokens = np.random.default_rng(5).integers(
        cfg.model.vocab, size=(cfg.train.global_batch_size, cfg.model.seq_len + 1)
    )
    finish = engine.optimizer.finish_grads
    engine.optimizer.finish_grads = lambda: checker.keep_gradients(engine, finish)  # type: ignore[method-assign]
    with engine.executor.observed_by(checker):
        train_step(engine, tokens[engine.ctx.dp.rank * samples :][:samples], 1)


def check(cfg: Config, grid: Grid, spoil: Callable[[Engine], None] = lambda engine: None) -> int:
    """Check all types in a step of a config, one sample for each data-parallel rank.

    Args:
        cfg: the run's config; its gradients are reduced after backward.
        grid: the ranks.
        spoil: changes every engine before the step.

    Returns:
        Number of tensors that were compared over tp, gradients of parameters not counted.

    Raises:
        SpmdTypeError: the first tensor that is not of its type.
    """
    world, parallel = World(grid), replace(cfg.parallel, overlap_grad_reduce=False)
    cfg = replace(cfg, parallel=parallel)
    alone = replace(cfg, parallel=replace(parallel, pp=1))

    with collectives_of_threads():
        run_step(alone, Grid.of(1), Checker(world, None, cfg.sequence_parallel), spoil)
        world.run(lambda rank: run_step(cfg, grid, Checker(world, rank, cfg.sequence_parallel), spoil))
    if missing := [tag for tag in world.whole if tag not in world.seen]:
        raise SpmdTypeError(f"{missing[0][1]}: one process has it, the ranks have not")
    return len(world.seen)


def check_gradients(world: World, ranks: Sequence[Checker]) -> None:
    """Check the gradient of every parameter against its declaration, before and after its reduction."""
    whole = world.one_process
    for name, param in whole.params.items():
        total = torch.zeros(param.shard.spec.shape)
        for piece in param.shard.slices:
            total[piece.index] = whole.raw[name][param.shard.local(piece).index]
        summed, reduced = [], []
        for group in world.grid.groups("dp"):
            summed.append(torch.stack([ranks[rank].raw[name] for rank in group]).sum(0))
            reduced.append(torch.full_like(summed[-1], torch.nan))
            unchanged = len(group) > 1
            for checker in (ranks[rank] for rank in group):
                if name in checker.shares:
                    first, share = checker.shares[name]
                    own = slice(first, first + len(share))
                    reduced[-1].view(-1)[own] = share
                    unchanged &= close(share, checker.raw[name].view(-1)[own])
            if unchanged and not close(reduced[-1], summed[-1]):
                raise SpmdTypeError(f"{name}: its reduced gradient is P over dp; it must be S(shares)")
        shards = [ranks[rank].params[name].shard for rank in world.grid.groups("tp")[0]]
        before = "S(cut)" if shards[0].spec.sharded_dims else "P" if "tp" in shards[0].reduce else "R"
        after = "S(cut)" if shards[0].spec.sharded_dims else "R"
        for what, parts, wanted in (("gradient", summed, before), ("reduced gradient", reduced, after)):
            found = found_types(parts, total)
            if shards[0].spec.sharded_dims and all(close(x, shard.take(total)) for x, shard in zip(parts, shards)):
                found.append("S(cut)")
            demand(f"{name}: its {what}", "tp", wanted, found, total.dim())
