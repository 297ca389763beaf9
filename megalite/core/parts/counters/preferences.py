"""Preferences (`--stage dpo`): the loss of pairs in place of the cross-entropy, and its figures.

The loss of a pair depends on the log-probabilities of its two answers, sums over their tokens. So its gradient is that
of the tokens' cross-entropies, each multiplied by one number per answer, known once the sums are. No collective is
differentiated: over cp, sums of a few numbers are exchanged. Shapes: S tokens of a rank, B samples, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megalite.core.batch import ForwardPass, MicroBatch
from megalite.core.engine import Engine
from megalite.core.mesh import collectives
from megalite.core.options.choices import PREFERENCES
from megalite.core.options.step import StepConfig
from megalite.core.options.train import TrainConfig
from megalite.core.parts.preferences.dpo import Pairs, Preference
from megalite.core.sums import Counter

FIGURES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""Means over the pairs of a step, named as in TRL."""


class Preferences(Counter):
    """The loss of pairs, which the output layer asks for, and its figures: `FIGURES`, and the number of pairs."""

    name, stage = "preferences", "dpo"
    headline = "rewards/accuracies"

    def __init__(self, engine: Engine[StepConfig]) -> None:
        self._engine = engine
        self._train = engine.cfg.train
        self._cp = engine.ctx.axis("cp")
        self._kind = self._kind_of(self._train)
        self.start()

    @classmethod
    def of(cls, engine: Engine[StepConfig]) -> Preferences | None:
        """Make it the objective of a run of its stage."""
        if engine.cfg.train.stage != cls.stage:
            return None
        counter = cls(engine)
        for stage in engine.stages.values():
            if stage.last:
                stage.head.objective = counter
        return counter

    def _kind_of(self, train: TrainConfig) -> Preference:
        kind: Preference = PREFERENCES[train.dpo_loss]
        return kind

    def start(self) -> None:
        self._sums = self._zeros(len(FIGURES))

    def _zeros(self, means: int) -> torch.Tensor:
        return torch.zeros(1 + means, dtype=torch.float64, device=self._engine.ctx.device)

    def __call__(self, loss_SB: torch.Tensor, batch: MicroBatch, fwd: ForwardPass) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of the pairs, each at the one target that has a weight, and the targets' derivatives."""
        targets_SB, owners_SB, length = batch.targets_SB, batch.owners_SB, batch.positions.length
        assert targets_SB is not None
        if owners_SB is None:
            # Samples without pairs are placeholders, of a rank that could not read its data.
            owners_SB = torch.full_like(targets_SB, -1)
        samples, counted_SB = loss_SB.shape[1], (targets_SB >= 0) & (owners_SB >= 0)
        # A sample has fewer documents than places, an even number of which are set aside for it.
        room = length + length % 2
        number_SB = owners_SB.clamp(min=0) + room * torch.arange(samples, device=loss_SB.device)
        references_SB = batch.references_SB
        known = [-loss_SB.double(), counted_SB.double()]
        known.append(torch.zeros_like(known[0]) if references_SB is None else references_SB)
        sums = loss_SB.new_zeros(3, room * samples, dtype=torch.float64)
        sums.index_add_(1, number_SB.flatten(), torch.stack([(x * counted_SB).flatten() for x in known]))
        collectives.all_reduce(sums, self._cp).wait()
        (chosen, rejected), (of_chosen, of_rejected), (by_ref_c, by_ref_r) = sums.view(3, -1, 2).transpose(1, 2)
        counts = of_chosen.clamp(min=1), of_rejected.clamp(min=1)
        pairs = Pairs(chosen - by_ref_c, rejected - by_ref_r, *counts)
        found = self._kind.loss(pairs, self._train)
        pair_SB, first_SB = number_SB // 2, counted_SB.double()
        first_SB = first_SB if batch.weights_SB is None else first_SB * batch.weights_SB
        self._note(pairs, (chosen, rejected), pair_SB, first_SB)
        by_answer = torch.stack((found.by_chosen, found.by_rejected), 1).flatten()
        return (found.loss[pair_SB] * first_SB).float(), (-by_answer[number_SB] * counted_SB).float()

    def _note(
        self, pairs: Pairs, logps: tuple[torch.Tensor, torch.Tensor], pair_SB: torch.Tensor, first_SB: torch.Tensor
    ) -> None:
        """Add to the figures the pairs that have their first target here: 1 in `first_SB`, and their number."""
        gain_c, gain_r = pairs.chosen, pairs.rejected
        if self._kind.by_token:
            gain_c, gain_r = gain_c / pairs.of_chosen, gain_r / pairs.of_rejected
        beta = self._train.dpo_beta
        rewards = beta * gain_c, beta * gain_r, beta * (gain_c - gain_r), (gain_c > gain_r).double()
        figures = torch.stack((torch.ones_like(gain_c), *rewards, *logps))
        self._sums += (figures[:, pair_SB] * first_SB).sum((1, 2))

    def sums(self) -> torch.Tensor:
        return self._sums if self._engine.owns_losses else torch.zeros_like(self._sums)

    def figures(self, sums: Sequence[float], targets: float) -> dict[str, float]:
        pairs, *rest = sums
        return {"pairs": pairs, **{name: x / pairs for name, x in zip(FIGURES, rest) if pairs}}

    def losses(self, figures: dict[str, float]) -> dict[str, float]:
        return figures


COUNTER = Preferences.of
