"""The C++ backend as an ordinary install has it, and Triton, through the contract file, each in its own process;
setup.py's behavior.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megalite.core.ops import resolve
from megalite.core.parts import kernels as parts_kernels
from megalite.core.parts.kernels import cpp, native
from tests.ops_contract import CONTRACT

ROOT = Path(__file__).parents[3]


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "CXX", "CUDA_HOME")}
    environment |= {"OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def build(tmp: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """`setup.py build_ext` into tmp, nothing into the checkout."""
    folders = ["--build-lib", str(tmp / "lib"), "--build-temp", str(tmp / "temp")]
    return run([sys.executable, "setup.py", "-q", "build_ext", *folders], **env)


def contract(backend: str, *options: str, **env: str) -> str:
    """Run the contract in a process of its own; its closing line."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *CONTRACT, *options]
    done = run(command, MEGALITE_TEST_BACKEND=backend, **env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an ordinary `pip install .` puts into site-packages: the wheel built in isolation (no torch), unpacked."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    tmp = tmp_path_factory.mktemp("wheel")
    # From a copy: setuptools builds in the folder of the sources.
    for name in ("csrc", "megalite"):
        shutil.copytree(ROOT / name, tmp / "source" / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, tmp / "source")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp), str(tmp / "source")]
    done = run(command, MEGALITE_CUDA="0")
    if done.returncode and "setuptools" in done.stderr:
        pytest.skip("no package index for pip's build isolation")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp.glob("*.whl")
    python = "cp{}{}".format(*sys.version_info[:2])
    assert re.fullmatch(rf"megalite-[\d.]+-{python}-{python}-linux_\w+\.whl", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp / "site")
    return tmp / "site"


@pytest.fixture(scope="module")
def cpp_library(request: pytest.FixtureRequest) -> Path:
    """The library of the wheel; without --full that of this environment, where it has one of today's sources."""
    own = PathFinder.find_spec("megalite.core.parts.kernels._cpu_kernels", list(parts_kernels.__path__))
    if own is not None and own.origin is not None and not request.config.getoption("--full"):
        sources = [path.stat().st_mtime for path in (ROOT / "csrc").rglob("*") if path.is_file()]
        if max(sources) < Path(own.origin).stat().st_mtime:
            return Path(own.origin)
    (library,) = (request.getfixturevalue("site") / "megalite/core/parts/kernels").glob("_cpu_kernels.*.so")
    return library


