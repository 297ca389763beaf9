"""Quantization and products of FP8 codes against fp64, torch's own product, and their edge cases."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.options.recipe import RECIPES
from megalite.core.parts.quant.fp8 import (
    Codes,
    _cuda_scale,
    amaxes,
    block_product,
    emulated_product,
    quantize,
    scaled_product,
)
from megalite.core.parts.quant.fp8_products import FORMATS, select
from tests.unit.ops.fp8_by_hand import by_hand

CASES = [
    ((1, 128), "e4m3", True),
    ((128, 128), "e4m3", True),
    ((1, 32), "e4m3", True),
    ((1, 0), "e4m3", True),
    ((0, 0), "e4m3", False),
    ((0, 0), "e5m2", False),
]


@pytest.mark.parametrize(("block", "name", "power_of_2"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_against_fp64(block: tuple[int, int], name: str, power_of_2: bool, dtype: torch.dtype) -> None:
    x = (torch.randn(272, 400, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)  # 128 k + 16
    x[5] = 0.0
    x[:, 128:256] = 0.0
    x[200, 300] = 1e4
    codes = quantize(x, block, FORMATS[name], power_of_2)
    assert codes.codes.is_contiguous()
    expected = by_hand(x.double().numpy(), block, name, power_of_2)
    got = codes.values().double().numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-7)
    transposed = quantize(x.t(), block[::-1], FORMATS[name], power_of_2)
    assert torch.equal(transposed.codes.float().t(), codes.codes.float())
    assert transposed.codes.is_contiguous()


def test_scales_at_exact_powers_of_2() -> None:
    """448 times a power of 2 is the largest code at that scale; the next number needs the next one."""
    for exponent in range(-120, 110, 7):
        at = torch.tensor([[448.0 * 2.0**exponent]])
        above = torch.nextafter(at, torch.tensor(torch.inf)) * (1 + 2**-20)
        assert quantize(at, (1, 1), torch.float8_e4m3fn, True).scale.item() == 2.0**exponent
        assert quantize(above, (1, 1), torch.float8_e4m3fn, True).scale.item() == 2.0 ** (exponent + 1)


@pytest.mark.parametrize(("block", "name", "power_of_2"), CASES)
def test_zeros_and_tiny_numbers(block: tuple[int, int], name: str, power_of_2: bool) -> None:
    zero = quantize(torch.zeros(128, 256), block, FORMATS[name], power_of_2)
    assert (zero.scale == 1).all()
    assert (zero.values() == 0).all()
    tiny = quantize(torch.full((128, 256), 1e-45), block, FORMATS[name], power_of_2)
    assert tiny.values().isfinite().all()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize(("block", "name", "power_of_2"), CASES)
def test_overflow_is_seen(block: tuple[int, int], name: str, power_of_2: bool, bad: float) -> None:
    """An infinity does not become the largest code: what it contributes to is not finite, and other blocks are."""
    x = torch.ones(256, 256)
    x[3, 5] = bad
    a, b = (quantize(each, block, FORMATS[name], power_of_2) for each in (x, torch.ones(256, 256)))
    y = emulated_product(a, b, torch.float32)
    assert not y[3].isfinite().any()
    if block[0] == 1:
        assert y[4:].isfinite().all()


def test_codes_stay_within_range() -> None:
    """No cast beyond the range, whose result differs between versions of torch."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    for name, format_ in FORMATS.items():
        small = torch.full((1, 1), x.abs().amax().item() / 4)  # an amax that is too small
        codes = quantize(x, (0, 0), format_, False, small)
        assert codes.codes.float().abs().max().item() == torch.finfo(format_).max, name


@pytest.mark.parametrize("formats", [*itertools.product(FORMATS.values(), repeat=2)])
def test_emulation_is_torchs_product(formats: tuple[torch.dtype, torch.dtype]) -> None:
    """Whole tensors: bit for bit, in every pair of formats."""
    generator = torch.Generator().manual_seed(5)
    a, b = (quantize(torch.randn(n, 64, generator=generator), (0, 0), f, False) for n, f in zip((48, 32), formats))
    assert torch.equal(emulated_product(a, b, torch.float32), scaled_product(a, b, torch.float32))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 has no product by rows on a CPU")
def test_emulation_is_torchs_product_by_rows() -> None:
    generator = torch.Generator().manual_seed(6)
    a, b = (quantize(torch.randn(n, 64, generator=generator), (1, 0), FORMATS["e4m3"], True) for n in (48, 32))
    assert torch.equal(emulated_product(a, b, torch.float32), scaled_product(a, b, torch.float32))


