"""A pipeline stage of blocks, for every family.

Shapes: S sequence (s = S / tp with sequence parallelism), B micro-batch, H hidden, V vocabulary (padded), T tp size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalite.core.batch import ForwardPass, Message, MicroBatch
from megalite.core.model.block import Block, PredictingBlock, compile_block
from megalite.core.model.kinds import HEADS
from megalite.core.model.layers import Layers
from megalite.core.options.recompute import Extent
from megalite.core.sharding.parameter import ShardedParameter


class GPTStage(nn.Module):
    """The layers of one pipeline stage: embedding on the first, blocks, final norm and output layer on the last,
    with projections of embeddings that are narrower than the blocks.

    Blocks that predict further tokens are on the last, with an embedding to look those up.
    Names of parameters in `named_parameters()` are their global names.

    Args:
        layers: makes this stage's layers.
        blocks: global indices of its blocks.
        first, last: whether it holds the embedding, and the output layer with the loss.
        loss_chunk: tokens per chunk in output layer and loss; 0 = all at once.
        label_smoothing, z_loss: of the training loss, see `vocab_parallel_cross_entropy`.
        shared_embedding: weight of the embedding if it lives on this rank; used as the output weight where that is
            tied, and by blocks that predict further tokens.
        compiled: whether blocks go through torch.compile; they must have no dropout.
        saving: makes the context of a training pass, in which tensors may be saved elsewhere than on the device.

    Attributes:
        mtp_losses: for each module that predicts further tokens its weighted losses, summed over the micro-batches of
            a step so far, fp64.
    """

    def __init__(
        self,
        layers: Layers,
        blocks: range,
        *,
        first: bool,
        last: bool,
        loss_chunk: int = 0,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        shared_embedding: ShardedParameter | None = None,
        compiled: bool = False,
        saving: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        cfg = layers.cfg
        self._saving = saving
        self.first = first
        self.last = last
        self.queue, self.log = layers.queue, layers.log
        self._recompute_options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        self._recompute_options["context_fn"] = layers.log.passes
        self._sequence_shards = layers.tp.size if layers.sequence_parallel else 1
        self._hidden_size, self._dtype = cfg.hidden_size, layers.dtype
        if first:
            self.embed_tokens = layers.embedding("embed_tokens")
            if cfg.embedding_size is not None:
                self.embed_proj = layers.replicated("embed_proj")
            if (embedding := cfg.position_kind.embedding(layers)) is not None:
                self.embed_positions = embedding
            if cfg.embedding_norm:
                self.embed_norm = layers.norm("embed_norm")
            self.embedding_dropout = layers.dropout("embedding", -1)
        self._blocks = [Block(layers, i) for i in blocks]
        self.layers = nn.ModuleDict({str(i): block for i, block in zip(blocks, self._blocks)})
        self._predicting: list[PredictingBlock] = []
        self.mtp_losses: list[torch.Tensor | float] = [0.0] * cfg.mtp_num_layers
        if last:
            if cfg.last_norm:
                self.norm = layers.norm("norm")
            if cfg.embedding_size is not None:
                self.head_proj = layers.replicated("head_proj")
            kind = HEADS[cfg.head]
            self._head = kind.module_name
            self.add_module(kind.module_name, kind.module(layers, loss_chunk, label_smoothing, z_loss))
            if first:
                shared_embedding = self.embed_tokens.weight
            if cfg.tie_embeddings and shared_embedding is not None:
                self.head.weight = shared_embedding
                shared_embedding.uses += 1
            if cfg.mtp_layers:
                self._add_predicting(layers, shared_embedding)
        numbers = [*blocks, *(cfg.mtp_layers if last else ())]
        self._positions, self._chunks = [layers.positions(i) for i in numbers], [cfg.chunk_of(i) for i in numbers]
        if compiled:
            for block in self.layers.values():
                compile_block(block)

    def _add_predicting(self, layers: Layers, embedding: ShardedParameter | None) -> None:
        """Add the blocks that predict further tokens; `embedding`: its weight, if it lives on this rank."""
        cfg = layers.cfg
        self._predicting = [PredictingBlock(layers, i) for i in cfg.mtp_layers]
        self.layers.update({str(i): block for i, block in zip(cfg.mtp_layers, self._predicting)})
        if cfg.tie_embeddings:
            embedding = self.head.weight
        self.mtp_embed_tokens = layers.embedding("mtp_embed_tokens", embedding)
        for weight in (self.mtp_embed_tokens.weight, self.head.weight):
            weight.uses += len(self._predicting)
        if self.head.bias is not None:
            self.head.bias.uses += len(self._predicting)
        # What its own first uses are counted with.
        self.mtp_embed_tokens.weight.uses -= embedding is None

    @property
    def head(self) -> Any:
        """The output layer with the loss, on the last stage; its name is that of its weights."""
        return getattr(self, self._head)

    def message(self, num_tokens: int, micro_batch_size: int) -> Message:
        """Describe the hidden states that this stage passes on, and those that it expects, of `num_tokens` a sample."""
        return Message((num_tokens // self._sequence_shards, micro_batch_size, self._hidden_size), self._dtype)

    def forward(self, x: torch.Tensor, batch: MicroBatch, fwd: ForwardPass) -> torch.Tensor:
        """Run the stage.

        Args:
            x: token ids [S, B] on the first stage, else the previous stage's hidden states x_SBH (x_sBH).
            batch: the micro-batch.
            fwd: the forward pass.

        Returns:
            Hidden states x_SBH (x_sBH); on the last stage the (weighted) loss of every token, fp32 [S, B], or this
            rank's logits [S, B, V/T] (rewards [S, B, 1]) where the micro-batch has no targets.
        """
        documents = batch.in_chunks(set(self._chunks))
        if self.first:
            x = self.embed_tokens(x)
            if hasattr(self, "embed_proj"):
                x = self.embed_proj(x)
            if hasattr(self, "embed_positions"):
                x = self.embed_positions(x, batch.positions)
            if hasattr(self, "embed_norm"):
                x = self.embed_norm(x)
            x = self.embedding_dropout(x, fwd)
        fwd = replace(fwd, router_weights_SB=batch.router_weights_SB)
        # The tables of each kind of layer are made once.
        ropes = {make: make and make(batch.positions, x.device) for make in set(self._positions)}
        seen = [(ropes[make], documents[chunk]) for make, chunk in zip(self._positions, self._chunks)]
        with self._saving() if fwd.training else nullcontext():
            for block, sees in zip(self._blocks, seen):
                x = self._run(block, x, *sees, fwd)
        if not self.last:
            return x
        if hasattr(self, "norm"):
            x = self.norm(x)
        if hasattr(self, "head_proj"):
            x = self.head_proj(x)
        loss = self.head(x, batch, fwd)
        for k, (block, sees, further) in enumerate(zip(self._predicting, seen[len(self._blocks) :], batch.further)):
            fwd = replace(fwd, router_weights_SB=further.router_weights_SB)
            x = self._run(block, x, self.mtp_embed_tokens(further.tokens_SB), *sees, fwd)
            loss_SB = self.head(x, further, fwd)
            self.mtp_losses[k] = self.mtp_losses[k] + loss_SB.detach().sum(dtype=torch.float64)
            # Its gradient joins, and its value does not.
            loss = loss + (loss_SB - loss_SB.detach())
        return loss

    def _run(self, block: Block, *args: Any) -> torch.Tensor:
        """Run a block, the pass last of its arguments."""
        if block.recomputed is Extent.BLOCK and args[-1].training:
            return checkpoint(block, *args, **self._recompute_options)
        return block(*args)

    def start_step(self) -> None:
        """Forget what the step before has counted."""
        self.mtp_losses = [0.0] * len(self.mtp_losses)
        self.log.clear()

    def units(self) -> list[nn.Module]:
        """List the modules, in forward order, that together hold all parameters."""
        return [unit for chain in self.chains() for unit in chain]

    def chains(self) -> list[list[nn.Module]]:
        """List `units` in chains: in each, a pass runs one after the other."""
        ends = ("norm", "head_proj", self._head) if self.last else ()
        starts = ("embed_tokens", "embed_proj", "embed_positions", "embed_norm") if self.first else ()
        start, end = ([getattr(self, name) for name in names if hasattr(self, name)] for names in (starts, ends))
        chain = [*start, *self._blocks, *end]
        # Between two of these the output layer runs again.
        apart = [self.mtp_embed_tokens, *self._predicting] if self._predicting else []
        return [chain, *([unit] for unit in apart)]
