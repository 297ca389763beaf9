"""Rewards (`--stage reward`): the loss of pairs of documents that have one each, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megalite.core.options.train import TrainConfig
from megalite.core.parts.counters.preferences import Preferences
from megalite.core.parts.preferences.dpo import PairLoss, Pairs, Preference, logistic

MEANS = ("accuracy", "margin", "mean_reward")
"""Figures that are means over the pairs of a step, named as in TRL; beside these, the least and the highest reward."""


def bradley_terry(pairs: Pairs, options: Any) -> PairLoss:
    """-ln sigmoid(c - r), of Bradley and Terry (Ouyang et al. 2022, arXiv:2203.02155, equation 1), and
    `reward_center` (c + r)^2, which keeps rewards near 0 (Eisenstein et al. 2023, arXiv:2312.09244).
    """
    loss, by = logistic(pairs.chosen - pairs.rejected, 0.0)
    total = pairs.chosen + pairs.rejected
    slope = 2 * options.reward_center * total
    return PairLoss(loss + options.reward_center * total**2, by + slope, slope - by)


class Rewards(Preferences):
    """What a document gains is its reward. Figures: `MEANS`, min_reward, max_reward, and the number of pairs."""

    name, stage = "rewards", "reward"
    headline = "accuracy"

    def _kind_of(self, train: TrainConfig) -> Preference:
        return Preference(bradley_terry, has_reference=False)

    def start(self) -> None:
        self._sums = self._zeros(len(MEANS))
        self._most = torch.full_like(self._sums[:2], -torch.inf)

    def _note(
        self, pairs: Pairs, logps: tuple[torch.Tensor, torch.Tensor], pair_SB: torch.Tensor, first_SB: torch.Tensor
    ) -> None:
        c, r = pairs.chosen, pairs.rejected
        figures = torch.stack((torch.ones_like(c), (c > r).double(), c - r, (c + r) / 2))
        self._sums += (figures[:, pair_SB] * first_SB).sum((1, 2))
        most = torch.stack((torch.maximum(-c, -r), torch.maximum(c, r)))[:, pair_SB]
        self._most = torch.maximum(self._most, most.where(first_SB > 0, -torch.inf).amax((1, 2)))

    def sums(self) -> torch.Tensor:
        """Return sums, and the most of -rewards and of rewards: of each rank with samples of its own, in its place."""
        sums, batch = super().sums(), self._engine.ctx.batch
        most = sums.new_zeros(batch.size, 2)
        if self._engine.owns_losses and self._engine.has_last_stage:
            most[batch.rank] = self._most
        return torch.cat((sums, most.flatten()))

    def figures(self, sums: Sequence[float], targets: float) -> dict[str, float]:
        pairs, *rest = sums
        if not pairs:
            return {"pairs": 0.0}
        least, most = -max(rest[len(MEANS) :: 2]), max(rest[len(MEANS) + 1 :: 2])
        means = {name: x / pairs for name, x in zip(MEANS, rest)}
        return {"pairs": pairs, **means, "min_reward": least, "max_reward": most}


COUNTER = Rewards.of