def test_scales_as_gpus_read_them() -> None:
    """Strides that torch requires of blocks of 128; order of blocks of 32, by the formula of cuBLAS."""
    scale = torch.arange(1.0, 257.0).view(64, 4)
    assert _cuda_scale(Codes(scale, scale, (1, 128))).stride() == (1, 64)
    assert _cuda_scale(Codes(scale, scale, (128, 128))).stride() == (4, 1)
    rows, columns = 200, 6
    scale = 2.0 ** torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(1)).float()
    flat = _cuda_scale(Codes(scale, scale, (1, 32))).float()
    assert flat.numel() == 256 * 8
    for i, j in itertools.product(range(rows), range(columns)):
        tile = (i // 128) * 2 + j // 4
        assert flat[tile * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4] == scale[i, j]


@pytest.mark.parametrize("columns", [4, 6])
def test_squares_of_an_odd_number_are_given_by_rows(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS reads the scales of squares with their columns padded to 4, and torch does not pad them."""
    generator, passed = torch.Generator().manual_seed(8), list[torch.Tensor]()
    a, w = (torch.randn(rows, 128 * columns, generator=generator) for rows in (16, 192))
    operands = (quantize(a, (1, 128), FORMATS["e4m3"], True), quantize(w, (128, 128), FORMATS["e4m3"], True))

    def product(*args: torch.Tensor, **_: object) -> torch.Tensor:
        passed.extend(args)
        return args[0]

    monkeypatch.setattr(torch, "_scaled_mm", product)
    scaled_product(*operands, torch.float32)
    scale = passed[3].t()
    rows = 2 if columns == 4 else 192
    assert scale.shape == (rows, columns)
    assert scale.stride() == ((columns, 1) if columns == 4 else (1, rows))
    by_rows = Codes(passed[1].t(), scale, (1 if rows == 192 else 128, 128))
    assert torch.equal(by_rows.values(), operands[1].values())


@pytest.mark.parametrize("rows", [1, 17, 1037])
@pytest.mark.parametrize("inner", [128, 384])
@pytest.mark.parametrize("name", ["blockwise", "rowwise", "tensorwise"])
def test_any_number_of_rows(rows: int, inner: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS gets rows in multiples of 16, and torch knows what its scales are of by their number."""
    recipe, generator = RECIPES[name], torch.Generator().manual_seed(11)
    of_rows, by_rows = name == "rowwise", {"blockwise": (1, 128), "rowwise": (1, 0), "tensorwise": (0, 0)}[name]

    def product(a: torch.Tensor, b: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **_: Any) -> torch.Tensor:
        assert a.shape[0] % 16 == 0
        assert (left.shape == (len(a), 1)) == of_rows
        scales = (x.reshape(1, 1) if x.ndim == 0 else x for x in (left, right.t()))
        left_codes, right_codes = (Codes(x, s, by_rows) for x, s in zip((a, b.t()), scales))
        return emulated_product(left_codes, right_codes, torch.float32)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    x, w = (
        quantize(torch.randn(n, inner, generator=generator), block, FORMATS["e4m3"], recipe.power_of_2)
        for n, block in ((rows, recipe.activation), (256, recipe.weight))
    )
    expected = emulated_product(x, w, torch.float32)
    torch.testing.assert_close(scaled_product(x, w, torch.float32), expected, rtol=0, atol=1e-4)


def test_error_of_a_product() -> None:
    """About 3.7 % of a Gaussian product, whatever shares a scale; one huge element costs the other rows tensorwise."""
    generator = torch.Generator().manual_seed(9)
    x, w = torch.randn(256, 512, generator=generator), torch.randn(128, 512, generator=generator)
    for recipe in RECIPES.values():
        left, right = (
            quantize(each, block, FORMATS["e4m3"], recipe.power_of_2)
            for each, block in ((x, recipe.activation), (w, recipe.weight))
        )
        error = (emulated_product(left, right, torch.float32) - x @ w.t()).norm() / (x @ w.t()).norm()
        assert 0.034 < error < 0.041
    x[0, 0] = 1e4
    lost = {
        name: (quantize(x, recipe.activation, FORMATS["e4m3"], recipe.power_of_2).values()[1:] == 0).float().mean()
        for name, recipe in RECIPES.items()
    }
    assert lost.pop("tensorwise") > 0.01
    assert max(lost.values()) < 1e-3


TRITON = """
import torch
from tests.unit.ops.fp8_by_hand import SMALLEST, SPACING
from tests.unit.ops.test_fp8 import CASES, FORMATS
from megalite.core.parts.quant.fp8 import fused_quantize, quantize

generator = torch.Generator().manual_seed(1)
for (block, name, power_of_2), dtype in ((c, d) for c in CASES for d in (torch.bfloat16, torch.float32)):
    x = (torch.randn(144, 272, generator=generator) * 3).to(dtype)
    x[5], x[:, :128], x[140, 270] = 0.0, 0.0, 1e4
    for operand in (x, x.t()):
        expected = quantize(operand, block, FORMATS[name], power_of_2)
        got = fused_quantize(operand, block, FORMATS[name], power_of_2)
        assert torch.equal(got.scale, expected.scale), block
        assert got.codes.is_contiguous() and got.codes.dtype == expected.codes.dtype
        # The interpreter does not always round to nearest, as GPUs do, and loses the carry into an exponent.
        wanted, code = expected.codes.float(), got.codes.float()
        error, carry = (code - wanted).abs(), 2 * code == wanted
        assert (carry | (error <= SPACING[name] * wanted.abs() + SMALLEST[name])).all(), (block, name)
        assert (error > 0).float().mean() < 0.06
x[3, 7] = torch.nan
assert fused_quantize(x, (1, 128), FORMATS["e4m3"], True).scale[3].tolist()[0] == float("inf")
assert torch.equal(fused_quantize(x.abs().zero_(), (1, 32), FORMATS["e4m3"], True).scale, torch.ones(144, 9))
"""

FUSED = """
import torch
from megalite.core.ops import resolve
from megalite.core.parts.quant.fp8 import fused_quantize, noted
from megalite.core.parts.quant.fp8_products import select

ops = resolve("triton", "cpu", torch.bfloat16)
generator = torch.Generator().manual_seed(1)
for name, width in (("blockwise", 384), ("mxfp8", 96), ("blockwise", 1536), ("mxfp8", 272)):
    fp8 = select(name, range(1), torch.device("cpu"), emulate=True)
    x, residual, gate_up = (
        torch.randn(3, 2, n, generator=generator).bfloat16() for n in (width, width, 2 * width)
    )
    gate_up[1, 0] = 0.0
    gate_up[2, 1, 5] = torch.inf
    weight, bias = torch.randn(2, width, generator=generator).bfloat16()
    for call, arguments in (
        ("rmsnorm", (x, weight, 1e-5)), ("add_rmsnorm", (x, residual, weight, 1e-5)),
        ("layernorm", (x, weight, bias, 1e-5)), ("add_layernorm", (x, residual, weight, bias, 1e-5)),
        ("swiglu", (gate_up,)), ("geglu", (gate_up, "tanh")),
    ):
        arguments = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments]
        y, alone = (getattr(each, call)(*arguments) for each in (fp8.noting(ops), ops))
        first, expected = (z[0] if isinstance(z, tuple) else z for z in (y, alone))
        assert torch.equal(first.nan_to_num(), expected.nan_to_num()), call
        codes, separate = noted(first, fp8.recipe.activation), fused_quantize(
            expected.detach().flatten(0, -2), fp8.recipe.activation, torch.float8_e4m3fn, True
        )
        assert torch.equal(codes.scale, separate.scale), (name, call)
        assert torch.equal(codes.codes.view(torch.uint8), separate.codes.view(torch.uint8)), (name, call)
        assert noted(first, (1, 128)) is None
        first.sum().backward()
"""


PRODUCT = """
import torch
from megalite.core.parts.quant.fp8 import block_product, emulated_product, quantize

generator = torch.Generator().manual_seed(1)
for rows, columns, inner in ((144, 272, 384), (5, 16, 256)):
    x = torch.randn(rows, inner, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator))
    a = quantize(x, (1, 128), torch.float8_e4m3fn, True)
    for together in (1, 128):
        w = torch.randn(columns, inner, generator=generator) * torch.exp(torch.randn(inner, generator=generator))
        b = quantize(w, (together, 128), torch.float8_e4m3fn, True)
        y, expected = block_product(a, b, torch.float32), emulated_product(a, b, torch.float32)
        assert y.shape == expected.shape
        assert (y - expected).abs().max() < 1e-6 * expected.abs().max(), (rows, together)
"""


@pytest.mark.full
def test_triton_kernels_in_the_interpreter() -> None:
    """The kernel of `quantize`; norms and activations that write codes too, bit for bit as two kernels; the product."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", TRITON + FUSED + PRODUCT]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_amaxes_of_nan_is_infinite() -> None:
    assert amaxes(torch.tensor([[1.0, float("nan")]]), (0, 0)).item() == float("inf")


def test_missing_hardware_is_one_line() -> None:
    for name in RECIPES:
        with pytest.raises(UserError) as caught:
            select(name, range(2), torch.device("cpu"), emulate=False)
        assert "needs a GPU of compute capability" in str(caught.value)
        assert "--fp8-emulate" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert select(name, range(2), torch.device("cpu"), emulate=True) is not None
    assert select("off", range(0), torch.device("cpu"), emulate=False) is None


@pytest.mark.parametrize(
    ("capability", "able"),
    [
        ((8, 0), ""),
        ((8, 9), "tensorwise"),
        ((9, 0), "blockwise rowwise tensorwise"),
        ((10, 0), "blockwise rowwise tensorwise mxfp8"),
    ],
)
def test_recipes_by_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], able: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name in RECIPES:
        if name in able.split():
            fp8 = select(name, range(2), torch.device("cuda"), emulate=False)
            assert fp8 is not None
            # torch has no product of blocks of 128 but on Hopper.
            assert fp8.product is (block_product if (name, capability) == ("blockwise", (10, 0)) else scaled_product)
        else:
            with pytest.raises(UserError, match="needs compute capability"):
                select(name, range(2), torch.device("cuda"), emulate=False)


def test_a_gpu_without_triton_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("megalite.core.parts.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(UserError, match="requires Triton, which is not installed"):
        select("blockwise", range(1), torch.device("cuda"), emulate=False)
