"""exp of the C++ kernels (csrc/cpu/exp.h) against float64, over bit patterns of every exponent."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
SOURCE = """
#include "exp.h"
extern "C" void run(const float* x, float* y, long n) {
  for (long i = 0; i < n; ++i) y[i] = megalite::exp_f32(x[i]);
}
"""


def test_exp_is_within_an_ulp_and_right_at_the_edges(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    source, library = tmp_path / "run.cpp", tmp_path / "run.so"
    source.write_text(SOURCE)
    flags = ["-std=c++20", "-O3", "-fno-trapping-math", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, f"-I{ROOT / 'csrc/cpu'}", source, "-o", library], check=True)
    edges = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 88.72283, 88.72284, -103.97, -103.98], dtype=np.float32)
    x = np.concatenate([np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32).view(np.float32), edges])
    y = np.empty_like(x)
    run = ctypes.CDLL(str(library)).run
    run.argtypes = [np.ctypeslib.ndpointer(np.float32), np.ctypeslib.ndpointer(np.float32), ctypes.c_long]
    run(x, y, len(x))
    with np.errstate(all="ignore"):
        exact = np.exp(x.astype(np.float64))
        rounded = exact.astype(np.float32)
    assert np.array_equal(np.isnan(y), np.isnan(x))
    finite = np.isfinite(rounded)
    assert (y[~finite & ~np.isnan(x)] == np.inf).all()
    assert (y[rounded == 0] == 0).all()
    # Spacing of denormals too: the smallest results are as exact as any.
    ulps = np.abs(y[finite] - exact[finite]) / np.spacing(rounded[finite]).astype(np.float64)
    assert ulps.max() <= 1.0
