"""Convert text to Megatron-format token files: PREFIX.bin, PREFIX.idx, and PREFIX.json, which names the tokenizer.

With --chat, conversations instead, and PREFIX.mask.bin, which marks the answers.
"""

from megalite.data.prepare.preprocess import default_workers, preprocess
from megalite.errors import ToolParser, run_tool
from megalite.log import setup_logging


def main() -> None:
    parser = ToolParser(description=__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, quoted globs: .jsonl, .parquet, any other text (a file is a document); also .gz or .zst",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="T",
        help="folder or file: sentencepiece *.model, tokenizer.json, a tiktoken rank file, or the word bytes",
    )
    parser.add_argument("--out", required=True, metavar="PREFIX", help="output path without .bin")
    parser.add_argument("--workers", type=int, default=default_workers(), help="processes (default: one per core)")
    parser.add_argument(
        "--key", help="JSON key or parquet column of the text (default: text); with --chat, key of the messages"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="lines are conversations: messages, conversations (ShareGPT too), or prompt and completion",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="jinja template, or the word chatml (default: the one in the tokenizer's folder)",
    )
    parser.add_argument("--skip-bad", action="store_true", help="skip and count records that do not parse")
    parser.add_argument("--overwrite", action="store_true", help="replace data that exist under the prefix")
    args = parser.parse_args()
    setup_logging()
    options = {key: value for key, value in vars(args).items() if key not in ("input", "tokenizer", "out")}
    stats = preprocess(args.input, args.tokenizer, args.out, **options)
    print(f"{args.out}: {stats}")


if __name__ == "__main__":
    run_tool(main)
