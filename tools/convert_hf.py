"""Convert Hugging Face models to megalite checkpoints and back: one process, no GPU, tensor by tensor."""

from megalite.checkpoint.hf.convert import export_hf, import_hf
from megalite.errors import ToolParser, run_tool
from megalite.log import setup_logging


def main() -> None:
    parser = ToolParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    text = "make a checkpoint (weights only) that training can start from in any layout"
    into = commands.add_parser("import", help=text, description=text)
    into.add_argument("--hf", required=True, metavar="DIR", help="folder with config.json and *.safetensors")
    into.add_argument("--out", required=True, metavar="CKPT", help="checkpoint folder to create")
    text = "write a model folder for transformers 4.57 and later, vLLM and llama.cpp"
    out = commands.add_parser("export", help=text, description=text)
    out.add_argument(
        "--checkpoint", required=True, metavar="CKPT", help="checkpoint folder, or a run directory (its newest)"
    )
    out.add_argument("--out", required=True, metavar="DIR", help="folder to create")
    out.add_argument("--dtype", metavar="T", help="fp32, bf16 or fp16 (default: that of training or import)")
    out.add_argument("--tokenizer", metavar="T", help="tokenizer folder or file (default: the run's)")
    args = parser.parse_args()
    setup_logging()
    if args.command == "import":
        manifest = import_hf(args.hf, args.out)
        tensors = manifest.tensors["master"].values()
        count = sum(t.shape[0] * (t.shape[1] if len(t.shape) > 1 else 1) for t in tensors)
        print(f"{args.out}: {len(tensors)} tensors, {count:,} parameters")
    else:
        config = export_hf(args.checkpoint, args.out, args.dtype, args.tokenizer)
        print(f"{args.out}: {config['architectures'][0]}, {config['dtype']}")


if __name__ == "__main__":
    run_tool(main)
