"""Train a sentencepiece BPE tokenizer whose ids a Hugging Face tokenizer can reproduce exactly."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError, require
from megalite.core.base.log import logger
from megalite.runtime.data.documents import BadRecord, expand_inputs, parse, read_chunks
from megalite.runtime.data.tokenizer import Tokenizer, load_tokenizer, optional_import

# sentencepiece learns nothing from a sentence that holds U+2585, its mark for unknown tokens, so text is split there
# too; with byte fallback the character still encodes and decodes exactly.
_SENTENCE_END = re.compile("[\n\u2585]")
_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "character_coverage": 0.99995,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": -1,
    "max_sentence_length": 1 << 30,
    "minloglevel": 2,
}


def train_tokenizer(
    inputs: list[str],
    vocab_size: int,
    out_dir: str | Path,
    *,
    key: str = "text",
    max_mb: float = 1000.0,
    skip_bad: bool = False,
    overwrite: bool = False,
    control_symbols: Sequence[str] = (),
) -> Tokenizer:
    """Train on text files and write `out_dir/tokenizer.model`; every text then decodes to itself.

    Identity normalization, no dummy prefix, whitespace kept, digits single, byte fallback; unk 0, bos 1, eos 2, no pad,
    then the control symbols.

    Args:
        inputs: as for `preprocess`.
        vocab_size: pieces in all, the 256 bytes and 3 special ones included.
        key: JSON key or parquet column of the text.
        max_mb: training reads at most this many MB of text, from the start of the inputs (the trainer holds all of it
            in memory); a warning tells when there is more.
        skip_bad: skip and count records that do not parse; otherwise the first one ends the training.
        overwrite: replace a tokenizer that exists in `out_dir`.
        control_symbols: names of further special tokens, as chat templates write them (`<|im_start|>`); text that holds
            such a name stays text.

    Raises:
        UserError: inputs cannot be read, or the vocabulary is too large or too small for the text.
    """
    out = Path(out_dir) / "tokenizer.model"
    _check_symbols(control_symbols)
    if out.exists() and not overwrite:
        raise UserError(f"--out {out_dir}", f"{out} exists", "choose another folder, or give --overwrite")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        model = _train(inputs, vocab_size, key, int(max_mb * 1e6), skip_bad, control_symbols)
    except OSError as e:
        raise UserError(f"--out {out_dir}", f"cannot be written ({e.strerror})", "choose another folder") from e
    temporary = out.with_name("tokenizer.model.tmp")
    with temporary.open("wb") as f:
        f.write(model)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(out)
    return load_tokenizer(out)


def _check_symbols(names: Sequence[str]) -> None:
    reserved = ["<unk>", "<s>", "</s>"]
    for name in names:
        given = f"--control-symbols {name!r}"
        require(re.fullmatch(r"[^\s,]+", name) is not None, given, "must have no spaces and commas", "rename it")
        require(name not in reserved, given, "is in the vocabulary already", "drop it")
        reserved.append(name)


def _train(
    inputs: list[str], vocab_size: int, key: str, max_bytes: int, skip_bad: bool, control_symbols: Sequence[str]
) -> bytes:
    """Return the contents of a trained `tokenizer.model`."""
    sentencepiece = optional_import("sentencepiece", "sentencepiece", None)
    model = io.BytesIO()
    input_errors: list[UserError] = []

    def sentences() -> Iterator[str]:
        try:
            yield from _sentences(expand_inputs(inputs), key, max_bytes, skip_bad)
        except UserError as e:
            input_errors.append(e)  # sentencepiece makes a RuntimeError of whatever its iterator raises
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(),
            model_writer=model,
            vocab_size=vocab_size,
            control_symbols=list(control_symbols),
            **_OPTIONS,
        )
    except RuntimeError as e:
        if input_errors:
            raise input_errors[0] from None
        if "[!sentences_.empty()]" in str(e):
            raise UserError(f"--input {' '.join(inputs)}", "contains no text", "check the files and --key") from None
        reason = re.sub(r"^\w+: \S+\(\d+\) \[.*\] ", "", str(e)).rstrip(".")  # without its C++ file, line and condition
        remedy = "choose a vocabulary size that fits the text, or use more text"
        # Its own remedies are options that are not here.
        if most := re.search(r"value <= (\d+)", reason):
            remedy = f"give {most[1]} or less, or more text"
        elif fewest := re.search(r"required_chars\. \d+ vs (\d+)", reason):
            remedy = f"give {fewest[1]} or more"
        rule = f"sentencepiece rejects it ({reason.split('. ')[0]})"
        raise UserError(f"--vocab-size {vocab_size}", rule, remedy) from e
    return model.getvalue()


def _sentences(paths: list[Path], key: str, max_bytes: int, skip_bad: bool) -> Iterator[str]:
    num_bytes = skipped = 0
    for text in (text for path in paths for chunk in read_chunks(path, key) for text in parse(chunk, key)):
        if isinstance(text, BadRecord):
            if not skip_bad:
                raise text.error(skippable=True)
            skipped += 1
            continue
        num_bytes += len(text.encode())
        if num_bytes > max_bytes:
            logger.warning(f"the tokenizer is trained on the first {max_bytes / 1e6:g} MB of text (--max-mb)")
            break
        yield from (piece for piece in _SENTENCE_END.split(text) if piece)
    if skipped:
        logger.warning(f"bad records skipped: {skipped}")
