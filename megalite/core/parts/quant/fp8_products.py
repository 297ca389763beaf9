"""The products of linear layers in FP8 (`--fp8`): a recipe, and the functions that carry it out.

FP8 quantizes both operands of a product along the dimension that it contracts. Activations and gradients stay in the
run's type outside of the products: what a layer keeps for backward is quantized again there, with the same result.
Weights are quantized once, in both directions, until their bucket changes them (`ShardedParameter.codes`).

Where a scale covers features that are sharded over tp, its amax is the largest of all ranks, so that the codes are
those of one process. Blocks never cross ranks: `options.fp8` refuses cuts inside of one.

Each expert is a matrix of its own, and its rows are the tokens of its products. With experts over ep they come from the
micro-batches of all its ranks: a scale that covers tokens then covers those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megalite.core.base.errors import UserError
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.ops import Ops
from megalite.core.ops.grouped import groups
from megalite.core.options.recipe import RECIPES, Recipe
from megalite.core.parts.quant import fp8
from megalite.core.parts.quant.fp8 import Codes, amaxes
from megalite.core.sharding.parameter import ShardedParameter
from megalite.core.tensor_parallel.products import Gather, GroupedProducts, Products

# Functions whose results are multiplied, by op.
NOTING = {
    "rmsnorm": ("rmsnorm", "add_rmsnorm"),
    "layernorm": ("layernorm", "add_layernorm"),
    "glu": ("swiglu", "geglu"),
}
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _with_codes(function: Callable[..., Any], codes: Callable[..., Codes], *args: Any) -> Any:
    """Torch reference of the functions that write codes: one after the other."""
    out = function(*args)
    y = out[0] if isinstance(out, tuple) else out
    y.fp8_codes = codes(y.detach().flatten(0, -2), "NI")[:2]
    return out


@dataclass(frozen=True)
class Fp8:
    """A recipe, and the functions that carry it out.

    Attributes:
        recipe: what shares a scale.
        layers: blocks that it applies to.
        quantize, product: implementations of the module's functions.
        wide_wgrad: whether weight gradients come out in fp32; else in the type of the activations.
        notes: whether norms and activations may note codes, see `noting`.
    """

    recipe: Recipe
    layers: range
    quantize: Callable[..., Codes]
    product: Callable[..., Tensor]
    wide_wgrad: bool
    notes: bool = True

    def codes(self, x: Tensor, dims: str, amax: Tensor | None = None) -> Codes:
        """Quantize an operand [rows, contracted]; for `dims` see `block`."""
        grad = "N" in dims and "O" in dims
        dtype = FORMATS[self.recipe.grad_format if grad else "e4m3"]
        return self.quantize(x, self.block(dims), dtype, self.recipe.power_of_2, amax)

    def noting(self, ops: Ops) -> Ops:
        """Return ops whose norms and gated activations quantize what they return, for the product that reads it.

        The codes are those of `codes`, noted as `fp8_codes`. Triton writes them in the same kernel: 1 byte per element
        instead of 2 read and 1 written. Scales of whole rows or tensors are not noted: other ranks may decide them.
        """
        rows, group = self.recipe.activation
        changes: dict[str, Any] = {}
        backends = {choice.op: choice.backend for choice in ops.choices}
        for op, names in NOTING.items() if self.notes and rows == 1 and group else ():
            for name in names:
                if backends[op] == "triton":
                    changes[name] = partial(getattr(ops, name), group=group)
                elif self.product is fp8.emulated_product:
                    changes[name] = partial(_with_codes, getattr(ops, name), self.codes)
        return replace(ops, **changes)

    def block(self, dims: str) -> tuple[int, int]:
        """Return what shares a scale; `dims`: the letters N (tokens), I, O of rows and columns. Weights have no N."""
        return self.recipe.activation if "N" in dims else self.recipe.weight

    def products(self, ops: Ops, tp: Axis, sharded: str) -> Fp8Products:
        """Make the products of a matrix; see `Quantization.products`."""
        return Fp8Products(ops, self, tp, sharded)

    def grouped_products(self, ops: Ops, tp: Axis, sharded: str) -> Fp8GroupedProducts:
        """Make the products of a stack of matrices; see `Quantization.products`."""
        return Fp8GroupedProducts(self.products(ops, tp, sharded))


class Fp8Products(Products):
    """The products of FP8 codes.

    Dimensions of an operand are N (tokens), I and O (input and output features of this rank).

    Args:
        ops: the kernels in use.
        settings: quantization and product.
        tp: tensor-parallel axis.
        sharded: "O" (column-parallel) or "I" (row-parallel).

    Attributes:
        peak: largest magnitude that a scale of the layer's inputs stood for since it was last None.
    """

    def __init__(self, ops: Ops, settings: Fp8, tp: Axis, sharded: str) -> None:
        super().__init__(ops)
        self.fp8 = settings
        self.tp = tp
        self.sharded = sharded
        self.peak: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, weight: ShardedParameter, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + b: x [..., I] -> [..., O]."""
        ((w, _),) = self.weights(weight)
        codes = fp8.noted(x, self.fp8.recipe.activation)
        y = self.product(x.flatten(0, -2), w, codes).view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)

    def forward_of_shards(
        self, x: torch.Tensor, weight: ShardedParameter, bias: torch.Tensor | None, gather: Gather
    ) -> torch.Tensor:
        """Return x W^T + b for an input that `gather` makes whole: by its codes, where they are noted."""
        codes = fp8.noted(x, self.fp8.recipe.activation)
        if codes is None:
            return super().forward_of_shards(x, weight, bias, gather)
        (bits, first), (scale, second) = gather(codes.codes.view(torch.uint8)), gather(codes.scale)
        first.wait()
        second.wait()
        ((w, _),) = self.weights(weight)
        y = self.product(x, w, Codes(bits.view(codes.codes.dtype), scale, codes.block))
        y = y.view(-1, *x.shape[1:-1], y.shape[-1])
        return y if bias is None else y.add_(bias)

    def dgrad(self, dy: torch.Tensor, weight: ShardedParameter) -> torch.Tensor:
        """Return dy W: [..., O] -> [..., I]."""
        ((_, w),) = self.weights(weight)
        return self.product_of_grad(dy.flatten(0, -2), w).view(*dy.shape[:-1], -1)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, weight: ShardedParameter) -> None:
        """Add dy^T x, summed over all tokens, to the weight's main_grad_OI."""
        grad = self.grad_of_weight(dy.flatten(0, -2), x.flatten(0, -2))
        (weight.main_grad.add_ if weight.has_grad else weight.main_grad.copy_)(grad)

    def product(self, x: torch.Tensor, w: Codes, codes: Codes | None = None) -> torch.Tensor:
        """Return x W^T for codes of W, and of x if they are known: [N, I] -> [N, O]."""
        codes = self._codes(x, "NI") if codes is None else codes
        peak = codes.scale.amax() * torch.finfo(codes.codes.dtype).max
        self.peak = peak if self.peak is None else torch.maximum(self.peak, peak)
        return self.fp8.product(codes, w, x.dtype, fast=True)

    def product_of_grad(self, dy: torch.Tensor, w: Codes) -> torch.Tensor:
        """Return dy W for codes of W^T: [N, O] -> [N, I]."""
        return self.fp8.product(self._codes(dy, "NO"), w, dy.dtype)

    def grad_of_weight(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return dy^T x: [N, O] and [N, I] -> [O, I]."""
        dtype = torch.float32 if self.fp8.wide_wgrad else dy.dtype
        return self.fp8.product(self._codes(dy.t(), "ON"), self._codes(x.t(), "IN"), dtype)

    def weights(self, weight: ShardedParameter) -> list[tuple[Codes, Codes]]:
        """Return the codes of W [O, I] and of its transpose; of a stack, those of every matrix."""
        if weight.codes is None:
            matrices = weight.detach().view(-1, *weight.shape[-2:])
            weight.codes = [codes for w in matrices for codes in (self._codes(w, "OI"), self._codes(w.t(), "IO"))]
        return list(zip(weight.codes[::2], weight.codes[1::2]))

    def _codes(self, x: torch.Tensor, dims: str) -> Codes:
        x = x.detach()
        if self.tp.size == 1 or self.sharded not in self.fp8.recipe.spans(dims):
            return self.fp8.codes(x, dims)
        amax = amaxes(x, self.fp8.block(dims))
        collectives.all_reduce(amax, self.tp, collectives.MAX).wait()
        return self.fp8.codes(x, dims, amax)


class Fp8GroupedProducts(GroupedProducts):
    """The products of experts in FP8, one expert after the other.

    Args:
        each: the products of one expert.
    """

    def __init__(self, each: Fp8Products) -> None:
        super().__init__(each.ops)
        self.each = each

    def forward(self, x: torch.Tensor, weight: ShardedParameter, sizes: Sequence[int]) -> torch.Tensor:
        """Return x_e W_e^T for the rows of each expert e: x [R, I] -> [R, O]."""
        y = x.new_empty(len(x), weight.shape[1])
        for rows, (w, _) in zip(groups(sizes), self.each.weights(weight), strict=True):
            if rows.start < rows.stop:
                y[rows] = self.each.product(x[rows], w)
        return y

    def dgrad(self, dy: torch.Tensor, weight: ShardedParameter, sizes: Sequence[int]) -> torch.Tensor:
        """Return dy_e W_e: [R, O] -> [R, I]."""
        dx = dy.new_empty(len(dy), weight.shape[2])
        for rows, (_, w) in zip(groups(sizes), self.each.weights(weight), strict=True):
            if rows.start < rows.stop:
                dx[rows] = self.each.product_of_grad(dy[rows], w)
        return dx

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, weight: ShardedParameter, sizes: Sequence[int]) -> None:
        """Add dy_e^T x_e to each matrix of the weight's main_grad_EOI."""
        if not weight.has_grad:
            weight.main_grad.zero_()
        for rows, grad in zip(groups(sizes), weight.main_grad, strict=True):
            if rows.start < rows.stop:
                # The contracted dimension of a product has a multiple of rows: these add nothing.
                more = (0, 0, 0, (rows.start - rows.stop) % self.each.fp8.recipe.multiple)
                grad.add_(self.each.grad_of_weight(F.pad(dy[rows], more), F.pad(x[rows], more)))


def why_not(name: str, device: torch.device) -> str | None:
    """Return why a device cannot multiply by this recipe, or None."""
    capabilities = RECIPES[name].capabilities
    needed = " or ".join(f"{major}.{minor}" for major, minor in capabilities)
    if device.type != "cuda":
        return f"needs a GPU of compute capability {needed}, not {device.type}"
    if (here := torch.cuda.get_device_capability(device)) not in capabilities:
        return f"needs compute capability {needed}, not {here[0]}.{here[1]}"
    return None


def select(name: str, layers: range, device: torch.device, emulate: bool, notes: bool = True) -> Fp8 | None:
    """Return the functions of `--fp8 NAME`; None for off.

    Raises:
        UserError: the device cannot, and `emulate` does not ask for less.
    """
    if name == "off":
        return None
    wide = name != "rowwise"
    if emulate:
        return Fp8(RECIPES[name], layers, fp8.quantize, fp8.emulated_product, wide, notes)
    if reason := why_not(name, device):
        able = [other for other in RECIPES if why_not(other, device) is None]
        others = f"use --fp8 {' or '.join(able)}, or " if able else ""
        raise UserError(
            f"--fp8 {name}", reason, f"{others}add --fp8-emulate (its values, slower than bf16), or drop it"
        )
    fp8.triton_kernels("fp8")  # missing: not in the middle of the first step
    # cuBLAS takes blocks of 128 on Hopper alone.
    ours = name == "blockwise" and torch.cuda.get_device_capability(device) != (9, 0)
    product = fp8.block_product if ours else fp8.scaled_product
    return Fp8(RECIPES[name], layers, fp8.fused_quantize, product, wide, notes)