@pytest.fixture(scope="module")
def kernels(cpp_library: Path) -> ModuleType:
    spec = PathFinder.find_spec("megalite.core.parts.kernels._cpu_kernels", [str(cpp_library.parent)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def passed(line: str) -> int:
    found = re.search(r"(\d+) passed", line)
    assert found is not None, line
    return int(found[1])


@pytest.mark.full
def test_cpp_keeps_the_contract(cpp_library: Path) -> None:
    line = contract("cpp", MEGALITE_TEST_NATIVE=str(cpp_library.parent))
    assert passed(line) >= 60


_INSTALLED = """
import os, re, sys, numpy, torch
from megalite.core.ops import __main__, resolve
print(__main__.__file__)
ops = resolve("auto", "cpu", torch.bfloat16)
sys.argv = ["ops", "--device", "cpu"]
__main__.main()

# Whose threads: of one runtime, which torch uses too.
torch.set_num_threads(3)
flat, threads = torch.from_numpy(numpy.ones(300_001, dtype=numpy.float32)), [len(os.listdir("/proc/self/task"))]
for run in (ops.l2_norm, torch.sqrt):
    run(flat)
    threads.append(len(os.listdir("/proc/self/task")))
print(threads[1] - threads[0], threads[2] - threads[1])
print(len(set(re.findall(r"/\\S*omp\\S*\\.so\\S*", open("/proc/self/maps").read()))))

def rows(dtype):
    # Every op over rows, forward and backward, on enough of them that three threads share the work.
    g.manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g).to(dtype).requires_grad_()
    x, residual, w, packed, heads = draw(700, 257), draw(700, 257), draw(257), draw(700, 514), draw(350, 2, 8, 34)
    cos, sin = torch.randn(2, 350, 17, generator=g)
    outputs = [
        ops.rmsnorm(x, w, 1e-5), *ops.add_rmsnorm(x, residual, w, 1e-5), ops.swiglu(packed), ops.geglu(packed, "none"),
        ops.geglu(packed, "tanh"), ops.rope(heads, cos, sin), *ops.rope_qkv(heads * 1, cos, sin, 4, 2),
    ]
    dy = [torch.randn(y.shape, generator=g).to(dtype) for y in outputs]
    outputs += torch.autograd.grad(outputs, (x, residual, w, packed, heads), dy)
    logits, target = draw(700, 257).detach(), torch.randint(257, (700,), generator=g)
    stats = ops.cross_entropy_stats(logits, target, 0)
    ops.cross_entropy_grad_(logits, target, 0, stats[:, 0] + stats[:, 1].log(), torch.ones(700))
    return hash(b"".join(t.detach().float().numpy().tobytes() for t in [*outputs, stats, logits]))

g = torch.Generator().manual_seed(0)
for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    g.manual_seed(0)
    p, grad, m, v = (torch.randn(300_001, generator=g) for _ in range(4))
    out = torch.empty(300_001, dtype=torch.bfloat16)
    ops.adamw(p, grad.bfloat16(), m, v.abs_(), out, lr=.1, beta1=.9, beta2=.95, eps=1e-8, weight_decay=.1, step=2,
              grad_multiplier=torch.tensor(.5))
    print(ops.l2_norm(p).item().hex(), hash(p.numpy().tobytes()), hash(out.view(torch.int16).numpy().tobytes()),
          rows(torch.float32), rows(torch.bfloat16))
try:
    ops.adamw(p[::2], grad, m, v, None, lr=.1, beta1=.9, beta2=.95, eps=1e-8, weight_decay=.1, step=2,
              grad_multiplier=None)
except ValueError as e:
    print(e)
print(torch.tensor(1e-40).mul(0.5).item() > 0)
"""


@pytest.mark.full
@pytest.mark.slow
def test_an_ordinary_install_has_the_kernels(site: Path, tmp_path: Path) -> None:
    """Also: same bits on any number of threads, which are torch's own; operands that do not fit are refused; denormal
    numbers still exist after loading (no fast-math)."""
    done = subprocess.run(
        [sys.executable, "-c", _INSTALLED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    where, *listing, started, runtimes, one, two, three, refused, denormals = done.stdout.splitlines()
    assert where == str(site / "megalite/core/ops/__main__.py")
    by_cpp = {line.split()[0] for line in listing if re.match(r"\w+ +cpp ", line)}
    assert by_cpp == {"rmsnorm", "rope", "glu", "cross_entropy", "adamw", "l2_norm"}
    assert started == "2 0"
    assert runtimes == "1"
    assert one == two == three
    assert "param must be contiguous" in refused
    assert denormals == "True"


@pytest.mark.parametrize("name", ["segment_norms", "l2_norm"])
def test_library_built_from_other_sources_is_refused_with_the_reason(
    cpp_library: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A function that was added, or took other arguments, when the library was built."""
    monkeypatch.setattr(parts_kernels, "__path__", [str(cpp_library.parent), *parts_kernels.__path__])
    monkeypatch.setattr(cpp, "NAMES", tuple(dict.fromkeys((*cpp.NAMES, name))))
    monkeypatch.setitem(native.KERNELS, name, ("(Tensor flat, Tensor offsets) -> Tensor", native.KERNELS[name][1]))
    # What is kept of the real library stays: it registers its kernels once per process.
    monkeypatch.setattr(native, "_why_not_loaded", native._why_not_loaded.__wrapped__)
    ops = resolve("auto", "cpu", torch.float32)
    assert {choice.backend for choice in ops.choices} <= {"torch", "onednn"}
    assert re.search(rf"no cpp: .*built from older sources, with\w* (another )?{name}\); `pip install`", ops.describe())


_X, _ROW, _TABLE, _HEADS = torch.ones(2, 8), torch.ones(8), torch.ones(2, 4), torch.ones(2, 1, 3, 8)
_IDS, _HYPER = torch.zeros(2, dtype=torch.int64), (0.1, 0.9, 0.95, 1e-8, 0.1, 1)


@pytest.mark.parametrize(
    ("name", "operands", "message"),
    [
        ("l2_norm", (_X.double(),), "flat must be fp32 or bf16 on the CPU, not torch.float64 on cpu"),
        ("l2_norm", (_X.to("meta"),), "dense tensors on the CPU, not torch.float32 on meta"),
        ("l2_norm", (_X.t(),), "flat must be contiguous"),
        ("norm", (_X, None, _ROW, _ROW, 1e-5), "LayerNorm has no"),
        ("norm", (_X, None, _ROW[:7], None, 1e-5), "weight has 7 elements of torch.float32 on cpu, must have 8 of"),
        ("norm", (_X, _X.bfloat16(), _ROW, None, 1e-5), "residual has .* of torch.bfloat16 on cpu, must have 16 of"),
        ("norm", (torch.tensor(1.0), None, _ROW, None, 1e-5), "x must have a dimension"),
        ("norm_backward", (_X, None, _X, _ROW, None, _ROW, _ROW, None, False, False), "rstd has 8 .* must have 2 of"),
        ("norm_backward", (_X, None, _X, _ROW, None, _ROW[:2], _ROW[:7], None, False, False), "dweight has 7 elements"),
        ("glu", (_X[:, :7], 0), "gate_up of width 7 and activation 0: must have two halves"),
        ("glu", (_X, 3), "gate_up of width 8 and activation 3: must .* be 0, 1 or 2"),
        ("glu_backward", (_X, _X, 0), "dy has 16 elements"),
        ("rope_", (_HEADS.transpose(2, 3), _TABLE, _TABLE, 2), "qkv must have unit stride, not 8"),
        ("rope_", (_HEADS, _TABLE, _TABLE, 4), "qkv must have .* 4 heads or more, not 3"),
        ("rope_", (_X, _TABLE, _TABLE, 2), r"qkv must be \[positions, batch, heads, width\], not \[2, 8\]"),
        ("rope", (_HEADS, _TABLE[:1], _TABLE[:1], False), r"tables \[1, 4\] do not fit 2 positions of width 8"),
        ("rope", (_HEADS, _TABLE, _TABLE.double(), False), "sin has 8 elements of torch.float64"),
        ("rope_pack", (_HEADS, _HEADS[..., :4], _HEADS, _TABLE, _TABLE), "do not fit together"),
        ("rope_pack", (_HEADS, _HEADS, _HEADS.bfloat16(), _TABLE, _TABLE), "do not fit together"),
        ("cross_entropy_stats", (_X, _IDS, 0, 9), "valid columns 0 to 8, not 9"),
        ("cross_entropy_stats", (_X, _IDS.int(), 0, 8), "target has 2 elements of torch.int32 on cpu, must have 2 of"),
        ("cross_entropy_stats", (_ROW, _IDS, 0, 8), r"logits must be \[rows, columns\], not \[8\]"),
        ("cross_entropy_grad_", (_X, _IDS, 0, _ROW, _ROW[:2], 8), "lse has 8 elements"),
        ("adamw_", (_ROW, _ROW[:7], _ROW, _ROW, None, None, *_HYPER), "grad has 7 elements"),
        ("adamw_", (_ROW, _ROW.half(), _ROW, _ROW, None, None, *_HYPER), "grad must be fp32 or bf16 on the CPU"),
        ("adamw_", (_ROW, _ROW, _ROW.bfloat16(), _ROW, None, None, *_HYPER), "exp_avg has 8 elements of torch.bfloat"),
        ("adamw_", (_ROW, _ROW, _ROW, _ROW, None, _ROW, *_HYPER), "grad_multiplier has 8 .* must have 1 of"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    kernels: ModuleType, name: str, operands: tuple[Any, ...], message: str
) -> None:
    before = [t.clone() for t in (_X, _ROW, _TABLE, _HEADS)]
    with pytest.raises(ValueError, match=message):
        getattr(kernels, name)(*operands)
    assert all(torch.equal(t, was) for t, was in zip((_X, _ROW, _TABLE, _HEADS), before))


def test_arguments_of_another_kind_are_type_errors(kernels: ModuleType) -> None:
    for operands in ((_X.numpy(),), (None,), (_X, 1)):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            kernels.l2_norm(*operands)


def test_cpp_library_needs_no_torch(cpp_library: Path) -> None:
    """One wheel for every torch, and no OpenMP, whose copy could be another than torch's. Python is there already."""
    if shutil.which("readelf") is None:
        pytest.skip("no binutils")
    dynamic = subprocess.run(["readelf", "-d", cpp_library], check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(\w+)", dynamic))
    assert needed <= {"libstdc", "libm", "libgcc_s", "libc", "ld"}
    symbols = subprocess.run(["nm", "-D", cpp_library], check=True, capture_output=True, text=True).stdout
    assert not re.search(r" U (aoti_|torch_|GOMP|omp_|_ZN?K?(2at|3c10|5torch))", symbols)


@pytest.mark.full
@pytest.mark.parametrize(("tests", "least"), [("bfloat16", 2), ("not float16 and not 16384", 61)])
def test_triton_keeps_the_contract_under_its_interpreter(tests: str, least: int) -> None:
    """Its kernels compute in fp32 whichever 16 bits they read: one such type shows it. Of wide rows those of 12288 show
    most: they are no power of two.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    line = contract("triton", "-k", tests, TRITON_INTERPRET="1")
    assert passed(line) >= least


_NOTHING_BUILT = """
import torch, megalite
from megalite.runtime.data.blend import BlendOrder, compiled
from megalite.core.ops import resolve
print(megalite.__file__, compiled(), [BlendOrder([0.7, 0.3]).locate(i) for i in range(4)])
ops = resolve("auto", "cpu", torch.float32)
print({choice.backend for choice in ops.choices} <= {"torch", "onednn"}, ops.l2_norm(torch.ones(4)).item())
print("no cpp: it was not built; with g++ on PATH" in ops.describe())
"""


@pytest.mark.parametrize("missing", ["compiler", "pybind11"])
def test_install_without_a_compiler_continues_with_a_warning(tmp_path: Path, missing: str) -> None:
    """Nor without pybind11. What is then installed runs on torch and NumPy."""
    env = {"CXX": "/nonexistent/g++"}
    if missing == "pybind11":
        (tmp_path / "pybind11.py").write_text("raise ImportError")
        env = {"PYTHONPATH": str(tmp_path)}
    done = build(tmp_path, MEGALITE_CUDA="0", **env)
    assert done.returncode == 0, done.stderr
    for library in ("core.parts.kernels._cpu_kernels", "runtime.data._blend_rule"):
        assert f"megalite.{library} not built, the install continues without it" in done.stderr
    assert not list(tmp_path.rglob("*.so*"))
    if missing == "compiler":
        shutil.copytree(ROOT / "megalite", tmp_path / "megalite", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        (tmp_path / "use.py").write_text(_NOTHING_BUILT)
        used = run([sys.executable, str(tmp_path / "use.py")])
        assert used.stdout.splitlines() == [
            f"{tmp_path / 'megalite' / '__init__.py'} None [(0, 0), (1, 0), (0, 1), (0, 2)]",
            "True 2.0",
            "True",
        ], used.stderr


@pytest.mark.parametrize(
    ("value", "message"),
    [("1", "MEGALITE_CUDA=1: requires nvcc"), ("yes", "MEGALITE_CUDA=yes: must be auto, 0 or 1")],
)
def test_cuda_requested_and_missing_is_an_error(tmp_path: Path, value: str, message: str) -> None:
    done = build(tmp_path, MEGALITE_CUDA=value, CUDA_HOME="/nonexistent")
    assert done.returncode == 1
    assert message in done.stderr


def test_missing_nvcc_is_a_warning(tmp_path: Path) -> None:
    done = build(tmp_path, MEGALITE_CUDA="auto", CUDA_HOME="/nonexistent", CXX="/nonexistent/g++")
    assert done.returncode == 0, done.stderr
    assert "CUDA kernels skipped: no nvcc" in done.stderr


def make_nvcc(tmp_path: Path) -> None:
    """A compiler that notes what it is asked for, and makes an empty library."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --list-gpu-arch ]; then printf "compute_80\\ncompute_89\\ncompute_90\\n"; exit; fi\n'
        f'echo "$@" > {tmp_path}/asked\nfor last; do :; done; : > "$last"\n'
    )
    nvcc.chmod(0o755)


# As 70 does, which images with torch 2.11 have: it cannot read a license that is only named.
_OLD_SETUPTOOLS = """
import runpy, setuptools, sys
from setuptools.config import pyprojecttoml

def refuse(*args, **kwargs):
    raise ValueError("project.license must be valid exactly by one definition")

setuptools.__version__, pyprojecttoml.apply_configuration = "70.3.0", refuse
sys.argv = ["setup.py", *sys.argv[1:]]
runpy.run_path("setup.py", run_name="__main__")
"""


def test_an_old_setuptools_builds_in_place(tmp_path: Path) -> None:
    """On a machine without a network: nothing was built, and a run fell back on torch's kernels."""
    make_nvcc(tmp_path)
    (tmp_path / "megalite" / "core" / "parts" / "kernels").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    env = {**os.environ, "MEGALITE_CUDA": "1", "CUDA_HOME": str(tmp_path), "CXX": "/nonexistent/g++"}
    for asked, code in (["build_ext", "-i"], 0), (["bdist_wheel"], 1):
        command = [sys.executable, "-c", _OLD_SETUPTOOLS, "-q", *asked]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    assert "setuptools 70.3.0 is too old" in done.stderr
    assert (tmp_path / "megalite/core/parts/kernels/_native_cuda.so").exists()


def test_an_older_nvcc_builds_for_the_architectures_it_knows(tmp_path: Path) -> None:
    make_nvcc(tmp_path)
    done = build(tmp_path, MEGALITE_CUDA="1", CUDA_HOME=str(tmp_path), CXX="/nonexistent/g++")
    assert done.returncode == 0, done.stderr
    codes = re.findall(r",code=(\w+)", (tmp_path / "asked").read_text())
    assert codes == ["sm_80", "sm_90", "compute_90"]
