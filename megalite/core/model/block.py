"""A decoder block, for every family, and one that predicts further tokens.

Shapes: S sequence (s = S / tp with sequence parallelism), B micro-batch, H hidden.
"""

from __future__ import annotations

import torch
from torch import nn

from megalite.core.batch import Documents, ForwardPass
from megalite.core.model.kinds import FEED_FORWARDS, MIXERS
from megalite.core.model.layers import Layers, NoNorm, Rope
from megalite.core.model.parameters import NORM_NAMES
from megalite.core.ops.attention import prepare_to_compile
from megalite.core.options.recompute import Extent


class Block(nn.Module):
    """One transformer block: x -> x, both x_SBH (x_sBH with sequence parallelism).

    Each sub-layer may have a norm before it and one after it, or after its sum with the residual; `NORM_NAMES` lists
    those that a model has.

    Attributes:
        recomputed: what it recomputes in backward; all of it is up to the stage.
    """

    def __init__(self, layers: Layers, index: int) -> None:
        super().__init__()
        name, norms = f"layers.{index}", NORM_NAMES[layers.cfg.norm_position]
        self.parallel_residual = layers.cfg.parallel_residual
        self.shared_norm = layers.cfg.norm_position == "shared"
        self.norms_sums = layers.cfg.norm_position == "sum"
        kind = layers.cfg.block_kind(index)
        mixer, feed_forward = MIXERS[kind.mixer], FEED_FORWARDS[kind.feed_forward]
        self.recomputed = layers.recompute.extent(index)
        self.self_attn = mixer.module(layers, index, recompute_core=self.recomputed is Extent.CORE)
        self.mlp = feed_forward.module(layers, index)
        # Registered under their global names, called by their place. The order of registration is that of their
        # gradients in a bucket, and so decides the last bit of the gradient norm.
        first = mixer.feeds_one_product and not self.shared_norm
        multiplied = {norms[0]: first, norms[2]: feed_forward.feeds_one_product}
        by_name = {
            leaf: layers.norm(f"{name}.{leaf}", layers.ops_before(index) if multiplied.get(leaf) else None)
            for leaf in (norms[1], norms[2], norms[0], norms[3])
            if leaf
        }
        for leaf, norm in by_name.items():
            self.add_module(leaf, norm)
        self._norms = tuple(by_name[leaf] if leaf else NoNorm() for leaf in norms)
        self.attention_dropout = layers.dropout("attention_out", index)
        self.mlp_dropout = layers.dropout("mlp_out", index)

    def forward(self, x_SBH: torch.Tensor, rope: Rope, documents: Documents | None, fwd: ForwardPass) -> torch.Tensor:
        """Run the block; for the arguments see `Attention.forward`."""
        before_attention, after_attention, before_mlp, after_mlp = self._norms
        if self.norms_sums:
            attended = self.attention_dropout(self.self_attn(x_SBH, rope, documents, fwd), fwd)
            x_SBH, _ = after_attention.add(attended, x_SBH)
            return after_mlp.add(self.mlp_dropout(self.mlp(x_SBH, fwd), fwd), x_SBH)[0]
        shared = before_attention(x_SBH) if self.shared_norm else None
        read = before_attention(x_SBH) if shared is None else shared
        attended = after_attention(self.self_attn(read, rope, documents, fwd))
        attended = self.attention_dropout(attended, fwd)
        if shared is not None:
            normed, x_SBH = shared, x_SBH + attended
        elif self.parallel_residual:
            normed, x_SBH = before_mlp(x_SBH), x_SBH + attended
        else:
            normed, x_SBH = before_mlp.add(attended, x_SBH)
        return x_SBH + self.mlp_dropout(after_mlp(self.mlp(normed, fwd)), fwd)


class PredictingBlock(Block):
    """A module that predicts one token further than the one before: multi-token prediction.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2. As in Megatron-LM, it reads hidden states that a norm has put
    out, the model's last one or that of the module before.
    """

    def __init__(self, layers: Layers, index: int) -> None:
        super().__init__(layers, index)
        name = f"layers.{index}"
        self.enorm, self.hnorm = layers.norm(f"{name}.enorm"), layers.norm(f"{name}.hnorm")
        self.eh_proj = layers.replicated(f"{name}.eh_proj")
        self.norm = layers.norm(f"{name}.norm")
        self.embedding_dropout = layers.dropout("embedding", index)

    def forward(  # type: ignore[override]
        self,
        x_SBH: torch.Tensor,
        embedded_SBH: torch.Tensor,
        rope: Rope,
        documents: Documents | None,
        fwd: ForwardPass,
    ) -> torch.Tensor:
        """Join hidden states with the embeddings of tokens further on, and run the block: normed hidden states."""
        embedded = self.enorm(self.embedding_dropout(embedded_SBH, fwd))
        joined = self.eh_proj(torch.cat((embedded, self.hnorm(x_SBH)), dim=-1))
        return self.norm(super().forward(joined, rope, documents, fwd))


def compile_block(block: nn.Module) -> None:
    """Compile a block, except for the methods that its modules name in `uncompiled`.

    Those of layers that communicate run as they are: they add to `main_grad` and to the queue of weight gradients,
    which a traced graph cannot see. Hooks on the block run outside the compiled code too.
    """
    prepare_to_compile()
    for module in block.modules():
        for name in getattr(module, "uncompiled", ()):
            setattr(module, name, torch.compiler.disable(getattr(module, name)))
    block.forward = torch.compile(block.forward)
