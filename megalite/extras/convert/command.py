"""`megalite convert`: checkpoints from and to Hugging Face, and from Megatron-LM."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from megalite.core.base.errors import UserError
from megalite.core.base.log import setup_logging
from megalite.extras.tool import ToolParser

_DESCRIPTION = """Convert Hugging Face models to megalite checkpoints and back, and Megatron-LM checkpoints (torch_dist,
torch) to megalite: one process, no GPU, tensor by tensor."""
_IMPORT = """Make a checkpoint that training can start from in any layout: weights alone from Hugging Face, and the
optimizer's state too from Megatron-LM, whose pickles are read as data and never executed."""
_EXPORT = "Write a model folder for transformers 4.57 and later, vLLM and llama.cpp."


def _parser() -> ToolParser:
    parser = ToolParser(prog="megalite convert", description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    into = commands.add_parser("import", help="make a checkpoint", description=_IMPORT)
    source = into.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", metavar="DIR", help="folder with config.json and *.safetensors")
    source.add_argument("--megatron", metavar="DIR", help="what --save named, or a folder iter_* in it")
    into.add_argument("--out", required=True, metavar="CKPT", help="checkpoint folder to create")
    megatron = into.add_argument_group("with --megatron")
    megatron.add_argument("--iteration", type=int, metavar="N", help="which one (default: the one of the tracker file)")
    text = "rows of the vocabulary to keep (default: all, with the padding that Megatron-LM trains with)"
    megatron.add_argument("--vocab-size", type=int, metavar="N", help=text)
    megatron.add_argument("--weights-only", action="store_true", help="leave out the optimizer's state")
    experts = into.add_argument_group("with --hf", "a dense model as one with experts, each a copy of its MLP")
    experts.add_argument("--num-experts", type=int, metavar="E", help="copies of each layer's MLP")
    experts.add_argument("--moe-topk", type=int, metavar="K", help="experts of each token (2)")
    experts.add_argument("--seed", type=int, metavar="N", help="seed of the new routers (1234)")
    out = commands.add_parser("export", help="write a Hugging Face folder", description=_EXPORT)
    text = "checkpoint folder, or a run directory (its newest)"
    out.add_argument("--checkpoint", required=True, metavar="CKPT", help=text)
    out.add_argument("--out", required=True, metavar="DIR", help="folder to create")
    out.add_argument("--dtype", metavar="T", help="fp32, bf16 or fp16 (default: that of training or import)")
    out.add_argument("--tokenizer", metavar="T", help="tokenizer folder or file (default: the run's)")
    return parser


def _check_import(args: argparse.Namespace) -> None:
    """Refuse flags of another source."""
    of_megatron, of_hf = ("iteration", "vocab_size", "weights_only"), ("num_experts", "moe_topk", "seed")
    other = "--megatron" if args.hf else "--hf"
    for name in of_megatron if args.hf else of_hf:
        if (value := getattr(args, name)) not in (None, False):
            given = f"--{name.replace('_', '-')}" + f" {value}" * (value is not True)
            raise UserError(given, f"applies to {other} only", "remove it")
    if args.num_experts is None and (args.moe_topk is not None or args.seed is not None):
        raise UserError("--moe-topk or --seed", "applies to a model that gets experts", "give --num-experts")


def main(argv: Sequence[str]) -> None:
    """Run `megalite convert`."""
    args = _parser().parse_args(argv)
    if args.command == "import":
        _check_import(args)
    setup_logging()
    # What follows imports torch.
    from megalite.extras.convert.hf import export_hf, import_hf
    from megalite.extras.convert.megatron.convert import import_megatron

    if args.command == "export":
        config = export_hf(args.checkpoint, args.out, args.dtype, args.tokenizer)
        print(f"{args.out}: {config['architectures'][0]}, {config['dtype']}")
        return
    if args.hf:
        given = {"topk": args.moe_topk, "seed": args.seed}
        more = {name: value for name, value in given.items() if value is not None}
        manifest = import_hf(args.hf, args.out, num_experts=args.num_experts, **more)
    else:
        manifest = import_megatron(args.megatron, args.out, args.iteration, args.vocab_size, args.weights_only)
    tensors = manifest.tensors["master"].values()
    count = sum(math.prod(t.shape) for t in tensors)
    if args.hf:
        print(f"{args.out}: {len(tensors)} tensors, {count:,} parameters")
    else:
        print(f"{args.out}: iteration {manifest.step}, {count:,} parameters ({', '.join(manifest.tensors)})")
