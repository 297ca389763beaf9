"""The C++ and Triton backends through the same contract file, each in its own process; setup.py's behavior."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
def cpu_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    installed = ROOT / "megalite" / "ops" / "_native_cpu.so"
    sources = [*ROOT.glob("csrc/c*/*.*"), ROOT / "setup.py"]
    if installed.exists() and installed.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return installed
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    tmp = tmp_path_factory.mktemp("native")
    done = build(tmp, MEGALITE_CUDA="0")
    assert done.returncode == 0, done.stderr
    library = tmp / "lib" / "megalite" / "ops" / "_native_cpu.so"
    assert library.exists(), done.stderr
    return library


def test_cpp_keeps_the_contract(cpu_library: Path) -> None:
    line = contract("cpp", MEGALITE_TEST_NATIVE=str(cpu_library.parent))
    assert int(re.search(r"(\d+) passed", line)[1]) >= 70  # type: ignore[index]


_SPREAD = """
import sys, torch
from pathlib import Path
from megalite.ops import native, resolve
native._HERE = Path(sys.argv[1])
ops = resolve("cpp", "cpu", torch.bfloat16)

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
except RuntimeError as e:
    print(e)
print(torch.tensor(1e-40).mul(0.5).item() > 0)
"""


def test_cpp_gives_the_same_bits_on_any_number_of_threads(cpu_library: Path) -> None:
    """Also: operands that do not fit are refused, and denormal numbers still exist after loading (no fast-math)."""
    done = run([sys.executable, "-c", _SPREAD, str(cpu_library.parent)], PYTHONHASHSEED="0")
    assert done.returncode == 0, done.stderr
    one, two, three, refused, denormals = done.stdout.splitlines()
    assert one == two == three
    assert "param must be contiguous" in refused
    assert denormals == "True"


_STALE = """
import sys, torch
from pathlib import Path
from megalite.ops import native, resolve
native._HERE = Path(sys.argv[1])
native.CPU_OPS += ("segment_norms",)
print(dict(resolve("auto", "cpu", torch.float32).choices[0].rejected)["cpp"])
"""


def test_library_built_from_older_sources_is_refused_with_the_reason(cpu_library: Path) -> None:
    """segment_norms has a schema and no C++ kernel: as an op that was added after the library was built."""
    done = run([sys.executable, "-c", _STALE, str(cpu_library.parent)])
    assert done.returncode == 0, done.stderr
    assert "was built from older sources, without segment_norms; build it again" in done.stdout


def test_cpp_library_binds_to_no_python(cpu_library: Path) -> None:
    """One wheel for every Python: no Python symbol, no libpython."""
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    symbols = subprocess.run(["nm", "-D", str(cpu_library)], check=True, capture_output=True, text=True).stdout
    assert " U aoti_torch_get_data_ptr" in symbols or " U torch_get_mutable_data_ptr" in symbols
    assert not re.search(r" U _?Py", symbols)


def test_triton_keeps_the_contract_under_its_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    line = contract("triton", TRITON_INTERPRET="1")
    assert int(re.search(r"(\d+) passed", line)[1]) >= 65  # type: ignore[index]


def test_install_without_a_compiler_continues_with_a_warning(tmp_path: Path) -> None:
    done = build(tmp_path, MEGALITE_CUDA="0", CXX="/nonexistent/g++")
    assert done.returncode == 0, done.stderr
    for library in ("ops._native_cpu", "data._blend"):
        assert f"megalite.{library} not built, the install continues without it" in done.stderr
    assert not list(tmp_path.rglob("*.so*"))


def test_install_without_torch_continues_with_a_warning() -> None:
    """What pip's build isolation looks like: torch cannot be found."""
    hide = "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '-q', '--version']"
    done = run([sys.executable, "-c", f"{hide}; runpy.run_path('setup.py')"])
    assert done.returncode == 0, done.stderr
    assert "native kernels skipped: torch cannot be imported" in done.stderr


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
