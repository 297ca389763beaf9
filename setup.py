"""The optional compiled parts; all other package metadata is in pyproject.toml.

They are built without torch's headers: an ordinary `pip install .` has them, and a wheel serves every torch of its
Python. Without a compiler, headers of Python or pybind11, or nvcc the install continues and reports what is missing;
`python -m megalite.core.ops` shows which kernels are available.

MEGALITE_CUDA = auto (default: build if nvcc is found) | 0 (never) | 1 (fail without nvcc).
MEGALITE_CUDA_ARCHS = "80;90;100;120" (default, less those that this nvcc does not know): architectures of the CUDA
library; PTX of the last for newer cards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

try:
    import pybind11
except ImportError:  # not in a build environment that pip made
    pybind11 = None

OLD = int(setuptools.__version__.split(".")[0]) < 77
if OLD and "build_ext" not in sys.argv:
    sys.exit(f"error: setuptools {setuptools.__version__} is too old; pip install 'setuptools>=77'")

ROOT = Path(__file__).parent.resolve()
# Never -ffast-math: gcc < 13 would set flush-to-zero for the whole process. No contraction: the same bits on every CPU.
CXX_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
CXX_FLAGS += ["-ffp-contract=off", "-DNDEBUG"]
if sys.platform == "darwin":
    CXX_FLAGS += ["-undefined", "dynamic_lookup"]
# The CUDA runtime is linked in: the library may not depend on which one torch brings.
NVCC_FLAGS = ["-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-lineinfo", "-Xfatbin", "-compress-all"]
NVCC_FLAGS += ["-cudart", "static"]


USUAL_ARCHS = ("80", "90", "100", "120")


def say(message: str) -> None:
    print(f"megalite: {message}", file=sys.stderr)


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    if home:
        return shutil.which("nvcc", path=f"{home}/bin")
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def find_archs(nvcc: str) -> list[str]:
    """List the architectures asked for, or of the usual ones those that this nvcc knows (120 came with CUDA 12.8)."""
    if asked := os.environ.get("MEGALITE_CUDA_ARCHS"):
        return asked.split(";")
    known = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout.split()
    return [arch for arch in USUAL_ARCHS if f"compute_{arch}" in known]


def extensions() -> list[Extension]:
    """List what can be built here; log a line to stderr for what cannot."""
    cuda = os.environ.get("MEGALITE_CUDA", "auto")
    if cuda not in ("auto", "0", "1"):
        sys.exit(f"error: MEGALITE_CUDA={cuda}: must be auto, 0 or 1; unset it for auto")
    nvcc = find_nvcc()
    if cuda == "1" and nvcc is None:
        sys.exit(
            "error: MEGALITE_CUDA=1: requires nvcc on PATH or under CUDA_HOME; provide it, or set MEGALITE_CUDA=auto"
        )
    cpu_sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "cpu").glob("*.cpp"))
    found = [
        Extension("megalite.runtime.data._blend_rule", ["csrc/data/blend.cpp"], optional=True),
        Extension("megalite.core.parts.kernels._cpu_kernels", cpu_sources, optional=True),
    ]
    if cuda == "0" or nvcc is None:
        say(f"CUDA kernels skipped: {'MEGALITE_CUDA=0' if cuda == '0' else 'no nvcc'}")
    else:
        say(f"CUDA kernels: building with {nvcc}")
        found.append(
            Extension("megalite.core.parts.kernels._native_cuda", ["csrc/cuda/library.cu"], optional=cuda == "auto")
        )
    return found


def cxx() -> list[str]:
    """Return the command that compiles modules of this Python."""
    if pybind11 is None:
        raise FileNotFoundError("requires pybind11; `pip install pybind11`")
    includes = [f"-I{folder}" for folder in (pybind11.get_include(), sysconfig.get_path("include"))]
    return [os.environ.get("CXX", "g++"), *CXX_FLAGS, *includes]


def cuda_compiler() -> list[str]:
    """Return the command that compiles the CUDA library."""
    nvcc = find_nvcc()
    assert nvcc is not None
    archs = find_archs(nvcc)
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    codes.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    return [nvcc, *NVCC_FLAGS, *codes]


class BuildNative(build_ext):
    """Calls the compilers directly: setuptools knows no nvcc."""

    def get_ext_filename(self, fullname: str) -> str:
        # A library that Python does not import has no Python in its name.
        return fullname.replace(".", "/") + ".so" if fullname.endswith("_cuda") else super().get_ext_filename(fullname)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # An interrupted compiler must not leave half a library where the package looks for it.
        part = target.with_suffix(".part")
        try:
            command = cuda_compiler() if ext.name.endswith("_cuda") else cxx()
            subprocess.run([*command, "-shared", *ext.sources, "-o", part], check=True, cwd=ROOT)
        except (OSError, subprocess.CalledProcessError) as e:
            if not ext.optional:
                raise
            say(f"{ext.name} not built, the install continues without it: {e}")
        else:
            part.replace(target)


class WithoutMetadata(Distribution):
    """For build_ext with an old setuptools, which fails over the license in pyproject.toml. pip brings its own; images
    with torch 2.11 have 70, and the machine may have no network.
    """

    def parse_config_files(self, *args: object, **kwargs: object) -> None:
        """Read nothing."""


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildNative},
    distclass=WithoutMetadata if OLD else Distribution,
)
