#!/usr/bin/env python
"""Is this cluster fit for a run? torchrun --nproc-per-node 8 tools/cluster_check.py --help"""

import os

from megalite.diagnose.cluster import main
from megalite.errors import run_tool

if __name__ == "__main__":
    run_tool(lambda: main(os.environ))
