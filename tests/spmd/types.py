"""Types of tensors over the axes of the grid, found in what the real layers compute, in one process.

A type states what the ranks' tensors are of the tensor that one process without parallelism would have:

    R      replicated: each rank holds all of it
    P      partial: it is the sum of what the ranks hold
    S(d)   sharded: the ranks' tensors, one after the other along dimension d
    I      invariant: R, and so is its gradient

`check` runs a training step of the whole model, then one of every rank, a thread each, and compares: what enters and
leaves each module and its gradient (`SIGNATURES`), what enters each collective (`COLLECTIVES`), and every parameter's
gradient before and after its reduction (its declaration). Anything of another type is a `SpmdTypeError`.

The types come from values, so backward passes, packed projections and kernels need no rules of their own; weights and
data are random, so nothing has two types by chance. (A checker that infers types from rules, as `spmd-types` does, has
to trust a rule for each autograd function, and ours hold the collectives, in both directions.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megalite.core.model import block, layers
from megalite.core.parts.ffn.dense import mlp
from megalite.core.parts.heads.lm.output_layer import LMHead
from megalite.core.parts.heads.score.score import Score
from megalite.core.parts.mixers.gqa import attention
from megalite.core.parts.mixers.mla import latent_attention
from megalite.core.parts.positions.learned.embedding import PositionEmbedding
from megalite.core.tensor_parallel import embedding, linear

# Inputs and outputs of modules. "residual" is S(0) with sequence parallelism, else I; "features" is S(-1), of a packed
# projection part by part. Gradients have the type of their tensors.
SIGNATURES: Mapping[type[nn.Module], tuple[str | None, str]] = {
    embedding.VocabParallelEmbedding: (None, "residual"),
    PositionEmbedding: ("residual", "residual"),
    layers.Norm: ("residual", "residual"),
    linear.ColumnParallelLinear: ("residual", "features"),
    linear.GatheredLinear: (None, "features"),
    linear.ReplicatedLinear: ("residual", "residual"),
    linear.RowParallelLinear: ("features", "residual"),
    attention.QKNorm: ("features", "features"),
    attention.Attention: ("residual", "residual"),
    latent_attention.LatentAttentionLayer: ("residual", "residual"),
    mlp.MLP: ("residual", "residual"),
    block.Block: ("residual", "residual"),
    LMHead: ("residual", "I"),
    Score: ("residual", "I"),
}
# What a collective takes, over its own axis.
COLLECTIVES = {"all_reduce": "P", "reduce_scatter": "P", "all_gather": "S(0)"}
# Functions that gather statistics of a rank's own part, which are no part of anything that one process would have.
OWN_STATISTICS = {"_gather_stats"}
# Place of a tensor in a step: micro-batch, what it is, how many of the kind came before it.
Tag = tuple[int | None, str, int]


class SpmdTypeError(Exception):
    """A tensor is not of the type that it must have; names the tensor, its module and the axis."""


def close(x: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    if x.shape != whole.shape:
        return False
    # A step's status, in fp64, has numbers of different sizes.
    slack = 0.0 if whole.dtype == torch.float64 else 1e-6
    return bool(((x - whole).abs() <= 1e-4 * whole.abs() + slack * whole.norm()).all())


def joined(parts: Sequence[torch.Tensor], dim: int, packing: Sequence[int] = ()) -> torch.Tensor:
    """Put shards together along a dimension; each packed part by itself."""
    if not packing:
        return torch.cat(list(parts), dim)
    cut = [x.split([n // len(parts) for n in packing], dim) for x in parts]
    return torch.cat([piece for pieces in zip(*cut) for piece in pieces], dim)


def found_types(parts: Sequence[torch.Tensor], whole: torch.Tensor, packing: Sequence[int] = ()) -> list[str]:
    """List the types that the ranks' tensors have."""
    found = ["R"] if all(close(x, whole) for x in parts) else []
    if len({x.shape for x in parts}) == 1 and close(torch.stack(list(parts)).sum(0), whole):
        found.append("P")
    for dim in range(whole.dim()):
        pack = packing if dim == whole.dim() - 1 and parts[0].shape[dim] * len(parts) == sum(packing) else ()
        if sum(x.shape[dim] for x in parts) == whole.shape[dim] and close(joined(parts, dim, pack), whole):
            found.append(f"S({dim})")
    return found


def demand(what: str, axis: str, wanted: str, found: list[str], dims: int) -> None:
    """Raise an error unless a tensor of so many dimensions has the wanted type."""
    wanted = {"I": "R", "S(-1)": f"S({dims - 1})"}.get(wanted, wanted)
    if wanted not in found:
        has = " and ".join(found) or "of no type: neither the whole, nor parts or summands of it"
        raise SpmdTypeError(f"{what} is {has} over {axis}; it must be {wanted}")
