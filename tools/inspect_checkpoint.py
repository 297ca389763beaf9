"""What a checkpoint holds, and whether every byte of it is as it was written."""

import argparse

from megalite.checkpoint.describe import describe
from megalite.errors import run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint folder, or a run directory (its newest)")
    parser.add_argument("--verify", action="store_true", help="read everything and check every checksum")
    parser.add_argument("--tensors", action="store_true", help="list every tensor and where its parts lie")
    args = parser.parse_args()
    for line in describe(args.checkpoint, args.tensors, args.verify):
        print(line)


if __name__ == "__main__":
    run_tool(main)
