"""Check a training command against a number of ranks before any of them starts. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath

from megalite.config import cli
from megalite.config.model import ModelConfig
from megalite.dist.grid import Grid
from megalite.pipeline.choose import names_of

_SCRIPT = "pretrain_gpt.py"


def check_layout(script: Sequence[str], world: int, read_model: Callable[[str], ModelConfig] | None = None) -> None:
    """Check all options of a `pretrain_gpt.py` command as its ranks would: each alone, together, and against the ranks.

    What needs data or a device is left to the ranks, and so is any other training script.

    Args:
        script: the training script and its flags.
        world: number of ranks.
        read_model: see `megalite.config.cli.parse`.

    Raises:
        UserError: what the ranks would raise.
    """
    if PurePath(script[0]).name != _SCRIPT or {"-h", "--help"} & set(script):
        return
    parsed = cli.parse(list(script[1:]), read_model=read_model, world=world)
    if not (parsed.print_config or parsed.dry_run):
        grid = Grid.of(world, parsed.config.parallel.tp, parsed.config.parallel.pp)
        if parsed.layout is not None:  # chosen by the ranks, who see their devices
            return
        names_of(parsed.config, grid["dp"])
        if parsed.config.parallel.zero_group != "node":  # how many ranks a host has is not known yet
            parsed.config.zero_group_size(grid["dp"], world)
