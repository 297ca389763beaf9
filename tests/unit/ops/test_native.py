"""The C++ backend as an ordinary install has it, and Triton, through the contract file, each in its own process;
setup.py's behavior.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from megalite.ops import cpp, native, resolve

ROOT = Path(__file__).parents[3]
BACKENDS = str(Path(__file__).parent / "test_backends.py")


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "CXX", "CUDA_HOME")}
    environment |= {"OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def build(tmp: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """`setup.py build_ext` into tmp, nothing into the checkout."""
    folders = ["--build-lib", str(tmp / "lib"), "--build-temp", str(tmp / "temp")]
    return run([sys.executable, "setup.py", "-q", "build_ext", *folders], **env)


def contract(backend: str, **env: str) -> str:
    """Run test_backends.py in a process of its own; its closing line."""
    done = run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", BACKENDS], MEGALITE_TEST_BACKEND=backend, **env
    )
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
    assert re.fullmatch(r"megalite-[\d.]+-py3-none-linux_\w+\.whl", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp / "site")
    return tmp / "site"


@pytest.fixture(scope="module")
def cpp_library(site: Path) -> Path:
    return site / "megalite" / "ops" / "_native_cpp.so"


def test_cpp_keeps_the_contract(cpp_library: Path) -> None:
    line = contract("cpp", MEGALITE_TEST_NATIVE=str(cpp_library.parent))
    assert int(re.search(r"(\d+) passed", line)[1]) >= 70  # type: ignore[index]


_INSTALLED = """
import os, re, sys, numpy, torch
from megalite.ops import __main__, resolve
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
    assert where == str(site / "megalite" / "ops" / "__main__.py")
    by_cpp = {line.split()[0] for line in listing if re.match(r"\w+ +cpp ", line)}
    assert by_cpp == {"rmsnorm", "rope", "glu", "cross_entropy", "adamw", "l2_norm"}
    assert started == "2 0"
    assert runtimes == "1"
    assert one == two == three
    assert "param must be contiguous" in refused
    assert denormals == "True"


@pytest.mark.parametrize(("name", "letters"), [("segment_norms", "vp"), ("l2_norm", "vppii")])
def test_library_built_from_other_sources_is_refused_with_the_reason(
    cpp_library: Path, monkeypatch: pytest.MonkeyPatch, name: str, letters: str
) -> None:
    """An entry point that was added, or took other arguments, when the library was built."""
    monkeypatch.setattr(native, "_HERE", cpp_library.parent)
    monkeypatch.setitem(cpp._SIGNATURES, name, letters)
    # What is kept of the real library stays: it registers its kernels once per process.
    monkeypatch.setattr(native, "_why_not_loaded", native._why_not_loaded.__wrapped__)
    ops = resolve("auto", "cpu", torch.float32)
    assert {choice.backend for choice in ops.choices} == {"torch"}
    assert re.search(rf"no cpp: .*built from older sources, with\w* (another )?{name}\); `pip install`", ops.describe())


def test_cpp_library_needs_no_torch_and_no_python(cpp_library: Path) -> None:
    """One wheel for every torch and every Python; no OpenMP either, whose copy could be another than torch's."""
    if shutil.which("readelf") is None:
        pytest.skip("no binutils")
    dynamic = subprocess.run(["readelf", "-d", cpp_library], check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(\w+)", dynamic))
    assert needed <= {"libstdc", "libm", "libgcc_s", "libc", "ld"}
    symbols = subprocess.run(["nm", "-D", cpp_library], check=True, capture_output=True, text=True).stdout
    assert not re.search(r" U (_?Py|aoti_|torch_|GOMP|omp_|_ZN?K?(2at|3c10|5torch))", symbols)


def test_triton_keeps_the_contract_under_its_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    line = contract("triton", TRITON_INTERPRET="1")
    assert int(re.search(r"(\d+) passed", line)[1]) >= 65  # type: ignore[index]


def test_install_without_a_compiler_continues_with_a_warning(tmp_path: Path) -> None:
    done = build(tmp_path, MEGALITE_CUDA="0", CXX="/nonexistent/g++")
    assert done.returncode == 0, done.stderr
    for library in ("ops._native_cpp", "data._blend"):
        assert f"megalite.{library} not built, the install continues without it" in done.stderr
    assert not list(tmp_path.rglob("*.so*"))


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


def test_an_older_nvcc_builds_for_the_architectures_it_knows(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --list-gpu-arch ]; then printf "compute_80\\ncompute_89\\ncompute_90\\n"; exit; fi\n'
        f'echo "$@" > {tmp_path}/asked\nfor last; do :; done; : > "$last"\n'
    )
    nvcc.chmod(0o755)
    done = build(tmp_path, MEGALITE_CUDA="1", CUDA_HOME=str(tmp_path), CXX="/nonexistent/g++")
    assert done.returncode == 0, done.stderr
    codes = re.findall(r",code=(\w+)", (tmp_path / "asked").read_text())
    assert codes == ["sm_80", "sm_90", "compute_90"]
