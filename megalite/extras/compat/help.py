"""What `--help` prints: the options that most runs set, or all of them, by group, with what their values look like."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import textwrap
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from megalite.core.options.names import dashed, description_of
from megalite.core.options.values import choices_of
from megalite.core.parts.families import PRESETS
from megalite.extras.tool import show
from megalite.runtime.options.dialect import PLAIN, Dialect
from megalite.runtime.options.fields import GROUP_OF, GROUPS, help_texts

COMMON = {
    "start": "preset config layout print_config dry_run",
    "model": "arch num_layers hidden_size num_heads num_kv_heads ffn_hidden_size vocab_size seq_len",
    "parallel": "tp pp vp schedule zero device",
    "data": "data valid_data tokenizer mock_data",
    "train": "micro_batch_size global_batch_size train_steps seed precision recompute compile offload",
    "optim": "optimizer lr min_lr warmup_steps lr_decay weight_decay clip_grad",
    "run": "run_dir save_every resume init_from_hf eval_every log_every tensorboard wandb_project",
}
"""Group -> options that `--help` shows."""

COMPATIBILITY = """
    vocab_divisible_by bucket_size overlap_grad_reduce overlap_tp_reduce overlap_param_gather
    lr_by lr_batch_size init_lr warmup_shape decoupled_lr decoupled_min_lr start_weight_decay weight_decay_ramp
    initial_loss_scale loss_scale_window hysteresis consecutive_hysteresis min_loss_scale
    deepspeed_config accelerate_config ignore_megatron_flags
"""
"""Options that exist for configurations of other tools; `--help all` shows them in a group of their own."""

_ABOUT_COMPATIBILITY = (
    "What configurations of Megatron-LM, DeepSpeed and Accelerate set, and a new run rarely needs. In YAML files, "
    "these options are under parallel and optim."
)

METAVARS = {
    "DIR": "run_dir init_from_hf offload_dir cache_dir",
    "FILE": "config calibration deepspeed_config accelerate_config",
    "PATH": "tokenizer",
    "N ...": "moe_dense_layers",
    "TYPE ...": "layer_types",
    "[WEIGHT] PREFIX|FOLDER ...": "data valid_data",
    "FILE ...": "eval_tasks",
    "KEY": "key",
    "NAME|FILE": "chat_template",
    "W,W,W": "split",
    "A:B": "record_schedule",
    "A:B,...": "profile tensor_stats",
    "STEP:SIZE ...": "batch_size_schedule",
    "SECONDS": "watchdog_timeout",
    "NAME": "preset",
    "PROJECT": "wandb_project",
    "BACKEND|OP=BACKEND,...": "ops",
    "N,N*K,...": "pipeline_layout",
    "{full,node,N,dp/K}": "zero_group",
    "{latest,never,PATH}": "resume",
    "{factor: X}": "rope_scaling",
}
"""What a value is -> options; a number is N or X, and choices are listed."""

_HELP = ("-h", "--help", "--help=all")
_PRECEDENCE = "Precedence, lowest first: defaults, the model family (--arch), --preset, --config files, flags."
_METAVAR_OF = {name: metavar for metavar, names in METAVARS.items() for name in names.split()}


class _Formatter(argparse.HelpFormatter):
    """Wraps lines at spaces only: a flag is not broken at its hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return any(word in _HELP for word in words)


def show_help_if_asked(words: Sequence[str], prog: str = "pretrain_gpt.py", dialect: Dialect = PLAIN) -> None:
    """Print the help that a command line asks for (`-h`, `--help`, `--help all`), and raise SystemExit(0)."""
    if asks_for_help(words):
        at = next(i for i, word in enumerate(words) if word in _HELP)
        show(help_text(prog, dialect, everything="=" in words[at] or list(words[at + 1 : at + 2]) == ["all"]))
        raise SystemExit(0)


def help_text(prog: str, dialect: Dialect = PLAIN, everything: bool = False) -> str:
    """Format the options by group, for the width of the terminal.

    Args:
        prog: the program that takes them.
        dialect: spellings and files of other tools that are read too.
        everything: show all options, not only those of `COMMON`.
    """
    shown = "All options." if everything else "The most common options; --help all shows every one."
    parser = argparse.ArgumentParser(
        usage=f"torchrun --nproc-per-node N {prog} --name value ...",
        description=f"{shown} Defaults are in brackets. {_PRECEDENCE} {dialect.about}",
        formatter_class=lambda prog: _Formatter(prog, max_help_position=34),
        add_help=False,
    )
    parser.add_argument_group().description = f"Presets: {', '.join(PRESETS)}."
    compatibility = []
    for group, cls in {"start": dialect.start, **GROUPS}.items():
        section = parser.add_argument_group(group, inspect.getdoc(cls))
        texts, hints = help_texts(cls), get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            if field.name in COMPATIBILITY.split():
                compatibility.append((field, hints[field.name], texts[field.name]))
            elif everything or field.name in COMMON[group].split():
                _add(section, field, hints[field.name], texts[field.name])
    if everything:
        section = parser.add_argument_group("compatibility", _ABOUT_COMPATIBILITY)
        for field, hint, text in compatibility:
            _add(section, field, hint, text)
    return parser.format_help()


def _add(section: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any, text: str) -> None:
    """Add a line for an option."""
    kind = get_args(hint)[0] if type(None) in get_args(hint) else hint
    is_option = field.name in GROUP_OF
    shown = ("on" if field.default else "off") if kind is bool else field.default
    default = "" if shown in (None, ()) or not is_option else f" [{shown}]"
    text = f"{text}{default}".replace("%", "%%")
    if kind is bool:
        flag = f"--[no-]{dashed(field.name)}" if is_option else f"--{dashed(field.name)}"
        section.add_argument(flag, action="store_true", help=text)
    else:
        section.add_argument(f"--{dashed(field.name)}", metavar=metavar_of(field.name, hint), help=text)


def metavar_of(name: str, hint: Any) -> str:
    """Return what the value of an option looks like."""
    if choices := choices_of(hint):
        return f"{{{','.join(choices)}}}"
    if description := description_of(hint):
        return f"{{{','.join([*description.others, *(form.split()[0] for form in description.forms)])}}}"
    kind = get_args(hint)[0] if type(None) in get_args(hint) else hint
    return _METAVAR_OF.get(name) or {int: "N", float: "X"}[kind]
