"""Configurations of other trainers that are given as `--config`: which tool they are of, and what to do instead."""

from __future__ import annotations

import re

# "name: value" of YAML, '"name": value' of JSON, "name = value" and "[name]" of TOML.
_KEY = re.compile(r"""(?:^|[{,])[ \t\[{"']*([A-Za-z_][\w.-]*)["']?[ \t]*[:=\]]""", re.MULTILINE)
_LIKE_FLAGS = "give its lines as flags, which are read by those names (docs/megatron.md)"
_BY_HAND = "name the model with --preset or --init-from-hf, and give batch, length and rates as options (--help)"

_TOOLS: list[tuple[str, str, str]] = [
    ("DeepSpeed", "train_micro_batch_size_per_gpu", "give it as --deepspeed-config"),
    ("DeepSpeed", "zero_optimization", "give it as --deepspeed-config"),
    ("Accelerate", "compute_environment", "give it as --accelerate-config"),
    ("Accelerate", "distributed_type", "give it as --accelerate-config"),
    ("a model of Hugging Face", "architectures model_type", "give its folder as --init-from-hf"),
    ("Axolotl", "base_model datasets", _BY_HAND),
    ("LLaMA-Factory", "model_name_or_path finetuning_type", _BY_HAND),
    ("LLaMA-Factory", "model_name_or_path template cutoff_len", _BY_HAND),
    ("GPT-NeoX", "pipe_parallel_size", "give its lines as flags with Megatron-LM's names (docs/megatron.md)"),
    ("torchtitan", "job parallelism training", _BY_HAND),
    ("NeMo", "exp_manager", _BY_HAND),
    ("NeMo", "trainer model devices num_nodes", _BY_HAND),
    ("nanotron", "general parallelism tokens", _BY_HAND),
    ("the Hugging Face Trainer", "per_device_train_batch_size", _LIKE_FLAGS),
    ("Megatron-LM", "num_attention_heads seq_length", "give its lines as flags (docs/megatron.md)"),
]
"""(tool, names that its files have, what to do instead); the first that fits."""


def recognize(text: str) -> tuple[str, str] | None:
    """Return the tool that a configuration is of, and what to do instead; None if it is of none of them."""
    names = {name.replace("-", "_") for name in _KEY.findall(text)}
    return next(((tool, remedy) for tool, keys, remedy in _TOOLS if {*keys.split()} <= names), None)
