"""Compute loss and perplexity of a trained model: `python tools/evaluate.py RUN_DIR --data PREFIX` or `--text FILE`."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from megalite.dist.context import pick_device
from megalite.errors import UserError, run_tool
from megalite.train.inference import load_model, mean_loss, tokens_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="run directory, or a checkpoint in it")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="PREFIX", help="tokens: PREFIX.bin and PREFIX.idx")
    source.add_argument("--text", metavar="FILE", type=Path, help="a text file; also gives bits per byte")
    parser.add_argument("--max-tokens", type=int, default=1_000_000, help="most tokens to read (default 1,000,000)")
    parser.add_argument("--tokenizer", help="tokenizer folder or file for --text (default: the run's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    model = load_model(args.path, pick_device(args.device), args.tokenizer)
    num_bytes = None
    if args.data:
        ids = tokens_of(args.data, args.max_tokens)
    else:
        if model.tokenizer is None:
            raise UserError(f"{args.path}", "its run recorded no tokenizer that still exists", "pass --tokenizer")
        try:
            text = args.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"--text {args.text}", f"must be a readable UTF-8 file ({e})", "check the file") from None
        ids = np.array(model.tokenizer.encode(text), dtype=np.int64)[: args.max_tokens]
        num_bytes = len(model.tokenizer.decode(ids.tolist()).encode())
    loss, count = mean_loss(model, ids)
    result = {"step": model.step, "tokens": count, "loss": loss, "perplexity": math.exp(loss)}
    if num_bytes:
        result["bits_per_byte"] = loss * count / num_bytes / math.log(2)
    print(json.dumps(result))


if __name__ == "__main__":
    run_tool(main)
