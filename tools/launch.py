#!/usr/bin/env python
"""torchrun on every host of a hostfile: python tools/launch.py --help"""

from megalite.errors import run_tool
from megalite.launch.cli import main

if __name__ == "__main__":
    run_tool(main)
