"""What tiktoken rank files do not hold: the splitting pattern and special tokens of well-known ones."""

from __future__ import annotations

from typing import Any

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPECIALS = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008,
    "<|eot_id|>": 128009,
    "<|python_tag|>": 128010,
    "<|reserved_last|>": 128255,
}
_QWEN_SPECIALS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
# A rank file holds neither the splitting pattern nor the special tokens; its number of ranks identifies the model.
KNOWN_RANKS: dict[int, dict[str, Any]] = {
    50256: {"pattern": _GPT2_PATTERN, "special_tokens": {"<|endoftext|>": 50256}, "eos": "<|endoftext|>"},
    50280: {"pattern": _GPT2_PATTERN, "special_tokens": {"<|endoftext|>": 50256}, "eos": "<|endoftext|>"},
    100256: {
        "pattern": _CL100K_PATTERN,
        "special_tokens": {"<|endoftext|>": 100257, "<|endofprompt|>": 100276},
        "eos": "<|endoftext|>",
    },
    199998: {
        "pattern": _O200K_PATTERN,
        "special_tokens": {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
        "eos": "<|endoftext|>",
    },
    128000: {
        "pattern": _CL100K_PATTERN,
        "special_tokens": _LLAMA3_SPECIALS,
        "eos": "<|end_of_text|>",
        "bos": "<|begin_of_text|>",
    },
    151643: {
        "pattern": _CL100K_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
        "special_tokens": _QWEN_SPECIALS,
        "eos": "<|endoftext|>",
    },
}
