"""`megalite generate`, `megalite evaluate` and `megalite lm-eval`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megalite.core.base.errors import UserError, in_range, printable
from megalite.core.base.log import logger, setup_logging
from megalite.extras.tool import ToolParser
from megalite.runtime.data import check_tokenizer_matches

_LM_EVAL = """Run tasks of EleutherAI's lm-eval on a run or an export, in the run's layout and without conversion.

    torchrun --nproc-per-node 4 -m megalite lm-eval runs/small --tasks arc_easy hellaswag
    megalite lm-eval runs/small --tp 1 --pp 1 --tasks mine --include-path tasks

Requires pip install 'megalite[lm-eval]'. The tasks' data are downloaded unless they are local files.
"""

_DEVICE = "auto: a GPU, if there is one (default auto)"
_SEED = "same seed, same text; the n-th sample has seed + n - 1 (default 0)"


def _generate_parser() -> ToolParser:
    parser = ToolParser(prog="megalite generate", description="Generate text with a trained model.")
    parser.add_argument("path", type=Path, help="run directory, a checkpoint in it, or a Hugging Face folder")
    parser.add_argument("--prompt", default="", help="text to continue (default: begin a document)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=100, help="maximum number of tokens to generate (default 100)"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default 0.8)")
    parser.add_argument(
        "--top-k", type=int, default=50, help="sample from the k most likely tokens; 0: all (default 50)"
    )
    top_p = "sample from the most likely tokens that together have this probability (default 1: all)"
    parser.add_argument("--top-p", type=float, default=1.0, help=top_p)
    parser.add_argument("--num-samples", type=int, default=1, help="texts to generate (default 1)")
    parser.add_argument("--seed", type=int, default=0, help=_SEED)
    parser.add_argument("--tokenizer", help="tokenizer folder or file (default: the run's, or the folder's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help=_DEVICE)
    chat = "talk: each line of input is a turn, answered as the chat template has it; --prompt is the only turn"
    parser.add_argument("--chat", action="store_true", help=chat)
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system turn")
    template = "with --chat: see megalite preprocess (default: that of the training, or of the tokenizer's folder)"
    parser.add_argument("--chat-template", metavar="NAME|FILE", help=template)
    return parser


def _checked(argv: Sequence[str]) -> argparse.Namespace:
    args = _generate_parser().parse_args(argv)
    in_range(args, "max_new_tokens num_samples", 1, 10**6)
    in_range(args, "temperature", 0, 10**6)
    in_range(args, "top_k", 0, 2**31)
    in_range(args, "seed", 0, 2**63 - 10**6)
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p {args.top_p}", "must be more than 0 and at most 1", "give 0.9, for example")
    if not args.chat and (args.system or args.chat_template):
        given = "--system" if args.system else "--chat-template"
        raise UserError(given, "applies to conversations", "add --chat, or drop it")
    if args.chat and args.num_samples != 1:
        raise UserError(f"--num-samples {args.num_samples}", "a conversation has one answer per turn", "drop it")
    return args


def generate(argv: Sequence[str]) -> None:
    """Print texts that a model generates, or its part of a conversation."""
    args = _checked(argv)
    # What follows imports torch.
    from megalite.core.mesh.device import pick_device
    from megalite.extras.inference.generate import generate as continuation
    from megalite.extras.inference.load import load_model

    model = load_model(args.path, pick_device(args.device), args.tokenizer)
    if model.tokenizer is None:
        raise UserError(f"{args.path}", "records no tokenizer that still exists", "pass --tokenizer")
    if args.chat:
        from megalite.extras.inference.conversation import begin, talk
        from megalite.extras.inference.generate import Sampling

        sampling = Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p)
        talk(begin(model, args.chat_template, args.system, sampling, args.seed), args.prompt)
        return
    eos = model.tokenizer.eos_id
    prompt = model.tokenizer.encode(args.prompt) or [eos if eos is not None else 0]
    if max(prompt) >= model.cfg.vocab:
        rule = f"its token id {max(prompt)} is outside the model's vocabulary of {model.cfg.vocab}"
        raise UserError(f"--prompt {args.prompt!r}", rule, "use the tokenizer that the model was trained with")
    for number in range(args.num_samples):
        seed = args.seed + number
        new = continuation(model, prompt, args.max_new_tokens, args.temperature, args.top_k, seed, args.top_p, eos)
        if args.num_samples > 1:
            print(f"--- sample {number + 1}, seed {seed}")
        print(args.prompt + printable(model.tokenizer.decode(new), keep="\n\r"))


def evaluate(argv: Sequence[str]) -> None:
    """Print a JSON line for each source, and one for all sources if there are several."""
    parser = ToolParser(prog="megalite evaluate", description="Compute loss and perplexity of a model on data or text.")
    parser.add_argument("path", type=Path, help="run directory, a checkpoint in it, or a Hugging Face folder")
    source = parser.add_mutually_exclusive_group(required=True)
    tokens = "tokens: PREFIX.bin and PREFIX.idx; of chat data also the loss per token of the answers"
    source.add_argument("--data", metavar="PREFIX", nargs="+", help=tokens)
    texts = "text files, folders or globs, as for megalite preprocess; also gives bits per byte"
    source.add_argument("--text", metavar="PATH", nargs="+", help=texts)
    tasks = "tasks in the form of lm-eval's YAML files, with local data, as --eval-tasks of megalite train evaluates"
    source.add_argument("--eval-tasks", metavar="FILE", nargs="+", help=tasks)
    limit = "with --eval-tasks: evaluate the first N documents of each (default: all)"
    parser.add_argument("--eval-limit", type=int, metavar="N", default=0, help=limit)
    parser.add_argument("--key", default="text", help="JSON key or parquet column of the text (default: text)")
    parser.add_argument("--max-tokens", type=int, default=1_000_000, help="most tokens of a source (default 1,000,000)")
    parser.add_argument("--tokenizer", help="tokenizer folder or file (default: the run's, or the folder's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help=_DEVICE)
    args = parser.parse_args(argv)
    in_range(args, "max_tokens", 2, 10**12)
    in_range(args, "eval_limit", 0, 10**12)
    if args.eval_limit and not args.eval_tasks:
        rule, remedy = "bounds tasks, and there are none", "give --eval-tasks FILE, or drop it"
        raise UserError(f"--eval-limit {args.eval_limit}", rule, remedy)
    setup_logging()
    # What follows imports torch.
    from megalite.core.mesh.device import pick_device
    from megalite.extras.inference.evaluate import evaluate_data, evaluate_text, together
    from megalite.extras.inference.load import load_model

    model = load_model(args.path, pick_device(args.device), args.tokenizer)
    if model.tokenizer is None and (args.text or args.eval_tasks):
        raise UserError(f"{args.path}", "records no tokenizer that still exists", "pass --tokenizer")
    if model.tokenizer is None:
        logger.warning(f"the tokenizer of {args.path} is unknown: whether it made the data is not checked")
    elif args.data:
        check_tokenizer_matches(args.data, model.tokenizer)
    if args.eval_tasks:
        from megalite.extras.tasks.of_checkpoint import evaluate_tasks

        results = [evaluate_tasks(model, args.eval_tasks, args.eval_limit)]
    elif args.data:
        results = [evaluate_data(model, prefix, args.max_tokens) for prefix in args.data]
    else:
        results = [evaluate_text(model, path, args.key, args.max_tokens) for path in args.text]
    for result in results if len(results) == 1 else [*results, together(results)]:
        print(json.dumps(result))


def lm_eval(argv: Sequence[str]) -> None:
    """Print lm-eval's table of results on rank 0."""
    parser = lm_eval_parser()
    if {"-h", "--help"} & set(argv):
        parser.print_help()
        return
    from megalite.extras.inference.lm_eval import run_tasks  # with torch
    from megalite.runtime.start.exit import leaving_together

    with leaving_together():
        run_tasks(parser.parse_args(argv))


def lm_eval_parser() -> ToolParser:
    """Make the parser of `megalite lm-eval`."""
    parser = ToolParser(
        prog="megalite lm-eval", description=_LM_EVAL, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="run directory, a checkpoint in it, or a Hugging Face folder")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="TASK", help="names or patterns of tasks")
    parser.add_argument("--include-path", metavar="DIR", help="folder with task files (*.yaml) of your own")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples per question (default: the task's)")
    parser.add_argument("--limit", type=int, metavar="N", help="use the first N documents of each task only")
    parser.add_argument("--tp", type=int, help="tensor-parallel size (default: the run's)")
    parser.add_argument("--pp", type=int, help="pipeline-parallel size (default: the run's)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="default: the run's; fp32 for a folder")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows per pass and rank (default 8)")
    parser.add_argument("--max-length", type=int, metavar="N", help="most tokens of a row (default: the run's)")
    bos = "begin every context with the tokenizer's beginning of text, for models that were trained so (Llama)"
    parser.add_argument("--bos", action="store_true", help=bos)
    parser.add_argument("--seed", type=int, default=0, help="of sampled text (default 0)")
    parser.add_argument("--tokenizer", help="tokenizer folder or file (default: the run's, or the folder's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help=_DEVICE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    return parser
