"""tiktoken rank files, and what they lack: the splitting patterns and special tokens of well-known tokenizers."""

from __future__ import annotations

import base64
import re
from typing import Any

RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
"""First line of a rank file: a token in base64 and its rank."""
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


def read_ranks(data: bytes) -> dict[bytes, int]:
    """Parse a rank file. The library's own reader caches files in /tmp by path, whatever their content."""
    lines = [line.split() for line in data.splitlines() if line.strip()]
    bad = next((line for line in lines if len(line) != 2 or not line[1].isdigit()), None)
    if bad is not None:
        raise ValueError(f"a line is {b' '.join(bad)!r:.100}")
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}


def is_description(extra: dict[str, Any]) -> bool:
    """Whether the JSON beside a rank file has the required entries, each of its type."""
    specials = extra.get("special_tokens")
    if not isinstance(extra.get("pattern"), str) or not isinstance(specials, dict) or "eos" not in extra:
        return False
    named = [extra[key] for key in ("eos", "bos") if key in extra]
    ids_fit = all(type(i) is int and 0 <= i < 1 << 31 for i in specials.values())
    return ids_fit and all(isinstance(name, str) and name in specials for name in named)
