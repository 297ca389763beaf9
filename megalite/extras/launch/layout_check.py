"""Check a training command against a number of ranks before any of them starts. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath

from megalite.core.base.errors import require
from megalite.core.mesh.grid import Grid
from megalite.core.options.model import ModelConfig
from megalite.core.parts.schedules.choose import names_of
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.compat.help import asks_for_help
from megalite.runtime.options import cli
from megalite.runtime.recover.member import spare_ranks

_SCRIPTS = (["pretrain_gpt.py"], ["-m", "pretrain_gpt"])


def check_layout(
    script: Sequence[str], world: int, read_model: Callable[[str, str], ModelConfig] | None = None
) -> None:
    """Check all options of a `pretrain_gpt.py` command as its ranks would, also against the number of ranks.

    What requires data or a device is left to the ranks, and so is any other training script.

    Args:
        script: training script, or -m and its module, and its flags.
        world: number of ranks, those in reserve among them.
        read_model: see `megalite.runtime.options.cli.parse`.

    Raises:
        UserError: the error that the ranks would raise.
    """
    start = 2 if script[0] == "-m" else 1
    if [PurePath(word).name for word in script[:start]] not in _SCRIPTS or asks_for_help(script):
        return
    reserves = spare_ranks(script)
    rule = f"leaves none of {world} ranks to train"
    require(reserves < world, f"--spare-ranks {reserves}", rule, "start more ranks, or have fewer in reserve")
    world -= reserves
    parsed = cli.parse(list(script[start:]), read_model=read_model, world=world, dialect=DIALECT)
    if not (parsed.print_config or parsed.dry_run):
        grid = Grid.from_config(parsed.config.parallel, world)
        if parsed.layout is not None:  # chosen by the ranks, which see their devices
            return
        names_of(parsed.config, grid["dp"])
        if parsed.config.parallel.zero_group != "node":  # the number of ranks per host is not known yet
            parsed.config.parallel.zero_group_size(grid.batch_ranks, world)
