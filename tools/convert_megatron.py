"""Convert Megatron-LM checkpoints (torch_dist, torch) to megalite: one process, no GPU, tensor by tensor."""

from megalite.checkpoint.megatron.convert import import_megatron
from megalite.errors import ToolParser, run_tool
from megalite.log import setup_logging


def main() -> None:
    parser = ToolParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    text = "make a checkpoint that training can resume from in any layout; pickles are read as data, never executed"
    into = commands.add_parser("import", help=text, description=text)
    into.add_argument("--megatron", required=True, metavar="DIR", help="what --save named, or a folder iter_* in it")
    into.add_argument("--out", required=True, metavar="CKPT", help="checkpoint folder to create")
    into.add_argument("--iteration", type=int, metavar="N", help="which one (default: the one of the tracker file)")
    text = "rows of the vocabulary to keep (default: all, with the padding that Megatron-LM trains with)"
    into.add_argument("--vocab-size", type=int, metavar="N", help=text)
    into.add_argument("--weights-only", action="store_true", help="leave the optimizer's state")
    args = parser.parse_args()
    setup_logging()
    manifest = import_megatron(args.megatron, args.out, args.iteration, args.vocab_size, args.weights_only)
    count = sum(t.shape[0] * (t.shape[1] if len(t.shape) > 1 else 1) for t in manifest.tensors["master"].values())
    kinds = ", ".join(manifest.tensors)
    print(f"{args.out}: iteration {manifest.step}, {count:,} parameters ({kinds})")


if __name__ == "__main__":
    run_tool(main)
