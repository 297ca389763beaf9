"""A dense model as one with experts, each a copy of its MLP (sparse upcycling, Komatsuzaki et al. 2023).

Routers are new. The weights of a token's experts are renormalized, their sum is 1, and experts that are equal have one
output: the new model has the logits of the old one until training tells its experts apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megalite.core.base.errors import require
from megalite.core.base.slices import Slice
from megalite.core.model.parameters import param_map
from megalite.core.options.model import ModelConfig
from megalite.core.sharding import ParamSpec, Shard
from megalite.extras.convert.stream import ImportedTensor
from megalite.runtime.checkpoint.hf.packing import pieces
from megalite.runtime.checkpoint.hf.source import HFSource

# A family's twin with experts; other families keep their name, and have no format for an export.
_SPARSE = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}


def upcycled(dense: ModelConfig, num_experts: int, topk: int) -> ModelConfig:
    """Return the model with the dense one's MLP as each of its experts.

    Raises:
        UserError: the model has experts already, or parts that experts do not have.
    """
    given = f"--num-experts {num_experts}"
    require(dense.num_experts is None, given, f"the model has {dense.num_experts} experts already", "drop it")
    require(
        not dense.mlp_bias, f"--mlp-bias with {given}", "experts made of an MLP have no biases", "drop one of the two"
    )
    return dataclasses.replace(
        dense,
        arch=_SPARSE.get(dense.arch, dense.arch),
        num_experts=num_experts,
        moe_topk=topk,
        moe_ffn_size=dense.ffn_size,
        moe_renormalize=True,
    )


def upcycled_tensors(hf: HFSource, model: ModelConfig, seed: int) -> list[ImportedTensor]:
    """List the tensors of an upcycled model, expert by expert.

    Args:
        hf: the dense model.
        model: what `upcycled` makes of it.
        seed: seed of the routers.
    """
    packings = {spec.name: (spec, packing) for spec, packing in hf.tensors()}

    def maker(spec: ParamSpec, box: Slice) -> Callable[[], torch.Tensor]:
        dense = spec.name.replace(".mlp.experts.", ".mlp.")
        if dense not in packings:
            return lambda: Shard(spec).initial(seed)
        return lambda: hf.full(*packings[dense]).view(box.shape)

    return [
        ImportedTensor("master", spec.name, spec.shape, maker(spec, box), box)
        for spec in param_map(model).values()
        if spec.tied_to is None
        for box in pieces(spec)
    ]
