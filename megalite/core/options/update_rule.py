"""The interface of an optimizer: its state per weight, and the update of a flat share of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from megalite.core.base.table import Table
from megalite.core.options.part import OptimPart

if TYPE_CHECKING:
    from torch import Tensor


class TrustRatios(Protocol):
    """Ratios of norms of full parameters, also where a share holds only a range of one.

    Attributes:
        offsets: start of each parameter in this rank's share, then the end of the share.
    """

    @property
    def offsets(self) -> tuple[int, ...]: ...

    def __call__(self, weights: Tensor, update: Tensor, ratio: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return `ratio`(norms of `weights`, norms of `update`) of each parameter, fp32 [parameters].

        It is 1 where a norm is 0, and for parameters without weight decay (norms, biases). A collective call: all
        ranks with a share or shard of these parameters make it.
        """
        ...


class Share(NamedTuple):
    """This rank's flat share of a bucket of parameters, and the arguments of one step.

    Attributes:
        master: master weights, fp32 [n]; updated in place.
        states: the rule's states in the order of `UpdateRule.states`, fp32 [n] each; updated in place.
        grad: gradient, fp32 [n], not yet multiplied by `grad_multiplier`; may be overwritten.
        weights: weights [n] in the model's dtype, to be overwritten; None if the masters are the weights.
        grad_multiplier: factor on the gradient, fp32, 0-dim: clipping and unscaling.
        lr, weight_decay: learning rate and weight decay of these parameters in this step.
        step: number of updates, including this one.
        ops: kernels for the device of the share.
        trust_ratios: trust ratios of these parameters.
    """

    master: Tensor
    states: tuple[Tensor, ...]
    grad: Tensor
    weights: Tensor | None
    grad_multiplier: Tensor
    lr: float
    weight_decay: float
    step: int
    ops: Any
    trust_ratios: TrustRatios

    def scaled_grad(self) -> Tensor:
        """Multiply the gradient by `grad_multiplier` in place and return it; to be called once."""
        return self.grad.mul_(self.grad_multiplier)

    def round_weights(self) -> None:
        """Round the masters to the weights, for rules whose kernel does not."""
        if self.weights is not None:
            self.weights.copy_(self.master)


class UpdateRule(OptimPart, ABC):
    """An optimizer with an element-wise update, except for norms of parameters (`Share.trust_ratios`).

    Attributes:
        states: names of the states, one value per weight, initially 0. Checkpoints store them under these names:
            a run that changes its optimizer keeps the states that both have ("exp_avg").
        own: those of them that mean something else in other optimizers, which do not take them over.
        width_power: power of muP's width multiplier by which the learning rate of the blocks' matrices is divided, and
            their weight decay multiplied; None: unknown, muP is refused.
    """

    after = "eps"

    states: ClassVar[tuple[str, ...]] = ()
    own: ClassVar[tuple[str, ...]] = ()
    width_power: ClassVar[float | None] = None

    @abstractmethod
    def update(self, share: Share, cfg: Any) -> None:
        """Update masters, states and weights of a share.

        Args:
            share: share of one bucket.
            cfg: the options (`OptimConfig`), of which learning rate and weight decay are taken from the share instead.
        """


class MatrixRule(UpdateRule):
    """An optimizer of the blocks' matrices that transforms each full matrix on one rank.

    A step calls `direction` for all shares, `transform` for every matrix on its owner, then `update`, with the result
    of `transform` in `share.grad`. Matrices are logical: q, k, v, gate and up are separate.

    Attributes:
        others: name of the update rule of embeddings, output layer, norms and biases.
        batched: whether `transform` also takes matrices of one shape together, fp32 [n, out, in].
    """

    others: ClassVar[str] = "adamw"
    batched: ClassVar[bool] = False

    @abstractmethod
    def direction(self, share: Share, cfg: Any) -> None:
        """Update the states, and overwrite `share.grad` with the input of `transform`."""

    @abstractmethod
    def transform(self, matrix: Tensor, cfg: Any) -> Tensor:
        """Transform a full matrix, fp32 [out, in]; the result has the same shape. May overwrite its input."""

    def transform_dtype(self, cfg: Any) -> str:
        """Return the type of the products of `transform`, "bf16" or "fp32", for plans."""
        return "fp32"

    def transform_flops(self, out: int, inner: int, cfg: Any) -> float:
        """Count the FLOPs of `transform` on an [out, inner] matrix, for plans; 0: they do not matter."""
        return 0.0


RULES: Table[UpdateRule] = Table("megalite.core.parts.update", "RULE")
"""Name (`--optimizer`) -> update rule."""
