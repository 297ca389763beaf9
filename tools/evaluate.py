"""Compute loss and perplexity of a model: `python tools/evaluate.py RUN --data PREFIX ...` or `--text PATH ...`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.data import check_tokenizer_matches, mask_path
from megalite.data.prepare.documents import expand_inputs
from megalite.dist.device import pick_device
from megalite.errors import ToolParser, UserError, in_range, run_tool
from megalite.log import logger, setup_logging
from megalite.train.inference import Model, chat_loss, encode_text, load_model, mean_loss, tokens_of


def main(argv: Sequence[str] | None = None) -> None:
    """Print a JSON line for each source, and one for all of them if there are several."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("path", type=Path, help="run directory, a checkpoint in it, or a Hugging Face folder")
    source = parser.add_mutually_exclusive_group(required=True)
    tokens = "tokens: PREFIX.bin and PREFIX.idx; of chat data also the loss per token of the answers"
    source.add_argument("--data", metavar="PREFIX", nargs="+", help=tokens)
    texts = "text files, folders or globs, as for preprocess_data.py; also gives bits per byte"
    source.add_argument("--text", metavar="PATH", nargs="+", help=texts)
    parser.add_argument("--key", default="text", help="JSON key or parquet column of the text (default: text)")
    parser.add_argument("--max-tokens", type=int, default=1_000_000, help="most tokens of a source (default 1,000,000)")
    parser.add_argument("--tokenizer", help="tokenizer folder or file (default: the run's, or the folder's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args(argv)
    in_range(args, "max_tokens", 2, 10**12)
    setup_logging()
    model = load_model(args.path, pick_device(args.device), args.tokenizer)
    if model.tokenizer is None and args.text:
        raise UserError(f"{args.path}", "its run recorded no tokenizer that still exists", "pass --tokenizer")
    if model.tokenizer is None:
        logger.warning(f"the tokenizer of {args.path} is unknown: whether it made the data is not checked")
    elif args.data:
        check_tokenizer_matches(args.data, model.tokenizer)
    results = [_evaluate(model, given, args) for given in args.data or args.text]
    for result in results if len(results) == 1 else [*results, _together(results)]:
        print(json.dumps(result | {"perplexity": math.exp(result["loss"])}))


def _evaluate(model: Model, given: str, args: argparse.Namespace) -> dict[str, Any]:
    num_bytes = 0
    if args.data and mask_path(given).exists():
        (loss, count), answers = chat_loss(model, given, args.max_tokens)
        return _result(given, model.step, count, loss, answers=answers)
    if args.data:
        ids = tokens_of(given, args.max_tokens)
    else:
        assert model.tokenizer is not None
        ids, num_bytes = encode_text(model.tokenizer, expand_inputs([given], "--text"), args.key, args.max_tokens)
    loss, count = mean_loss(model, ids)
    return _result(given, model.step, count, loss, num_bytes)


def _together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Weigh each source by its tokens."""
    loss, count = _mean([(r["loss"], r["tokens"]) for r in results])
    answers = _mean([(r["answer_loss"], r["answer_tokens"]) for r in results if "answer_loss" in r])
    return _result("all", results[0]["step"], count, loss, sum(r.get("bytes", 0) for r in results), answers)


def _mean(parts: list[tuple[float, int]]) -> tuple[float, int]:
    """Join means over numbers of tokens."""
    count = sum(n for _, n in parts)
    return sum(mean * n for mean, n in parts) / max(count, 1), count


def _result(
    source: str, step: int | None, count: int, loss: float, num_bytes: int = 0, answers: tuple[float, int] = (0.0, 0)
) -> dict[str, Any]:
    result = {"source": source, "step": step, "tokens": count, "loss": loss}
    if answers[1]:
        result |= {"answer_tokens": answers[1], "answer_loss": answers[0]}
    if num_bytes:
        result |= {"bytes": num_bytes, "bits_per_byte": loss * count / num_bytes / math.log(2)}
    return result


if __name__ == "__main__":
    run_tool(main)
