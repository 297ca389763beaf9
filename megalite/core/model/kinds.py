"""What a kind of layer is: a block has a mixer (`layers.N.self_attn`) and a feed-forward layer (`layers.N.mlp`), and a
model ends in a head.

A family names both for every layer (`Family.block_kind`); `MIXERS` and `FEED_FORWARDS` hold the kinds by name. A kind
is one object, and all that differs between kinds is asked of it: parameters, partition, FLOPs and the planner's memory
and time. It is a description, read without torch; `module` makes the layer itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from megalite.core.base.table import Table
from megalite.core.model.saved import SavedTensor
from megalite.core.options.model import ModelConfig
from megalite.core.options.step import StepConfig
from megalite.core.sharding import ParamSpec

if TYPE_CHECKING:  # plans read kinds, and start without torch
    from torch import nn

    from megalite.core.model.layers import Layers


Objective = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(what a head loses by each target, detached, fp32 [S, B]; `MicroBatch`; `ForwardPass`) -> (losses, to be summed; the
derivative of that sum of all ranks by each of those): both fp32 [S, B]."""


class LayerKind(ABC):
    """A sub-layer of a block, of either sort.

    Attributes:
        feeds_one_product: whether its input goes to one dense linear layer and nowhere else: with `--fp8`, the norm
            before it may note codes.
    """

    feeds_one_product = False

    @abstractmethod
    def specs(self, cfg: ModelConfig, name: str) -> list[ParamSpec]:
        """Declare its parameters under the global name `name`, in the order of the forward pass."""

    def buffers(self, cfg: ModelConfig, name: str) -> list[ParamSpec]:
        """Declare what is no parameter and still saved with the weights, whole on every rank and in fp32 always."""
        return []

    def matrices(self, cfg: ModelConfig) -> list[ParamSpec]:
        """List the matrices [out, in] that every token is multiplied with."""
        return [spec for spec in self.specs(cfg, "") if spec.ndim == len(spec.shape) == 2]

    @abstractmethod
    def saved(self, cfg: StepConfig) -> list[SavedTensor]:
        """List what it keeps for backward: not its input, which the block counts, nor the core of a mixer."""

    @abstractmethod
    def touched(self, cfg: ModelConfig) -> int:
        """Count the values per token that its elementwise kernels read and write in the forward pass."""

    def remembered(self, cfg: StepConfig) -> list[SavedTensor]:
        """List what it keeps even where its block is recomputed."""
        return []

    def deferred(self, cfg: StepConfig) -> int:
        """Compute the bytes that products apart from `matrices` keep for weight gradients that are deferred."""
        return 0

    def weight_work(self, cfg: ModelConfig) -> int:
        """Count the multiply-adds of a token with weights, in its forward pass."""
        return sum(spec.numel for spec in self.matrices(cfg))


class Mixer(LayerKind):
    """What mixes the tokens of a sample.

    Attributes:
        passes_states: where ranks of cp share samples, it passes states on; the others share attention.
    """

    passes_states = False

    @abstractmethod
    def module(self, layers: Layers, index: int, recompute_core: bool) -> nn.Module:
        """Make the mixer of block `index`, called with (x_SBH, rope, documents, fwd), to the shape of x.

        Args:
            recompute_core: recompute its core in backward (`--recompute selective`).
        """

    def core(self, cfg: StepConfig) -> list[SavedTensor]:
        """List what its core keeps for backward, the part that `--recompute selective` computes again."""
        return []

    def core_matrices(self, cfg: ModelConfig) -> list[ParamSpec]:
        """List those of `matrices` in its core: under cp they meet the tokens of all ranks, and again in backward."""
        return []

    def passed(self, cfg: ModelConfig, samples: int, cp: int, tp: int, element: int) -> tuple[int, int, int]:
        """Count the bytes of a rank's messages in forward where ranks of cp share `samples` and it passes states on.

        Args:
            element: bytes of an activation.

        Returns:
            What goes to all of them; then what a rank exchanges with them, and what it gets in answer.
        """
        return 0, 0, 0

    def plain_work(self, cfg: ModelConfig, cp: int) -> float:
        """Count the multiply-adds of a token with others in plain fp32 products; 0: a kernel of attention has them."""
        return 0.0

    def work(self, cfg: StepConfig) -> int:
        """Compute the bytes that its backward pass takes per micro-batch beyond what it keeps and frees."""
        return 0

    def core_input(self, cfg: StepConfig) -> list[SavedTensor]:
        """List what is kept instead where the core is recomputed."""
        return []

    def tp_widths(self, cfg: ModelConfig) -> tuple[int, int]:
        """Return the values per token that its products read over tp, and those gathered again for weight gradients."""
        return cfg.hidden_size, cfg.hidden_size

    def token_work(self, cfg: ModelConfig, layer: int) -> tuple[float, float]:
        """Count the multiply-adds of a token with all that it may see, and those that a causal mask leaves."""
        return 0.0, 0.0


class FeedForward(LayerKind):
    """What transforms each token by itself."""

    @abstractmethod
    def module(self, layers: Layers, index: int) -> nn.Module:
        """Make the feed-forward layer of block `index`, called with (x_SBH, fwd), to the shape of x."""


class Head(ABC):
    """What reads the last hidden states: the output layer, and the loss where there are targets.

    Attributes:
        module_name: global name of its module, which those of its parameters begin with.
    """

    module_name: ClassVar[str]

    @abstractmethod
    def specs(self, cfg: ModelConfig) -> list[ParamSpec]:
        """Declare its parameters."""

    @abstractmethod
    def weight_work(self, cfg: ModelConfig) -> int:
        """Count the multiply-adds of a token with its weights, without padding."""

    def copied(self, cfg: StepConfig) -> int:
        """Compute the bytes that it keeps for backward per micro-batch beside its input and what it makes of it."""
        return 0

    @abstractmethod
    def module(self, layers: Layers, loss_chunk: int, label_smoothing: float, z_loss: float) -> nn.Module:
        """Make it, called with (x_SBH, micro-batch, pass), to losses fp32 [S, B]. It has an `objective`: a loss of what
        it loses by each target; None: their weighted sum. For the other arguments see `TrainConfig`.
        """


MIXERS: Table[Mixer] = Table("megalite.core.parts.mixers", "MIXER")
"""Name (`BlockKind.mixer`) -> mixer."""

FEED_FORWARDS: Table[FeedForward] = Table("megalite.core.parts.ffn", "FEED_FORWARD")
"""Name (`BlockKind.feed_forward`) -> feed-forward layer."""

HEADS: Table[Head] = Table("megalite.core.parts.heads", "HEAD")
"""Name (`ModelConfig.head`) -> head."""
