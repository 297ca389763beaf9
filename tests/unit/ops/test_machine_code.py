"""The AOT gate: machine code of every kernel for sm_80, sm_90, sm_100, and the CUDA library's dynamic symbols."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton", reason="triton is not installed (its cuobjdump reads the machine code)")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def aot() -> ModuleType:
    spec = importlib.util.spec_from_file_location("aot", ROOT / "benchmarks" / "aot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["aot"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is taken from, or left in, the user's Triton cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.full
@pytest.mark.parametrize(("arch", "part"), [(80, 0), (90, 0), (90, 1), (100, 0)])
def test_every_triton_kernel_passes_the_gate(aot: ModuleType, arch: int, part: int) -> None:
    """In every shape for Hopper; for the others, a kernel in the one that may take most registers."""
    cases = [case for case in aot.triton_cases() if arch in case.archs]
    if arch != 90:
        cases = list({case.kernel.__name__: case for case in sorted(cases, key=lambda c: c.limit.registers)}.values())
    assert len(cases) >= 20
    cases = cases[part::2] if arch == 90 else cases
    broken = [line for case in cases for line in aot.breaches(aot.compile_triton(case, arch), case.limit)]
    assert broken == []


def test_every_triton_kernel_has_a_case(aot: ModuleType) -> None:
    from megalite.core.parts.kernels import triton

    modules = [importlib.import_module(f"{triton.__name__}.{m.name}") for m in pkgutil.iter_modules(triton.__path__)]
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert kernels == {case.kernel.__name__ for case in aot.triton_cases()}


def test_gate_catches_a_triton_kernel_that_spills(aot: ModuleType) -> None:
    """16384 columns in 4 warps are 128 elements per thread: they cannot stay in registers."""
    import dataclasses

    case = next(c for c in aot.triton_cases() if c.name == "add_rmsnorm_backward")
    spoiler = dataclasses.replace(case, constants={**case.constants, "BLOCK": 16384}, num_warps=4)
    code = aot.compile_triton(spoiler, 90)
    assert code.spills > 100
    assert any("spill instructions" in line for line in aot.breaches(code, case.limit))


def test_gate_catches_a_triton_kernel_of_too_many_registers(aot: ModuleType) -> None:
    import dataclasses

    case = next(c for c in aot.triton_cases() if c.name == "add_rmsnorm_backward")
    code = aot.compile_triton(dataclasses.replace(case, num_warps=4), 90)
    assert any("registers, cap" in line for line in aot.breaches(code, case.limit))


def test_gate_catches_an_instruction_that_is_absent(aot: ModuleType) -> None:
    """FP8 codes come from the GPU's own conversion, two or four at a time."""
    import dataclasses

    case = next(c for c in aot.triton_cases() if c.name == "fp8_cast_rows")
    assert aot.compile_triton(case, 90).absent == ""
    other = dataclasses.replace(case, instruction="F2FP.SATFINITE.E5M2")
    assert any("no F2FP.SATFINITE.E5M2" in line for line in aot.breaches(aot.compile_triton(other, 90), case.limit))


def test_the_fp8_product_runs_on_tensor_cores(aot: ModuleType) -> None:
    """With the FP8 instruction of its GPU, which a product of widened codes has not."""
    import dataclasses

    for arch, instruction in ((90, "QGMMA"), (100, "UTCQMMA")):
        case = next(c for c in aot.triton_cases() if c.name == f"fp8_product_128_sm_{arch}")
        assert case.instruction == instruction
    wide = dataclasses.replace(case, constants={**case.constants, "WIDEN": True, "SIDE": 64})
    assert aot.compile_triton(wide, arch).absent == instruction


def test_gate_catches_narrow_loads(aot: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 columns over 128 threads: no thread has 8 adjacent elements to load at once."""
    case = next(c for c in aot.triton_cases() if c.name == "glu_silu")
    monkeypatch.setitem(case.constants, "BLOCK", 64)
    lines = aot.breaches(aot.compile_triton(case, 90), case.limit)
    assert any("128-bit loads, required" in line for line in lines)


def _nvcc() -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    return nvcc


@pytest.fixture(scope="module")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as setup.py builds it."""
    _nvcc()
    tmp = tmp_path_factory.mktemp("cuda")
    env = {
        **os.environ,
        "MEGALITE_CUDA": "1",
        "MEGALITE_CUDA_ARCHS": "80;90;100",
        "CXX": "/nonexistent/g++",
    }  # not the CPU library
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp), "--build-temp", str(tmp / "t")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tmp / "megalite/core/parts/kernels/_native_cuda.so"


@pytest.mark.full
def test_every_cuda_kernel_passes_the_gate(aot: ModuleType, cuda_library: Path) -> None:
    checked = aot.read_cuda(cuda_library)
    assert {code.arch for code, _ in checked} == {80, 90, 100}
    assert {code.kernel.split("<")[0].split("(")[0] for code, _ in checked} == {
        "adamw_kernel",
        "direction_kernel",
        "apply_kernel",
        "sum_squares_kernel",
        "finish_kernel",
    }
    assert [line for code, limit in checked for line in aot.breaches(code, limit)] == []


_SPOILER = """
__global__ void adamw_kernel_spoiler(float* x, int n) {
  float kept[512];
  for (int i = 0; i < 512; ++i) kept[i] = x[i * n];
  for (int i = 0; i < n; ++i) x[i] = kept[(i * 7919 + n) & 511] + kept[(i ^ n) & 511];
}
"""


def test_gate_catches_a_cuda_kernel_that_spills(aot: ModuleType, tmp_path: Path) -> None:
    source, cubin = tmp_path / "spoiler.cu", tmp_path / "spoiler.cubin"
    source.write_text(_SPOILER)
    subprocess.run([_nvcc(), "-cubin", "-arch=sm_90", source, "-o", cubin], check=True)
    ((arch, _, registers, opcodes),) = aot.disassemble(cubin)
    code = aot.to_code("spoiler", arch, registers, opcodes)
    assert code.spills > 0
    assert any("spill instructions" in line for line in aot.breaches(code, aot.Limit(255, 0, 9999)))


@pytest.mark.full
def test_cuda_library_needs_no_torch_and_its_entry_points_fit(cuda_library: Path) -> None:
    from megalite.core.parts.kernels import cuda
    from megalite.core.parts.kernels.entry import load_entries

    assert set(load_entries(cuda_library, cuda._SIGNATURES)) == set(cuda._SIGNATURES)
    if shutil.which("readelf") is None or shutil.which("nm") is None:
        pytest.skip("no binutils")
    dynamic = subprocess.run(["readelf", "-d", cuda_library], check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", dynamic))
    # cudart is linked in: the library may not depend on which CUDA runtime torch brings.
    assert not any(re.search("torch|c10|cudart|python", name) for name in needed)
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    symbols = subprocess.run(["nm", "-D", cuda_library], check=True, capture_output=True, text=True).stdout
    assert not re.search(r" U (_?Py|aoti_|torch_|_ZN?K?(2at|3c10|5torch))", symbols)
