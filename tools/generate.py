"""Generate text with a trained model: `python tools/generate.py RUN_DIR --prompt "def "`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalite.dist.context import pick_device
from megalite.errors import UserError, run_tool
from megalite.train.inference import generate, load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="run directory, or a checkpoint in it")
    parser.add_argument("--prompt", default="", help="text to continue (default: start of a document)")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="most tokens to generate (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="sample from the k most likely, 0 = all (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    parser.add_argument("--tokenizer", help="tokenizer folder or file (default: the run's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    if args.temperature < 0 or args.top_k < 0 or args.max_new_tokens < 1:
        given = f"--temperature {args.temperature} --top-k {args.top_k} --max-new-tokens {args.max_new_tokens}"
        raise UserError(given, "must not be negative, and at least one token must be generated", "change the value")
    model = load_model(args.path, pick_device(args.device), args.tokenizer)
    if model.tokenizer is None:
        raise UserError(f"{args.path}", "its run recorded no tokenizer that still exists", "pass --tokenizer")
    eos = model.tokenizer.eos_id
    prompt = model.tokenizer.encode(args.prompt) or [eos if eos is not None else 0]
    new = generate(model, prompt, args.max_new_tokens, args.temperature, args.top_k, args.seed, eos)
    print(args.prompt + model.tokenizer.decode(new))


if __name__ == "__main__":
    run_tool(main)
