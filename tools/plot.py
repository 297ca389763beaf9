#!/usr/bin/env python3
"""Loss, learning rate and gradient norm of runs as a picture: `plot.py --help`."""

from megalite.errors import run_tool
from megalite.train.plot import main

if __name__ == "__main__":
    run_tool(main)
