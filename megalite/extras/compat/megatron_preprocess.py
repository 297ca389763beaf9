"""The command line of Megatron-LM's tools/preprocess_data.py, in the words of `megalite preprocess`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from megalite.core.base.errors import UserError, require
from megalite.extras.tool import ToolParser
from megalite.runtime.data.tokenizer import optional_import
from megalite.runtime.data.tokenizer_files import read_regular

_END = "<|endoftext|>"
_PAIR = "GPT2BPETokenizer"
_WITH_BEGINNING = ("HuggingFaceTokenizer", "Llama2Tokenizer")
_KNOWN = (_PAIR, *_WITH_BEGINNING, "GPTSentencePieceTokenizer", "SentencePieceTokenizer", "TikTokenizer")


class Commands(NamedTuple):
    """What to run in place of a command line.

    Attributes:
        lines: command lines in our words.
        notes: what differs from Megatron-LM, for the log.
    """

    lines: list[list[str]]
    notes: list[str]


def commands(argv: Sequence[str]) -> Commands:
    """Translate a command line of Megatron-LM's, one line for each JSON key; ours comes back as it is.

    A pair of `--vocab-file` and `--merge-file` (GPT-2's) is written as PREFIX_tokenizer/tokenizer.json.

    Raises:
        UserError: an option that means something else here, or a tokenizer that cannot be read.
    """
    if not any(word.partition("=")[0] == "--output-prefix" for word in argv):
        return Commands([[*argv]], [])
    given, others = _parser().parse_known_args(argv)
    _refuse(given, {word.partition("=")[0] for word in others})
    notes = []
    if not given.append_eod:
        notes.append(f"every document ends with {_END} or its like, which Megatron-LM writes with --append-eod only")
    if given.tokenizer_type in _WITH_BEGINNING:
        notes.append(
            f"--tokenizer-type {given.tokenizer_type}: no beginning-of-text token is written; Megatron-LM writes one "
            "before each document where the tokenizer adds it"
        )
    tokenizer = _tokenizer(given)
    if tokenizer is not None:
        others += ["--tokenizer", tokenizer]
    outs = [(key, f"{given.output_prefix}_{key}_document") for key in given.json_keys]
    return Commands([[*others, "--key", key, "--out", out] for key, out in outs], notes)


def _parser() -> ToolParser:
    parser = ToolParser(prog="megalite preprocess", allow_abbrev=False)
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--json-keys", nargs="+", default=["text"])
    for flag in ("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--dataset-impl"):
        parser.add_argument(flag)
    for flag in ("--append-eod", "--split-sentences", "--find-optimal-num-workers"):
        parser.add_argument(flag, action="store_true")
    # How their processes share the work; the files are the same.
    for flag in ("--partitions", "--log-interval", "--lang", "--max-documents"):
        parser.add_argument(flag)
    parser.add_argument("--workers-to-check", nargs="+")
    for flag in ("--keep-sequential-samples", "--keep-newlines"):
        parser.add_argument(flag, action="store_true")
    return parser


def _refuse(given: argparse.Namespace, others: Set[str]) -> None:
    ours = " ".join(sorted({"--out", "--key", "--tokenizer"} & others))
    require(not ours, f"{ours} with --output-prefix", "are words of two tools", "use those of one")
    require(not given.split_sentences, "--split-sentences", "is for BERT: documents stay whole here", "drop it")
    rule = "only times numbers of workers there; here there are as many as cores, and each has work"
    require(not given.find_optimal_num_workers, "--find-optimal-num-workers", rule, "drop it, or give --workers N")
    impl = given.dataset_impl
    require(impl in (None, "mmap"), f"--dataset-impl {impl}", "only mmap is written", "drop it")
    kind = given.tokenizer_type
    rule = f"is none of {', '.join(_KNOWN)}"
    require(kind in (None, *_KNOWN), f"--tokenizer-type {kind}", rule, "give one of these, or --tokenizer-model")
    model, pair = given.tokenizer_model, (given.vocab_file, given.merge_file)
    rule = "are two tokenizers" if kind is None else f"are two, of which Megatron-LM would read that of {kind}"
    both = f"--tokenizer-model {model} with --vocab-file or --merge-file"
    require(model is None or pair == (None, None), both, rule, "give one")
    rule = "has its tokenizer in --vocab-file and --merge-file"
    require(kind != _PAIR or model is None, f"--tokenizer-type {kind} with --tokenizer-model", rule, "give these")


def _tokenizer(given: argparse.Namespace) -> str | None:
    """Return what `--tokenizer` is to be; None where nothing of theirs is given."""
    pair = (given.vocab_file, given.merge_file)
    if pair == (None, None):
        return given.tokenizer_model
    require(None not in pair, "--vocab-file or --merge-file alone", "is half a tokenizer", "give both")
    folder = Path(f"{given.output_prefix}_tokenizer")
    write_pair(Path(given.vocab_file), Path(given.merge_file), folder)
    return str(folder)


def write_pair(vocab: Path, merges: Path, folder: Path) -> None:
    """Write GPT-2's vocab.json and merges.txt as one tokenizer.json, with the same ids.

    Raises:
        UserError: a file cannot be read, they are no such pair, or the folder has another tokenizer.
    """
    tokenizers = optional_import("tokenizers", "tokenizers", None)
    for file in (vocab, merges):
        read_regular(file)  # of a size that a tokenizer has
    what = f"--vocab-file {vocab} --merge-file {merges}"
    try:
        made = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    except Exception as e:  # the library's errors have no class of their own
        raise UserError(what, f"are no pair of GPT-2's ({e})", "give vocab.json and merges.txt of one model") from None
    require(made.token_to_id(_END) is not None, what, f"have no {_END}, which ends a document", "give another pair")
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([_END])
    file, text = folder / "tokenizer.json", made.to_str(pretty=True)
    if file.exists():
        require(file.read_text() == text, str(folder), "has another tokenizer", "remove it, or choose another prefix")
        return
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
