"""Translation of the names of the Hugging Face Trainer (`TrainingArguments`, transformers 5), which TRL's extend.

A name is renamed, sets some of our options, is computed from other options and the number of ranks, or is refused with
the name that it has here (see `megalite.extras.compat.refusals`). docs/megatron.md prints these tables.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.options.names import dashed
from megalite.extras.compat.accelerate import STRATEGIES
from megalite.extras.compat.megatron_defaults import as_flag, one_pass
from megalite.extras.compat.tool_file import data_ranks
from megalite.runtime.options.dialect import ComputedOption, Flag
from megalite.runtime.options.fields import Layer, OptionValue

_SPELLINGS: dict[str, str] = {
    "lr": "learning-rate",
    "train_steps": "max-steps",
    "micro_batch_size": "per-device-train-batch-size per-gpu-train-batch-size",
    "lr_decay": "lr-scheduler-type",
    "optimizer": "optim",
    "eps": "adam-epsilon",
    "clip_grad": "max-grad-norm",
    "label_smoothing": "label-smoothing-factor",
    "seq_len": "block-size max-seq-length max-length model-max-length",
    "run_dir": "output-dir",
    "save_every": "save-steps",
    "keep_last": "save-total-limit",
    "log_every": "logging-steps",
    "init_from_hf": "model-name-or-path model-name",
    "tokenizer": "tokenizer-name",
}
RENAMED: dict[str, str] = {flag: ours for ours, flags in _SPELLINGS.items() for flag in flags.split()}
"""Their flag -> our option; values are unchanged except for `VALUES`."""

VALUES: dict[str, dict[str, str]] = {
    "lr_decay": {"constant_with_warmup": "constant", "inverse_sqrt": "inverse-square-root"},
    "optimizer": dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw") | {"lion_32bit": "lion"},
}
"""Our option -> {their spelling of a value: ours}."""

SWITCHES: dict[str, dict[str, Any]] = {
    "gradient-checkpointing": {"recompute": "full"},
    "torch-compile": {"compile": True},
    "load-best-model-at-end": {"keep_best": 1},
    "do-train": {},
}
"""Their flag without a value, or with `True` -> our options."""

TRAINED: dict[str, Any] = {"lr": 5e-5, "lr_decay": "linear", "weight_decay": 0.0, "beta2": 0.999}
"""Our option -> their default, where it differs and changes what is trained."""

_NEUTRAL = {"max-steps": "-1", "fsdp": "False"}
"""Their flag -> the value that says that it is not given."""

_BOOLEANS = {*SWITCHES, "bf16", "fp16"}
_FSDP = {name.lower(): options for name, options in STRATEGIES.items()}


def _batch(_: str, written: str, passes: int, options: Mapping[str, Any]) -> int:
    """Return the samples of a step: passes x micro-batch x dp, where dp follows from the number of ranks."""
    if passes < 1:
        raise UserError(written, "must be at least 1", "correct it")
    dp = data_ranks(options.__getitem__, options["world"])
    batch = int(passes * options["micro_batch_size"] * dp)
    logger.info(
        f"{written}: --global-batch-size {batch}, with --micro-batch-size {options['micro_batch_size']} and dp {dp}"
    )
    return batch


def _warmup(_: str, written: str, ratio: float, options: Mapping[str, Any]) -> int:
    if not 0 <= ratio <= 1:
        raise UserError(written, "must be between 0 and 1", "correct it, or give --warmup-steps")
    return math.ceil(ratio * options["train_steps"])


def _resume(_: str, written: str, path: str, options: Mapping[str, Any]) -> str:
    return {"true": "latest", "false": "never"}.get(path.lower(), path)


COMPUTED: dict[str, ComputedOption] = {
    "gradient-accumulation-steps": ComputedOption("global_batch_size", int, _batch),
    "warmup-ratio": ComputedOption("warmup_steps", float, _warmup),
    "resume-from-checkpoint": ComputedOption("resume", str, _resume),
}
"""Their flag -> how our option is computed from it."""

FLAGS = frozenset({*RENAMED, *COMPUTED, *SWITCHES, "fsdp"})
"""All that are read."""


def rewrite(flags: Sequence[Flag]) -> tuple[list[Flag], dict[str, str]]:
    """Write out `--x True` and `--fsdp`, and drop what asks for nothing.

    Returns:
        The flags, and for those whose words mean something else here, what to do.
    """
    names = {flag for flag, _ in flags}
    if not names & FLAGS:
        return list(flags), {}
    rewritten: list[Flag] = []
    mistakes: dict[str, str] = {}
    for flag, words in flags:
        text = " ".join(words)
        if _NEUTRAL.get(flag) == text:
            continue
        if flag in _BOOLEANS and text.lower() in ("true", "false"):
            rewritten += [(flag, [])] if text.lower() == "true" else []
        elif other := _means_otherwise(flag, text, names):
            mistakes[f"--{flag}"] = f"{' '.join([f'--{flag}', *words])}: {other}"
        elif flag == "fsdp":
            rewritten += _sharding(text) or []
        else:
            rewritten.append((flag, words))
    return rewritten, mistakes


def _means_otherwise(flag: str, text: str, names: Set[str]) -> str:
    """Say what a flag of the Trainer does there and what to give here; "" where it is the same."""
    warms_up = bool(names & {"warmup-steps", "warmup-ratio"})
    if flag == "eval-steps":
        return "is an interval in the Trainer's words, and a number of batches here; give --eval-every for the interval"
    if flag == "load-best-model-at-end" and not names & {"eval-every", "config"}:
        return "is --keep-best 1 here, by the evaluations of steps that are saved; give --eval-every with --save-steps"
    if flag == "optim" and text == "sgd":
        return "has no momentum in the Trainer; give --optimizer sgd, and its momentum as --beta1"
    if flag == "lr-scheduler-type" and text == "constant" and warms_up:
        return "has no warm-up in the Trainer; drop that, or give constant_with_warmup"
    if flag == "lr-scheduler-type" and text == "inverse_sqrt" and not warms_up:
        return "falls over 10,000 steps in the Trainer, here over the warm-up; give --warmup-steps"
    if flag == "gradient-accumulation-steps" and names & {"layout", "strategy"}:
        return "follows from the layout that is chosen; give --global-batch-size"
    if flag == "fsdp" and _sharding(text) is None:
        return f"must be one of {', '.join(_FSDP)}, with auto_wrap or offload; give --zero, and see docs/coming_from.md"
    return ""


def _sharding(text: str) -> list[Flag] | None:
    """Return the flags of a word of `--fsdp`; units of wrapping are always the blocks. None: it is none of them."""
    given = [word.replace("True", "full_shard") for word in text.split() if word != "auto_wrap"]
    if not given:
        return []
    sharding = [word for word in given if word in _FSDP]
    if len(sharding) != 1 or set(given) - {*sharding, "offload"}:
        return None
    options = _FSDP[sharding[0]] | ({"offload": "optimizer+params"} if "offload" in given else {})
    return [(dashed(name), [str(value)]) for name, value in options.items()]


def defaults(flags: Layer, computed: Collection[str], given: Layer, world: int) -> Layer:
    """Return the Trainer's defaults for a command in its words, and log them; else nothing.

    Args:
        flags: options of the command line.
        computed: flags of the command line from which options are computed.
        given: options that any source gives.
        world: number of ranks; 0: the layout is not known.
    """
    sources = [option.source.removeprefix("--") for option in flags.values()]
    words = [word for word in (*sources, *computed) if word in FLAGS]
    options = {name: value for name, value in TRAINED.items() if name not in given}
    if words and "micro_batch_size" in given:
        options |= one_pass(computed, given, world)
    if not words or not options:
        return {}
    taken = " ".join(as_flag(name, value) for name, value in options.items())
    seed = "" if "seed" in given else "--seed 1234 (there 42); "
    differs = f"{seed}step N has the learning rate that step N + 1 has there"
    logger.info(f"--{words[0]}: as in the Hugging Face Trainer, {taken}; not as there, {differs}")
    return {name: OptionValue(value, f"the Trainer's default (for --{words[0]})") for name, value in options.items()}
