"""The layers of options that come from other tools' files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.config.accelerate import read_accelerate
from megalite.config.deepspeed import read_deepspeed
from megalite.config.foreign import settle_batch
from megalite.config.options import Layer, Start
from megalite.errors import UserError


def layers_of_others(
    start: Start, lower: Mapping[str, Any], flags: Layer, world: int | None
) -> tuple[list[Layer], int | None]:
    """Read `--accelerate-config` and `--deepspeed-config`, lowest first, and log what became of their keys.

    Args:
        start: names the files.
        lower: all options without them and without the flags.
        flags: of the command line.
        world: number of ranks; None where they are not started: then an Accelerate file says how many there would be.

    Returns:
        The layers, and the number of ranks, as far as it is known.

    Raises:
        UserError: a file cannot be read, is for another number of ranks, or has keys that are refused.
    """
    if world is None and not (start.print_config or start.dry_run):
        world = 1
    found = []
    for path, read in ((start.accelerate_config, read_accelerate), (start.deepspeed_config, read_deepspeed)):
        if path is None:
            continue
        reading = read(Path(path), flags, lower)
        asked = reading.processes
        if asked is not None and world is not None and asked.value != world:
            remedy = f"start {asked.value}, or correct the file"
            raise UserError(asked.written, f"there {'are' if world > 1 else 'is'} {world} of them", remedy)
        world = world or (asked.value if asked else None)
        settle_batch(reading, world or 1)
        reading.tell()
        found.append(reading.layer)
        lower = {**lower, **{name: given.value for name, given in reading.layer.items()}}
    return found, world
