#!/usr/bin/env python
"""Throughput and efficiency on 1, 2, 4, … ranks: python tools/scaling.py --help"""

from megalite.diagnose.scaling import main
from megalite.errors import run_tool

if __name__ == "__main__":
    run_tool(main)
