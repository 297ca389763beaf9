"""Steps of all families on fake CUDA tensors: torch's kernels for GPUs take what reaches them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.core.parts.families import FAMILIES, PRESETS

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no C++ compiler, which a CPU build of torch requires to imitate a GPU"
)
ROOT = Path(__file__).resolve().parents[4]
# Rows of a mask that are no multiple of 16 bytes long.
SIZES = "--num-layers 4 --seq-len 516 --vocab-size 512 --micro-batch-size 2 --global-batch-size 2 --device cuda"


def options_of(family: str) -> str:
    """A layer of each kind of a family's first preset, at its sizes but for the number of experts."""
    preset = next(iter(FAMILIES[family].presets), None)
    if preset is None:
        return f"--arch {family} --hidden-size 256 --num-heads 4 --ffn-hidden-size 512 {SIZES}"
    options = PRESETS[preset]
    dense = [str(i) for i in options.get("moe_dense_layers", ()) if i < 4]
    experts = " --num-experts 16" * ("num_experts" in {**FAMILIES[family].options, **options})
    return f"--preset {preset}{experts}{' --moe-dense-layers ' * bool(dense)}{' '.join(dense)} {SIZES}"


WINDOWS = "--precision bf16 --cp 2 --window 100 --cp-comm"
CASES = {
    **{family: f"{options_of(family)} --precision bf16 --deterministic" for family in FAMILIES},
    **{f"gpt_oss cp {comm}": f"{options_of('gpt_oss')} {WINDOWS} {comm}" for comm in ("gather", "ring", "a2a")},
    "gemma3_text cp": f"{options_of('gemma3_text')} {WINDOWS} gather",
    "gemma3_text in fp32": f"{options_of('gemma3_text')} --window 100",
}


@pytest.mark.full
def test_kernels_take_what_reaches_them() -> None:
    """Deterministic ones where they are asked for, and masks of every sample and head in aligned rows."""
    lines = "".join(json.dumps([*words.split(), "--mock-data"]) + "\n" for words in CASES.values())
    command = [sys.executable, "-m", "tests.unit.extras.estimate.fake_checks"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    faults = dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))
    assert faults == dict.fromkeys(CASES, [])


_ROUTER = """
from types import SimpleNamespace

from megalite.extras.estimate.guard import install_guard

install_guard()

import torch

from megalite.core.parts.ffn.experts.grouped_linear import _WideLinear
from megalite.extras.estimate.fake_cuda import fake_cuda
from megalite.extras.estimate.tracker import Tracker, launches


class Launches(Tracker):
    names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if launches(func) and func.namespace == "aten":
            self.names.append(func.overloadpacket.__name__)
        return super().__torch_dispatch__(func, types, args, kwargs)


with fake_cuda() as device:
    x, w = (torch.empty(n, 16, dtype=torch.bfloat16, device=device, requires_grad=True) for n in (8, 6))
    layer = SimpleNamespace(scale=1.0, bias=None, weight=w, queue=SimpleNamespace(put=lambda late: None))
    with Launches([]):
        y = _WideLinear.apply(x, w, layer)
        assert (y.dtype, y.shape) == (torch.float32, (8, 6))
        print(*Launches.names)
        Launches.names.clear()
        dy = torch.empty_like(y)
        y.backward(dy)
        print(*(name for name in Launches.names if name != "empty_like"))
"""


@pytest.mark.full
def test_a_router_is_one_product() -> None:
    """Its matrices were copied to fp32 first, where a GPU multiplies at a fraction of its rate, and times 1 later."""
    done = subprocess.run([sys.executable, "-c", _ROUTER], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["mm", "_to_copy mm _to_copy"], done.stderr
