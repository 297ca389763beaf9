"""Rewards of tokens, and the loss that an objective makes of them.

Shapes: S sequence (s = S / tp with sequence parallelism), B micro-batch, H hidden.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from megalite.core.batch import ForwardPass, MicroBatch
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.model.kinds import Objective
from megalite.core.model.layers import Layers


class Score(nn.Module):
    """r = w x, in fp32 whatever the type of x.

    Attributes:
        objective: the loss of rewards; what is lost by a target is its token's reward, with the sign turned.
    """

    objective: Objective | None = None

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.weight = layers.param("score.weight")
        self.sequence = layers.tp if layers.sequence_parallel else Axis("own")
        self.scale = 1 / layers.cfg.width_multiplier

    def forward(self, x: torch.Tensor, batch: MicroBatch, fwd: ForwardPass) -> torch.Tensor:
        """Map x_SBH (x_sBH) to losses [S, B], or without targets to rewards [S, B, 1]; fp32."""
        own_sB = F.linear(x.float(), self.weight.float())[..., 0] * self.scale
        rewards_SB, work = collectives.start_all_gather(own_sB.detach(), self.sequence)
        work.wait()
        if batch.targets_SB is None:
            return rewards_SB.unsqueeze(-1)
        assert self.objective is not None, "a step on rewards has pairs of answers"
        losses_SB, weights_SB = self.objective(-rewards_SB, batch, fwd)
        # All ranks of tp know all rewards, and each has the gradient of its own: its value does not join.
        first, held = self.sequence.rank * len(own_sB), len(own_sB)
        weighted_sB = own_sB * -weights_SB[first : first + held]
        return losses_SB + F.pad(weighted_sB - weighted_sB.detach(), (0, 0, first, len(losses_SB) - first - held))
