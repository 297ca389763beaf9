"""The chat templates that megalite brings along: with marks for training, and as inference needs them."""

from __future__ import annotations

import re
from pathlib import Path

MARK = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_MARK = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
_FOLDER = Path(__file__).with_name("templates")

NAMED: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama2": (),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": (),
    "qwen2.5": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>", "<think>"),
    "tulu": (),
}
"""Name -> the tokens that the tokenizer must have: each is one id."""


def read_named(name: str) -> str:
    """Return the template of a name, with marks."""
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def served_form(source: str, name: str | None = None) -> str:
    """Return the template for inference.

    It is the same one without marks, which programs other than transformers do not know; for Qwen 3 the published one,
    which leaves the thoughts of earlier turns out.

    Args:
        source: the template of the training.
        name: its name, if it is one of `NAMED`.
    """
    published = _FOLDER / f"{name}.served.jinja"
    if name is not None and published.exists():
        return published.read_text(encoding="utf-8")
    # Blocks in the place of blocks: what is stripped around them stays the same.
    return _END_MARK.sub(r"{%\1 endif \2%}", MARK.sub(r"{%\1 if true \2%}", source))


def fitting_names(source: str) -> list[str]:
    """Return the named templates that write only tokens that a template writes, the one with most of them first."""
    fitting = [name for name, words in NAMED.items() if words and all(word in source for word in words)]
    return sorted(fitting, key=lambda name: (len(NAMED[name]), name == "chatml"), reverse=True)
