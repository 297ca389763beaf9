"""`megalite preprocess` and `megalite tokenizer`: text and conversations to tokens, and a tokenizer for them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from megalite.core.base.errors import in_range, require
from megalite.core.base.log import logger, setup_logging
from megalite.extras.compat.megatron_preprocess import commands
from megalite.extras.prepare.merge import merge
from megalite.extras.prepare.preprocess import check_output
from megalite.extras.prepare.preprocess import preprocess as preprocess_files
from megalite.extras.prepare.stream_order import preprocess_stream
from megalite.extras.prepare.train_tokenizer import train_tokenizer
from megalite.extras.tool import ToolParser
from megalite.runtime.base.child import num_cores
from megalite.runtime.base.urls import cached_at, is_url
from megalite.runtime.data import TextOptions, split_of
from megalite.runtime.data.chats.named_templates import NAMED
from megalite.runtime.options.run import RunConfig
from megalite.runtime.places.downloads import bring_tree

_PREPROCESS = """Convert text to Megatron-format token files: PREFIX.bin, PREFIX.idx, and PREFIX.json, which names the
tokenizer. With --chat, conversations instead, and PREFIX.mask.bin, which marks the answers. Several hosts prepare
a share each with --share 1/8 to 8/8; --merge joins them, byte for byte as one run would have written them.
Command lines of Megatron-LM's preprocess_data.py are read too."""


def preprocess(argv: Sequence[str]) -> None:
    """Make token files."""
    lines, notes = commands(argv)
    setup_logging()
    for note in notes:
        logger.info(note)
    for line in lines:
        _preprocess(line)


def _preprocess(argv: Sequence[str]) -> None:
    parser = ToolParser(prog="megalite preprocess", description=_PREPROCESS)
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="files, folders, quoted globs: .jsonl, .json, .parquet, other text (a file is a document); also .gz, .zst",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="T",
        help="folder or file: sentencepiece *.model, tokenizer.json, a tiktoken rank file, or the word bytes",
    )
    parser.add_argument("--out", required=True, metavar="PREFIX", help="output path without .bin")
    parser.add_argument("--workers", type=int, default=num_cores(), help="processes (default: one per core)")
    parser.add_argument(
        "--key", help="JSON key or parquet column of the text (default: text); with --chat, key of the messages"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="records are conversations: messages, conversations (ShareGPT too), prompt and completion, or "
        "instructions with answers (Alpaca, Dolly); text is learned as a whole",
    )
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="records are pairs of answers, for --stage dpo or reward: prompt, chosen and rejected, texts or messages; "
        "without prompt it is the turns that chosen and rejected have in common",
    )
    parser.add_argument(
        "--chat-template",
        metavar="NAME|FILE",
        help=f"{', '.join(NAMED)}, or a jinja file (default: the template in the tokenizer's folder)",
    )
    parser.add_argument("--skip-bad", action="store_true", help="skip and count records that do not parse")
    parser.add_argument("--overwrite", action="store_true", help="replace data that exist under the prefix")
    parser.add_argument(
        "--order",
        choices=["files", "stream"],
        default="files",
        help="files: documents as they come (default); stream: of one --input, as --data of training takes it, so that "
        "training reads the samples that it would read from the text, or with --chat from the conversations",
    )
    parser.add_argument(
        "--cache-dir",
        default=RunConfig.cache_dir,
        metavar="DIR",
        help=f"with --order stream, folder for tokenized pieces, shared with runs (default: {RunConfig.cache_dir})",
    )
    parser.add_argument(
        "--cache-gb",
        type=float,
        default=RunConfig.cache_gb,
        metavar="G",
        help=f"the oldest pieces there are deleted above this many GB (default: {RunConfig.cache_gb:g})",
    )
    parser.add_argument("--share", default="1/1", metavar="I/N", help="prepare the I-th of N parts of the inputs")
    parser.add_argument("--merge", nargs="+", metavar="PREFIX", help="join prepared data, in this order; no --input")
    args = parser.parse_args(argv)
    if args.merge:
        _merge(args)
        return
    if not (args.input and args.tokenizer):
        parser.error("--input and --tokenizer are required, or --merge")
    if args.order == "stream":
        _stream(args)
        return
    for flag, name in (("--cache-dir", "cache_dir"), ("--cache-gb", "cache_gb")):
        given, is_set = f"{flag} {getattr(args, name)}", getattr(args, name) != getattr(RunConfig, name)
        require(not is_set, given, "applies to --order stream", f"add it, or drop {flag}")
    ours = ("input", "tokenizer", "out", "merge", "order", "cache_dir", "cache_gb")
    options = {key: value for key, value in vars(args).items() if key not in ours}
    options["share"] = _share(args.share)
    stats = preprocess_files(args.input, args.tokenizer, args.out, **options)
    print(f"{args.out}: {stats}")


