"""A decoder block and a pipeline stage of blocks, for every family.

Shapes: S sequence (s = S / tp with sequence parallelism), B micro-batch, H hidden, V vocabulary (padded), T tp size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalite.batch import Documents, ForwardPass, Message, MicroBatch, Positions
from megalite.model.attention import QKNorm
from megalite.model.ffn import FEED_FORWARDS
from megalite.model.layers import Layers, NoNorm, Rope
from megalite.model.mixers import MIXERS
from megalite.model.moe import MoELayer
from megalite.model.offload import ActivationOffload
from megalite.model.parameters import NORM_NAMES
from megalite.ops.attention import prepare_to_compile
from megalite.ops.cross_entropy import softcap_
from megalite.sharding.parameter import ShardedParameter
from megalite.tensor_parallel.linear import ColumnParallelLinear, ParallelLinear
from megalite.tensor_parallel.loss import linear_cross_entropy, vocab_parallel_cross_entropy


class Block(nn.Module):
    """One transformer block: x -> x, both x_SBH (x_sBH with sequence parallelism).

    Each sub-layer may have a norm before it and one after it; `NORM_NAMES` lists those that a model has.
    """

    def __init__(self, layers: Layers, index: int, recompute_core: bool) -> None:
        super().__init__()
        name, norms = f"layers.{index}", NORM_NAMES[layers.cfg.norm_position]
        self.parallel_residual = layers.cfg.parallel_residual
        kind = layers.cfg.block_kind(index)
        self.self_attn = MIXERS[kind.mixer].module(layers, index, recompute_core)
        self.mlp = FEED_FORWARDS[kind.feed_forward].module(layers, index)
        # Registered under their global names, called by their place. The order of registration is that of their
        # gradients in a bucket, and so decides the last bit of the gradient norm.
        multiplied = {norms[0]: kind.mixer == "gqa", norms[2]: kind.feed_forward == "mlp"}
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
        attended = after_attention(self.self_attn(before_attention(x_SBH), rope, documents, fwd))
        attended = self.attention_dropout(attended, fwd)
        if self.parallel_residual:
            normed, x_SBH = before_mlp(x_SBH), x_SBH + attended
        else:
            normed, x_SBH = before_mlp.add(attended, x_SBH)
        return x_SBH + self.mlp_dropout(after_mlp(self.mlp(normed, fwd)), fwd)


def compile_block(block: nn.Module) -> None:
    """Compile what lies between the layers that communicate.

    Those layers run as they are: they add to `main_grad` and to the queue of weight gradients, which a traced graph
    cannot see. So do experts, whose numbers of rows change with every micro-batch. Hooks on the block run outside the
    compiled code too.
    """
    prepare_to_compile()
    for part in block.modules():
        if isinstance(part, (ParallelLinear, MoELayer)) or (isinstance(part, QKNorm) and not part.per_head):
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[method-assign]
    block.forward = torch.compile(block.forward)


class GPTStage(nn.Module):
    """The layers of one pipeline stage: embedding on the first, blocks, final norm and output layer on the last.

    Names of parameters in `named_parameters()` are their global names.

    Args:
        layers: makes this stage's layers.
        blocks: global indices of its blocks.
        first, last: whether it holds the embedding, and the output layer with the loss.
        recompute: "none", "selective" (attention core) or "full" (whole blocks).
        loss_chunk: tokens per chunk in output layer and loss; 0 = all at once.
        label_smoothing, z_loss: of the training loss, see `vocab_parallel_cross_entropy`.
        shared_embedding: weight of the tied embedding if it lives on this rank; used as the output weight.
        compiled: whether blocks go through torch.compile; they must have no dropout.
        offload: holds the inputs of recomputed blocks on the host; None: the device keeps them.
    """

    def __init__(
        self,
        layers: Layers,
        blocks: range,
        *,
        first: bool,
        last: bool,
        recompute: str = "none",
        loss_chunk: int = 0,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        shared_embedding: ShardedParameter | None = None,
        compiled: bool = False,
        offload: ActivationOffload | None = None,
    ) -> None:
        super().__init__()
        cfg = layers.cfg
        self._offload = offload
        self.first, self.last, self.recompute = first, last, recompute
        self.queue, self.routing = layers.queue, layers.routing
        self._recompute_options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        self._recompute_options["context_fn"] = layers.routing.passes
        layers.routing.remembers = recompute == "full"
        self._sequence_shards = layers.tp.size if layers.sequence_parallel else 1
        self._hidden_size, self._dtype = cfg.hidden_size, layers.dtype
        if first:
            self.embed_tokens = layers.embedding("embed_tokens")
            if cfg.position == "learned":
                self.embed_positions = PositionEmbedding(layers)
            self.embedding_dropout = layers.dropout("embedding", -1)
        self.layers = nn.ModuleDict({str(i): Block(layers, i, recompute == "selective") for i in blocks})
        self._rotary, self._chunks = [layers.rotary(i) for i in blocks], [cfg.chunk_of(i) for i in blocks]
        if compiled:
            for block in self.layers.values():
                compile_block(block)
        if last:
            self.norm = layers.norm("norm")
            self.lm_head = LMHead(layers, loss_chunk, label_smoothing, z_loss)
            if cfg.tie_embeddings and first:
                shared_embedding = self.embed_tokens.weight
            if shared_embedding is not None:
                self.lm_head.weight = shared_embedding
                shared_embedding.uses = 2

    def message(self, num_tokens: int, micro_batch_size: int) -> Message:
        """Describe the hidden states that this stage passes on, and those that it expects, of `num_tokens` a sample."""
        return Message((num_tokens // self._sequence_shards, micro_batch_size, self._hidden_size), self._dtype)

    def forward(self, x: torch.Tensor, batch: MicroBatch, fwd: ForwardPass) -> torch.Tensor:
        """Run the stage.

        Args:
            x: token ids [S, B] on the first stage, else the previous stage's hidden states x_SBH (x_sBH).
            batch: the micro-batch.
            fwd: the forward pass, key of the dropout masks.

        Returns:
            Hidden states x_SBH (x_sBH); on the last stage the (weighted) loss of every token, fp32 [S, B], or this
            rank's logits [S, B, V/T] where the micro-batch has no targets.
        """
        documents = batch.in_chunks(set(self._chunks))
        if self.first:
            x = self.embed_tokens(x)
            if hasattr(self, "embed_positions"):
                x = self.embed_positions(x, batch.positions)
            x = self.embedding_dropout(x, fwd)
        # The tables of each kind of layer are made once.
        ropes = {rotary: rotary and rotary(batch.positions, x.device) for rotary in set(self._rotary)}
        with self._offload.one_pass() if self._offload is not None and fwd.training else nullcontext():
            for block, rotary, chunk in zip(self.layers.values(), self._rotary, self._chunks):
                seen = ropes[rotary], documents[chunk]
                if self.recompute == "full" and fwd.training:
                    x = checkpoint(block, x, *seen, fwd, **self._recompute_options)
                else:
                    x = block(x, *seen, fwd)
        if not self.last:
            return x
        return self.lm_head(self.norm(x), batch, fwd)

    def units(self) -> list[nn.Module]:
        """List the modules, in forward order, that together hold all parameters."""
        ends = ("norm", "lm_head") if self.last else ()
        starts = ("embed_tokens", "embed_positions") if self.first else ()
        return [
            *(getattr(self, name) for name in starts if hasattr(self, name)),
            *self.layers.values(),
            *(getattr(self, name) for name in ends),
        ]


class LMHead(ColumnParallelLinear):
    """The output layer, and the loss where there are targets.

    Args:
        layers: makes the layers of this stage.
        loss_chunk: tokens per chunk, so that the logits of all tokens never exist at once; 0 = all at once.
        label_smoothing, z_loss: of the training loss; an evaluation reports the cross-entropy itself.
    """

    def __init__(self, layers: Layers, loss_chunk: int, label_smoothing: float, z_loss: float) -> None:
        super().__init__(**layers.linear("lm_head"))
        self.vocab_size, self.loss_chunk, self.label_smoothing = layers.cfg.vocab, loss_chunk, label_smoothing
        self.softcap, self.z_loss = layers.cfg.logit_softcap, z_loss
        self.scale = 1 / layers.cfg.width_multiplier

    def forward(self, x: torch.Tensor, batch: MicroBatch, fwd: ForwardPass) -> torch.Tensor:  # type: ignore[override]
        """Map x_SBH (x_sBH) to weighted token losses [S, B], or without targets to this rank's logits [S, B, V/T]."""
        x = x if self.scale == 1.0 else x * self.scale
        if batch.targets_SB is None:
            return softcap_(super().forward(x), self.softcap)
        if self.loss_chunk:
            weights = 1.0 if batch.weights_SB is None else batch.weights_SB
            dloss = weights * fwd.grad_scale if fwd.training else None
            loss = linear_cross_entropy(
                x, self, batch.targets_SB, self.vocab_size, self.loss_chunk, self.softcap, self.z_loss, dloss
            )
        else:
            logits = super().forward(x)
            loss = vocab_parallel_cross_entropy(
                logits.view(-1, logits.shape[-1]),
                batch.targets_SB.reshape(-1),
                self.tp,
                self.vocab_size,
                self.ops,
                self.label_smoothing if fwd.training else 0.0,
                self.z_loss,
                self.softcap,
            ).view(batch.targets_SB.shape)
        return loss if batch.weights_SB is None else loss * batch.weights_SB


class PositionEmbedding(nn.Module):
    """Learned absolute positions, added to x_SBH or to this rank's shard of the sequence."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.weight = layers.param("embed_positions.weight")
        self.shard = layers.tp.rank if layers.sequence_parallel else 0

    def forward(self, x_SBH: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Add the embeddings of this rank's part of the positions."""
        first = x_SBH.shape[0] * self.shard
        return x_SBH + positions.between(first, first + x_SBH.shape[0]).look_up(self.weight)
