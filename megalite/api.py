"""Run from Python: `configure` options, `start` a run, and train it with `fit` or step by step with `steps`.

pretrain_gpt.py is built on the same functions; docs/api.md shows them in a notebook.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megalite.core.base.errors import require
from megalite.core.base.log import env_rank, setup_logging
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.device import only_deterministic_kernels, pick_device
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.rendezvous import check_adopted, group_timeout, init_process_group, shutdown, world_size
from megalite.core.options.names import dashed
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.diagnose.memory import diagnosing_memory
from megalite.extras.plan.auto import settle_layout
from megalite.extras.tasks.in_loop import open_tasks
from megalite.extras.view.phases import phase_table
from megalite.runtime.base.child import allow_many_files
from megalite.runtime.checkpoint.hf.start import hf_model_config
from megalite.runtime.data import Samples
from megalite.runtime.loop.run import Run
from megalite.runtime.options import cli
from megalite.runtime.options.fields import TYPES
from megalite.runtime.options.run import Config
from megalite.runtime.recover.member import find_companion
from megalite.runtime.start.start import open_run


def configure(**options: Any) -> Config:
    """Build a run's configuration from options, which are the flags of pretrain_gpt.py with underscores.

    Args:
        options: `preset="llama-3.2-1b", tp=2, data=["0.7", "A", "0.3", "B"], shuffle=False`; None: not given. As on the
            command line, `init_from_hf=DIR` also gives a model, `config=FILE` options from a YAML file, and words of
            other tools are read: of their switches (`gradient_checkpointing=False`), False is what they are without.

    Raises:
        UserError: an option is unknown, the values do not fit together, or nothing fits with `layout="auto"`.
    """
    words = [word for name, value in options.items() for word in _spell(name, value)]
    parsed = cli.parse(words, read_model=hf_model_config, world=world_size(), dialect=DIALECT)
    only_prints = "print_config" if parsed.print_config else "dry_run" if parsed.dry_run else ""
    require(not only_prints, f"{only_prints}=True", "prints and trains nothing", "drop it")
    return settle_layout(parsed)


def _spell(name: str, value: Any) -> list[str]:
    """Write an option as words of a command line."""
    flag, is_switch = dashed(name), TYPES.get(name) is bool
    if value is None:
        return []
    if not isinstance(value, bool):
        return [f"--{flag}={item}" for item in (value if isinstance(value, list | tuple) else [value])]
    if is_switch:
        return [f"--{flag}" if value else f"--no-{flag}"]
    # Those of other tools, and what to print in place of training, are off unless given: they have no --no-.
    computed = {name for name, option in DIALECT.computed.items() if option.hint is bool}
    if not value and (flag in {*DIALECT.switches, *computed} or getattr(DIALECT.start(), name, None) is False):
        return []
    takes_value = name in TYPES or flag in {"fsdp", *DIALECT.renamed, *DIALECT.computed} - computed
    return [f"--{flag}" if value and not takes_value else f"--{flag}={value}"]


def start(cfg: Config, train_data: Samples | None = None, valid_data: Samples | None = None) -> Run:
    """Open a run on this process, or on all of them under torchrun, and resume it if it has a checkpoint.

    Use it in a `with` statement, or call `close` at the end, which stops the watchdog, the checkpoint writer and the
    process group. A process group that already exists is used and not destroyed.

    Args:
        cfg: options from `configure`.
        train_data: your own samples, instead of `--data`.
        valid_data: your own samples for evaluation, with `train_data`.

    Raises:
        UserError: the run cannot be started with these options; raised on every rank.
    """
    with ExitStack() as exit_stack:
        exit_stack.enter_context(_log_and_group())
        check_adopted()
        if cfg.train.deterministic:
            exit_stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            only_deterministic_kernels()
        grid = Grid.from_config(cfg.parallel, world_size())
        companion = find_companion()
        # Where hosts are lost, two ranks would share a GPU for the last save.
        name = "cpu" if companion.turn.go.on_cpu else cfg.parallel.device
        device = pick_device(name, cfg.parallel.tp, cfg.parallel.zero, cfg.train.offload, cfg.run.recover != "none")
        timeout = group_timeout(cfg.run.watchdog_timeout)
        init_process_group(device, timeout, companion.listens)
        rank = dist.get_rank() if grid.world > 1 else env_rank()
        memory = exit_stack.enter_context(diagnosing_memory(cfg, grid, device, rank))
        ctx = ParallelContext.create(grid, device, timeout=timeout)
        tasks = open_tasks(cfg, ctx, companion)
        run = open_run(cfg, ctx, train_data, valid_data, companion, tasks.identity() if tasks else "")
        if tasks is not None:
            run.tasks = tasks
            tasks.prepare(run)
        memory.cfg, run.profiler.describe = run.engine.cfg, phase_table
        run.exit_stack = exit_stack.pop_all()
        return run


@contextmanager
def _log_and_group() -> Iterator[None]:
    """Set up logging, and at the end close the log file and the process group, unless the group existed before.

    After a failure both stay open: the error is still to be logged, and closing a process group could wait for peers
    that are gone.
    """
    own_group = not dist.is_initialized()
    rank = env_rank() if own_group else dist.get_rank()
    setup_logging(rank)
    allow_many_files()
    yield
    setup_logging(rank)
    if own_group:
        shutdown()
