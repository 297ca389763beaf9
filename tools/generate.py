"""Generate text with a trained model: `python tools/generate.py RUN_DIR --prompt "def "`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megalite.dist.device import pick_device
from megalite.errors import ToolParser, UserError, in_range, printable, run_tool
from megalite.train.inference import generate, load_model


def main(argv: Sequence[str] | None = None) -> None:
    parser = ToolParser(description=__doc__)
    parser.add_argument("path", type=Path, help="run directory, a checkpoint in it, or a Hugging Face folder")
    parser.add_argument("--prompt", default="", help="text to continue (default: start of a document)")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="most tokens to generate (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="sample from the k most likely, 0 = all (default 50)")
    top_p = "sample from the most likely that have this probability together (default 1: all)"
    parser.add_argument("--top-p", type=float, default=1.0, help=top_p)
    parser.add_argument("--num-samples", type=int, default=1, help="texts to generate (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text; the n-th sample has seed + n - 1")
    parser.add_argument("--tokenizer", help="tokenizer folder or file (default: the run's, or the folder's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args(argv)
    in_range(args, "max_new_tokens num_samples", 1, 10**6)
    in_range(args, "temperature", 0, 10**6)
    in_range(args, "top_k", 0, 2**31)
    in_range(args, "seed", 0, 2**63 - 10**6)
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p {args.top_p}", "must be more than 0 and at most 1", "give 0.9, for example")
    model = load_model(args.path, pick_device(args.device), args.tokenizer)
    if model.tokenizer is None:
        raise UserError(f"{args.path}", "its run recorded no tokenizer that still exists", "pass --tokenizer")
    eos = model.tokenizer.eos_id
    prompt = model.tokenizer.encode(args.prompt) or [eos if eos is not None else 0]
    if max(prompt) >= model.cfg.vocab:
        rule = f"its token id {max(prompt)} is outside the model's vocabulary of {model.cfg.vocab}"
        raise UserError(f"--prompt {args.prompt!r}", rule, "use the tokenizer that the model was trained with")
    for number in range(args.num_samples):
        seed = args.seed + number
        new = generate(model, prompt, args.max_new_tokens, args.temperature, args.top_k, seed, args.top_p, eos)
        if args.num_samples > 1:
            print(f"--- sample {number + 1}, seed {seed}")
        print(args.prompt + printable(model.tokenizer.decode(new), keep="\n\r"))


if __name__ == "__main__":
    run_tool(main)
