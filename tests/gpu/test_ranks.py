"""Layouts on this host's GPUs, each equal to one CPU process: NCCL on all GPUs, and eight ranks that share them.

MEGALITE_TEST_DEVICE=cpu rehearses the latter where there is no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import ranks

DEVICE = os.environ.get("MEGALITE_TEST_DEVICE", "cuda")
ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("backend", ["nccl", "staged"])
def test_every_layout(backend: str, tmp_path: Path) -> None:
    world = 8
    if backend == "nccl":
        gpus = torch.cuda.device_count() if DEVICE == "cuda" else 0
        world = max((n for n in (2, 4, 8) if n <= gpus), default=0)
        if not world:
            pytest.skip("NCCL needs at least two GPUs")
    ranks.write_expected(tmp_path)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [sys.executable, *launch, "-m", "tests.gpu.ranks", str(tmp_path), backend]
    env = {**os.environ, "MEGALITE_TEST_DEVICE": DEVICE, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    # The first to fail; its peers follow.
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[done.stderr.find("Traceback") :][:4000]
    found = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(world)]
    assert len(found[0]) >= (len(ranks.ROWS) if world == 8 else 8)
    ranks.assert_equal(found, list(found[0]))