def _stream(args: argparse.Namespace) -> None:
    """Write one folder or file of text or chats in the order that training reads it in."""
    unlike = {
        "--pairs": args.pairs,
        "--chat-template without --chat": args.chat_template and not args.chat,
        "--share": args.share != "1/1",
    }
    given = f"--order stream with {next((flag for flag, is_set in unlike.items() if is_set), '')}"
    rule = "is of text or chats that one process reads in order"
    require(not any(unlike.values()), given, rule, "drop one of the two")
    given, rule = "--order stream with --chat --workers 0", "runs the template in a process of its own"
    require(args.workers or not args.chat, given, rule, "give 1 or more")
    rule = "takes the one folder or file that --data would name"
    require(len(args.input) == 1, f"--order stream with {len(args.input)} --input", rule, "put the files in one folder")
    in_range(args, "workers", 0, 1024)
    in_range(args, "cache_gb", 0.001, 10**7)
    (word,) = args.input
    path, _ = split_of(word)
    if is_url(path):
        bring_tree(path, args.cache_dir, deep=True)
        word = str(cached_at(word, args.cache_dir))
    else:
        require(Path(path).exists(), f"--input {word}", "does not exist", "check the path")
    check_output(args.out, [Path(path)], args.overwrite)
    limit = int(args.cache_gb * 1e9)
    how = (args.skip_bad, None, None, args.cache_dir, limit, args.workers, args.chat_template)
    options = TextOptions(None, args.key or "text", *how)
    print(f"{args.out}: {preprocess_stream(word, args.chat, args.tokenizer, args.out, options)}")


def _merge(args: argparse.Namespace) -> None:
    rule = "joins data that are prepared: it takes no text and no tokenizer"
    given = "--merge with --input or --tokenizer"
    require(not (args.input or args.tokenizer), given, rule, "drop the others")
    check_output(args.out, [Path(f"{prefix}.bin") for prefix in args.merge], args.overwrite)
    documents, tokens = merge(args.merge, args.out)
    print(f"{args.out}: {documents} documents, {tokens} tokens of {len(args.merge)} prefixes")


def _share(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    i, n = (int(match[1]), int(match[2])) if match else (0, 0)
    require(1 <= i <= n, f"--share {text}", "must be I/N, with I from 1 to N", "use 1/8 to 8/8 on eight hosts")
    return i, n


def tokenizer(argv: Sequence[str]) -> None:
    """Train a tokenizer."""
    about = "Train a sentencepiece BPE tokenizer on text files: DIR/tokenizer.model."
    parser = ToolParser(prog="megalite tokenizer", description=about)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, quoted globs: .jsonl, .json, .parquet, any other text; also .gz or .zst",
    )
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="pieces, 256 bytes included")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for tokenizer.model")
    parser.add_argument(
        "--control-symbols",
        nargs="+",
        default=[],
        metavar="NAME",
        help="special tokens of a chat template, quoted: '<|im_start|>' '<|im_end|>' (those of ChatML)",
    )
    parser.add_argument("--key", default="text", help="JSON key or parquet column of the text (default: text)")
    parser.add_argument("--max-mb", type=float, default=1000.0, help="maximum amount of text to read (default: 1000)")
    parser.add_argument("--skip-bad", action="store_true", help="skip and count records that do not parse")
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer that exists in the folder")
    args = parser.parse_args(argv)
    in_range(args, "vocab_size", 1, 2**31)
    # The trainer holds all text in memory.
    in_range(args, "max_mb", 0, 10**6, above=True)
    setup_logging()
    options = {name: getattr(args, name) for name in ("key", "max_mb", "skip_bad", "overwrite", "control_symbols")}
    trained = train_tokenizer(args.input, args.vocab_size, args.out, **options)
    print(f"{trained.path}: {trained.vocab_size} pieces, SHA-256 {trained.sha256}")
