"""The options of Megatron-LM, DeepSpeed, Accelerate and the Hugging Face Trainer, as the command line reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.extras.compat import megatron, megatron_defaults, trainer
from megalite.extras.compat.accelerate import read_accelerate
from megalite.extras.compat.deepspeed import read_deepspeed
from megalite.extras.compat.foreign_files import recognize
from megalite.extras.compat.refusals import accept
from megalite.extras.compat.tool_file import resolve_batch_sizes
from megalite.runtime.options.dialect import Dialect
from megalite.runtime.options.fields import Layer, StartOptions


@dataclass(frozen=True)
class ToolStartOptions(StartOptions):
    """Where to start from, and what to print instead of training."""

    deepspeed_config: str | None = None
    """DeepSpeed's JSON; each key becomes an option, is ignored, or is refused with a reason (docs/coming_from.md)."""
    accelerate_config: str | None = None
    """Accelerate's YAML, read in the same way."""
    ignore_megatron_flags: bool = False
    """Ignore flags of Megatron-LM that have no effect here, and log their names."""


def read_tool_configs(
    start: StartOptions, lower: Mapping[str, Any], flags: Layer, world: int | None
) -> tuple[list[Layer], int | None]:
    """Read `--accelerate-config` and `--deepspeed-config`, lowest first, and log how their keys are handled.

    Args:
        start: start options, which name the files.
        lower: values of all options without these files and the flags.
        flags: options of the command line.
        world: number of ranks; None if they are not started, in which case an Accelerate file may give it.

    Returns:
        The layers, and the number of ranks, as far as it is known.

    Raises:
        UserError: a file cannot be read, is for another number of ranks, or has keys that are refused.
    """
    assert isinstance(start, ToolStartOptions)
    layers = []
    for path, read in ((start.accelerate_config, read_accelerate), (start.deepspeed_config, read_deepspeed)):
        if path is None:
            continue
        file = read(Path(path), flags, lower)
        asked = file.processes
        if asked is not None and world is not None and asked.value != world:
            remedy = f"start {asked.value}, or correct the file"
            raise UserError(asked.written, f"there {'are' if world > 1 else 'is'} {world} of them", remedy)
        world = world or (asked.value if asked else None)
        resolve_batch_sizes(file, world or 1)
        file.log_notes()
        layers.append(file.layer)
        lower = {**lower, **{name: option.value for name, option in file.layer.items()}}
    return layers, world


def tool_defaults(flags: Layer, computed: Collection[str], given: Layer, world: int) -> Layer:
    """Return the defaults of the tool in whose words a command is; Megatron-LM's, if it is in those of both."""
    asked = (flags, computed, given, world)
    return megatron_defaults.defaults(*asked) or trainer.defaults(*asked)


DIALECT = Dialect(
    renamed=megatron.RENAMED
    | trainer.RENAMED
    | {"strategy": "layout", "dpo-label-smoothing": "dpo_smoothing", "center-rewards-coefficient": "reward_center"},
    switches=megatron.SWITCHES | trainer.SWITCHES,
    values={
        name: megatron.VALUES.get(name, {}) | trainer.VALUES.get(name, {}) for name in megatron.VALUES | trainer.VALUES
    }
    # A stage on conversations differs in its data.
    | {"stage": {"pretrain": "lm", "sft": "lm"}},
    computed=megatron.COMPUTED | trainer.COMPUTED,
    implied=megatron.IMPLIED,
    refines=megatron.REFINES,
    accept=accept,
    defaults=tool_defaults,
    recognize=recognize,
    start=ToolStartOptions,
    read_files=read_tool_configs,
    about="Files of other tools come between --config and flags: --accelerate-config, then --deepspeed-config. "
    "Flags of Megatron-LM, Megatron-DeepSpeed and the Hugging Face Trainer are accepted too: see docs/megatron.md.",
)
"""Every spelling that megalite knows."""
