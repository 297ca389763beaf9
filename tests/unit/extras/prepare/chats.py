"""Conversations as records, a tokenizer for them, and what the tool writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from megalite.extras.prepare.preprocess import preprocess
from megalite.runtime.data.tokenizer import load_tokenizer
from megalite.runtime.data.tokens import IndexedDataset

# As folders have them; the line end after an answer belongs to the block tag and goes with it.
MARKED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
UNMARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TURNS = [("user", "hi"), ("assistant", "yo ok"), ("user", "2?"), ("assistant", "4")]


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def save_bytes(folder: Path, config: dict[str, Any], *tokens: AddedToken) -> Path:
    """Save a byte-level tokenizer of 256 bytes and these control tokens, without a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    for token in tokens:
        (built.add_special_tokens if token.special else built.add_tokens)([token])
    folder.mkdir()
    built.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def control(word: str) -> AddedToken:
    return AddedToken(word, normalized=False, special=True)


def convert(folder: Path | str, records: list[dict[str, Any]], out: Path, template: str | None = None, **more: Any):
    """Run the tool on records; `template` is written beside the tokenizer."""
    source = out.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    if template is not None:
        (Path(folder) / "chat_template.jinja").write_text(template)
    return preprocess([str(source)], str(folder), str(out), chat=True, overwrite=True, **more)


def read(folder: Path | str, out: Path, document: int = 0) -> tuple[str, str, str, int]:
    """Text of a document, what of it is learned, what of that is the last answer, and its number of tokens."""
    tokenizer, data = load_tokenizer(folder), IndexedDataset(out)
    mask = np.fromfile(f"{out}.mask.bin", np.uint8)
    assert len(mask) == data.num_tokens
    ids, mask = data.document(document), mask[data.starts[document] : data.starts[document + 1]]
    text, learned, last = (tokenizer.decode(part.tolist()) for part in (ids, ids[mask > 0], ids[mask == 2]))
    return text, learned, last, len(ids)


def read_text(folder: Path, out: Path, document: int) -> str:
    return load_tokenizer(folder).decode(IndexedDataset(out).document(document).tolist())
