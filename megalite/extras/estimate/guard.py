"""A CUDA device that does nothing, for machines without one. Imports no torch: it must be installed before that."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from megalite.core.base.errors import UserError

_SOURCE = Path(__file__).with_name("guard.cpp")
# From here on (2.11 does not, 2.15 does) the autograd engine of a CUDA build asks the driver for a tensor's device.
_ASKS_FOR_A_DEVICE = (2, 14)


@lru_cache
def install_guard() -> None:
    """Let this process run backward passes on fake CUDA tensors; call it before torch is imported.

    A CUDA build of torch needs nothing where there is a GPU, nor below 2.14. Otherwise some C++ is compiled against
    torch's own headers (2 s), because it implements an internal interface, which changes between releases.

    Raises:
        UserError: there is no compiler, or it cannot compile torch's headers.
    """
    folder = _torch_folder()
    if _needs_none(folder):
        return
    if "torch" in sys.modules:
        raise RuntimeError("install_guard must be called before `import torch`")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise UserError("a CPU build of torch", "requires a C++ compiler to imitate a GPU", "install g++")
    library, links = folder / "lib", ("-ltorch_cpu", "-lc10")
    with tempfile.TemporaryDirectory() as build:
        out = Path(build, "guard.so")
        options = ["-O0", "-shared", "-fPIC", "-std=c++20", f"-I{folder / 'include'}", f"-L{library}"]
        command = [compiler, *options, f"-Wl,-rpath,{library}", str(_SOURCE), "-o", str(out), *links]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            why = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
            remedy = "use another compiler, or a CUDA build of torch, which needs no GPU for this"
            raise UserError(f"{compiler} {_SOURCE.name}", f"does not compile with this torch ({why})", remedy)
        ctypes.CDLL(str(out), mode=ctypes.RTLD_GLOBAL)


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _needs_none(folder: Path) -> bool:
    """Whether torch in this folder, by its version.py, is built with CUDA and asks for no device, or will find one."""
    spec = importlib.util.spec_from_file_location("_torch_version", folder / "version.py")
    assert spec is not None
    assert spec.loader is not None
    version = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(version)
    if version.cuda is None:
        return False
    asks = tuple(map(int, version.__version__.split(".")[:2])) >= _ASKS_FOR_A_DEVICE
    return not asks or _has_gpu()


def _has_gpu() -> bool:
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False
