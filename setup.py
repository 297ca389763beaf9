"""The optional compiled parts; all other package metadata is in pyproject.toml.

The kernels require torch at build time, so pip's build isolation skips them: `pip install --no-build-isolation -e .`,
or afterwards `python setup.py build_ext --inplace`. Without a compiler, torch or nvcc the install continues and reports
what is missing; `python -m megalite.ops` shows which kernels are available.

MEGALITE_CUDA = auto (default: build if nvcc is found) | 0 (never) | 1 (fail without nvcc).
MEGALITE_CUDA_ARCHS = "80;90;100;120": architectures of the CUDA library; PTX of the last for newer cards.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
# torch's stable ABI of 2.10: one binary for every later torch and every Python.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# Never -ffast-math: gcc < 13 would set flush-to-zero for the whole process. No contraction: the same bits on every CPU.
CXX_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
CXX_FLAGS += ["-ffp-contract=off"]
NVCC_FLAGS = ["-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-DUSE_CUDA", "-lineinfo", STABLE_ABI]
NVCC_FLAGS += ["-Xfatbin", "-compress-all"]
# Symbols the CUDA library takes from libtorch_cuda.so, which a CPU build of torch does not have.
CUDA_SYMBOLS = ("aoti_torch_get_current_cuda_stream", "torch_c10_cuda_check_msg", "torch_c10_cuda_free_error_msg")


def say(message: str) -> None:
    print(f"megalite: {message}", file=sys.stderr)


def torch_dir() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def extensions() -> list[Extension]:
    """List what can be built here; log a line to stderr for what cannot."""
    cuda = os.environ.get("MEGALITE_CUDA", "auto")
    if cuda not in ("auto", "0", "1"):
        sys.exit(f"error: MEGALITE_CUDA={cuda}: must be auto, 0 or 1; unset it for auto")
    nvcc = find_nvcc()
    if cuda == "1" and (nvcc is None or torch_dir() is None):
        missing = "nvcc on PATH or under CUDA_HOME" if nvcc is None else "torch at build time (--no-build-isolation)"
        sys.exit(f"error: MEGALITE_CUDA=1: requires {missing}; provide it, or set MEGALITE_CUDA=auto")
    found = [Extension("megalite.data._blend", ["csrc/data/blend.cpp"], optional=True)]
    if torch_dir() is None:
        say("native kernels skipped: torch cannot be imported by the build (use --no-build-isolation)")
        return found
    cpu_sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "cpu").glob("*.cpp"))
    found.append(Extension("megalite.ops._native_cpu", cpu_sources, optional=True))
    if cuda == "0" or nvcc is None:
        say(f"CUDA kernels skipped: {'MEGALITE_CUDA=0' if cuda == '0' else 'no nvcc'}")
    else:
        say(f"CUDA kernels: building with {nvcc}")
        found.append(Extension("megalite.ops._native_cuda", ["csrc/cuda/library.cu"], optional=cuda == "auto"))
    return found


class BuildNative(build_ext):
    """Calls the compilers directly: no source needs Python's headers, and torch's CUDAExtension wants CUDA torch."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if ext.name.endswith("_cuda"):
                self.build_cuda(ext.sources, target)
            else:
                on_torch = ext.name.endswith("_cpu")
                flags = [*CXX_FLAGS, STABLE_ABI] if on_torch else CXX_FLAGS
                self.compile([os.environ.get("CXX", "g++"), *flags], ext.sources, target, [], on_torch)
        except (OSError, subprocess.CalledProcessError) as e:
            if not ext.optional:
                raise
            say(f"{ext.name} not built, the install continues without it: {e}")

    def build_cuda(self, sources: list[str], target: Path) -> None:
        archs = os.environ.get("MEGALITE_CUDA_ARCHS", "80;90;100;120").split(";")
        codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
        codes.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        nvcc = find_nvcc()
        assert nvcc is not None
        with tempfile.TemporaryDirectory() as tmp:
            # With CPU torch the linker would record no libtorch_cuda.so, and loading on a CUDA torch would fail.
            stub, source = Path(tmp) / "libtorch_cuda.so", Path(tmp) / "stub.c"
            source.write_text("".join(f"void {name}(void) {{}}\n" for name in CUDA_SYMBOLS))
            cc = os.environ.get("CC", "gcc")
            subprocess.run([cc, "-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", source, "-o", stub], check=True)
            link = [f"-L{tmp}", "-ltorch_cuda", "-cudart", "static", "-lpthread", "-ldl", "-lrt"]
            self.compile([nvcc, *NVCC_FLAGS, *codes], sources, target, link)

    def compile(
        self, command: list[str], sources: list[str], target: Path, link: list[str], on_torch: bool = True
    ) -> None:
        torch = torch_dir()
        paths = [f"-I{torch}/include", f"-L{torch}/lib"] if on_torch else []
        libraries = [*link, "-ltorch", "-ltorch_cpu", "-lc10"] if on_torch else link
        # An interrupted compiler must not leave half a library where the package looks for it.
        part = target.with_suffix(".part")
        subprocess.run([*command, *paths, "-shared", *sources, "-o", part, *libraries], check=True, cwd=ROOT)
        part.replace(target)


class StableWheel(bdist_wheel):
    """The libraries bind to torch's stable ABI and to no Python: one wheel for all of them."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return "py3", "none", platform


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative, "bdist_wheel": StableWheel})
