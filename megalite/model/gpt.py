"""A decoder block and a pipeline stage of blocks, for the Llama, GPT-2 and GPT-NeoX families.

Shapes: S sequence (s = S / tp with sequence parallelism), B micro-batch, H hidden, V vocabulary (padded), T tp size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalite.model.attention import Attention, QKNorm, Rope
from megalite.model.layers import Maker, Position, rotary_tables
from megalite.model.mlp import MLP
from megalite.sharding import ShardedParameter
from megalite.tensor_parallel.embedding import VocabParallelEmbedding
from megalite.tensor_parallel.linear import ColumnParallelLinear, ParallelLinear
from megalite.tensor_parallel.loss import linear_cross_entropy, vocab_parallel_cross_entropy


class Block(nn.Module):
    """One transformer block: x -> x, both x_SBH (x_sBH with sequence parallelism)."""

    def __init__(self, make: Maker, layer: int, recompute_core: bool) -> None:
        super().__init__()
        self.make, self.layer = make, layer
        name = f"layers.{layer}"
        self.self_attn = Attention(make, layer, recompute_core)
        self.mlp = MLP(make, layer)
        self.post_attention_layernorm = make.norm(f"{name}.post_attention_layernorm")
        if make.cfg.norm_position == "pre":
            self.input_layernorm = make.norm(f"{name}.input_layernorm")
        else:
            self.post_feedforward_layernorm = make.norm(f"{name}.post_feedforward_layernorm")

    def forward(self, x: torch.Tensor, rope: Rope, position: Position) -> torch.Tensor:
        def dropout(y: torch.Tensor, site: str) -> torch.Tensor:
            return self.make.dropout(y, position, self.layer, site)

        if self.make.cfg.norm_position == "post":
            x = x + dropout(self.post_attention_layernorm(self.self_attn(x, rope, position)), "attention_out")
            return x + dropout(self.post_feedforward_layernorm(self.mlp(x)), "mlp_out")
        attended = dropout(self.self_attn(self.input_layernorm(x), rope, position), "attention_out")
        if self.make.cfg.parallel_residual:
            return x + attended + dropout(self.mlp(self.post_attention_layernorm(x)), "mlp_out")
        normed, x = self.post_attention_layernorm.add(attended, x)
        return x + dropout(self.mlp(normed), "mlp_out")


def compile_block(block: nn.Module) -> None:
    """torch.compile of what lies between the layers that communicate, which stay as they are: they add to `main_grad`
    and to the queue of weight gradients, of which a traced graph knows nothing. Hooks on the block stay outside too.
    """
    for part in block.modules():
        if isinstance(part, ParallelLinear) or (isinstance(part, QKNorm) and not part.per_head):
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[method-assign]
    block.forward = torch.compile(block.forward)


class GPTStage(nn.Module):
    """The layers of one pipeline stage: embedding on the first, blocks, final norm and output layer on the last.

    Names of parameters in `named_parameters()` are their global names.

    Args:
        make: makes this stage's layers.
        layers: global indices of its blocks.
        first, last: whether it holds the embedding; the output layer and the loss.
        recompute: "none", "selective" (attention core) or "full" (whole blocks).
        loss_chunk: tokens at a time in output layer and loss; 0 = all at once.
        shared_embedding: the tied embedding's weight where it lives on the same rank; used as the output weight.
        compiled: blocks go through torch.compile; they must have no dropout.
    """

    def __init__(
        self,
        make: Maker,
        layers: range,
        first: bool,
        last: bool,
        recompute: str = "none",
        loss_chunk: int = 0,
        shared_embedding: ShardedParameter | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        cfg = make.cfg
        self.make, self.first, self.last, self.recompute = make, first, last, recompute
        self.compiled = compiled
        self.queue = make.queue
        if first:
            weight = make.param("embed_tokens.weight", True)
            self.embed_tokens = VocabParallelEmbedding(weight, make.tp, make.sequence_parallel)
            if cfg.position == "learned":
                self.embed_positions = PositionEmbedding(make)
        self.layers = nn.ModuleDict({str(i): Block(make, i, recompute == "selective") for i in layers})
        if compiled:
            for block in self.layers.values():
                compile_block(block)
        if last:
            self.norm = make.norm("norm")
            self.lm_head = LMHead(make, loss_chunk)
            if cfg.tie_embeddings and first:
                shared_embedding = self.embed_tokens.weight
            if shared_embedding is not None:
                self.lm_head.weight = shared_embedding
                shared_embedding.uses = 2
        self._rope: Rope = None

    def _rope_tables(self, length: int, device: torch.device) -> Rope:
        if self.make.cfg.position != "rope":
            return None
        if self._rope is None or self._rope[0].shape[0] < length:
            self._rope = rotary_tables(self.make.cfg, length, device)
        return self._rope

    def forward(
        self,
        x: torch.Tensor,
        targets_SB: torch.Tensor | None = None,
        position: Position = (0, 0, 0),
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        """Run the stage.

        Args:
            x: token ids [S, B] on the first stage, else the previous stage's hidden states.
            targets_SB: next-token ids, for the last stage; negative ids are ignored.
            position: (step, dp rank, micro-batch), keys of the dropout masks.
            label_smoothing: see `vocab_parallel_cross_entropy`.

        Returns:
            Hidden states x_SBH (x_sBH); on the last stage the loss of every token, fp32 [S, B], or this rank's logits
            [S, B, V/T] where there are no targets.
        """
        make = self.make
        if self.first:
            x = self.embed_tokens(x)
            if make.cfg.position == "learned":
                x = self.embed_positions(x)
            x = make.dropout(x, position, -1, "embedding")
        length = x.shape[0] * (make.tp.size if make.sequence_parallel else 1)
        rope = self._rope_tables(length, x.device)
        if self.compiled:
            # A position is for masks only; numbers that change would have the blocks compiled again.
            position = (0, 0, 0)
        for block in self.layers.values():
            if self.recompute == "full" and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, position, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rope, position)
        if not self.last:
            return x
        return self.lm_head(self.norm(x), targets_SB, label_smoothing)

    def units(self) -> list[nn.Module]:
        """Modules in forward order that hold all parameters between them."""
        ends = ("norm", "lm_head") if self.last else ()
        starts = ("embed_tokens", "embed_positions") if self.first else ()
        return [
            *(getattr(self, name) for name in starts if hasattr(self, name)),
            *self.layers.values(),
            *(getattr(self, name) for name in ends),
        ]

    @torch.no_grad()
    def init_parameters(self, seed: int) -> None:
        """Give every parameter its initial value, a function of (seed, global name)."""
        for param in self.parameters():
            assert isinstance(param, ShardedParameter)
            param.copy_(param.shard.initial(seed))


class LMHead(ColumnParallelLinear):
    """The output layer, and the loss where there are targets.

    Args:
        make: makes the layers of this stage.
        loss_chunk: tokens at a time, so that the logits of all tokens never exist; 0 = all at once.
    """

    def __init__(self, make: Maker, loss_chunk: int) -> None:
        weight = make.param("lm_head.weight", True)
        super().__init__(weight, None, make.tp, make.sequence_parallel, make.queue, make.ops)
        self.vocab_size, self.loss_chunk = make.cfg.vocab, loss_chunk

    def forward(
        self, x: torch.Tensor, targets_SB: torch.Tensor | None = None, label_smoothing: float = 0.0
    ) -> torch.Tensor:
        """x_SBH (x_sBH) -> token losses [S, B], or this rank's logits [S, B, V/T] without targets."""
        if targets_SB is not None and self.loss_chunk:
            return linear_cross_entropy(x, self, targets_SB, self.vocab_size, self.loss_chunk)
        logits = super().forward(x)
        if targets_SB is None:
            return logits
        loss = vocab_parallel_cross_entropy(
            logits.view(-1, logits.shape[-1]),
            targets_SB.reshape(-1),
            self.tp,
            self.vocab_size,
            self.ops,
            label_smoothing,
        )
        return loss.view(targets_SB.shape)


class PositionEmbedding(nn.Module):
    """Learned absolute positions, added to x_SBH, or to this rank's part of the sequence."""

    def __init__(self, make: Maker) -> None:
        super().__init__()
        self.make = make
        self.weight = make.param("embed_positions.weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x.shape[0] * self.make.tp.rank if self.make.sequence_parallel else 0
        return x + self.weight[first : first + x.shape[0]].unsqueeze(1)
