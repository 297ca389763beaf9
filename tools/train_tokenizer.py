"""Train a sentencepiece BPE tokenizer on text files: DIR/tokenizer.model."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.data.prepare.train_tokenizer import train_tokenizer
from megalite.errors import ToolParser, in_range, run_tool
from megalite.log import setup_logging


def main(argv: Sequence[str] | None = None) -> None:
    parser = ToolParser(description=__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, quoted globs: .jsonl, .parquet, any other text; also .gz or .zst",
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
    tokenizer = train_tokenizer(args.input, args.vocab_size, args.out, **options)
    print(f"{tokenizer.path}: {tokenizer.vocab_size} pieces, SHA-256 {tokenizer.sha256}")


if __name__ == "__main__":
    run_tool(main)
