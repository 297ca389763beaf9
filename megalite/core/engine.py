"""What one rank trains with: the objects that `build_engine` makes and a step uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megalite.core.mesh.context import ParallelContext
from megalite.core.model.gpt import GPTStage
from megalite.core.optim.loss_scale import LossScaler
from megalite.core.optim.optimizer import DistributedOptimizer
from megalite.core.optim.unit_weights import UnitWeights
from megalite.core.options.step import StepConfig
from megalite.core.pipeline.executor import Executor
from megalite.core.pipeline.schedule import Program, Schedule, build_schedule
from megalite.core.sums import Counter

C_co = TypeVar("C_co", bound=StepConfig, covariant=True)


@dataclass
class Forward:
    """What runs forward: an `Engine`, or stages without an optimizer.

    Attributes:
        ctx: this rank's axes.
        stages: this rank's pipeline stages by global index.
        executor: runs programs over the stages.
        schedule: schedule of a step with the largest batch.
        unit_weights: gathers and releases weights where they are sharded.
    """

    ctx: ParallelContext
    stages: dict[int, GPTStage]
    executor: Executor
    schedule: Schedule
    unit_weights: UnitWeights

    @property
    def owns_losses(self) -> bool:
        """Whether the losses of this rank count: those of the last stage that see the same tokens hold the same."""
        return self.ctx.grid.is_first_except(self.ctx.rank, "pp", *self.ctx.grid.batch)

    def schedule_of(self, num_microbatches: int) -> Schedule:
        """Return the schedule of a step with this many micro-batches per data-parallel rank."""
        s = self.schedule
        return build_schedule(s.name, s.pp, s.vp, num_microbatches)


@dataclass
class Engine(Forward, Generic[C_co]):
    """All that one rank needs to run training steps.

    Attributes:
        cfg: the config (vocabulary resolved; of a run, all of it).
        eval_program: this rank's forward operations of that schedule.
        optimizer, scaler: optimizer and loss scale.
        counters: what parts count in a step.
    """

    cfg: C_co
    eval_program: Program
    optimizer: DistributedOptimizer
    scaler: LossScaler
    counters: Sequence[Counter] = ()

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank computes losses."""
        return any(stage.last for stage in self.stages.values())

    def train_program(self, num_microbatches: int) -> Program:
        """Return this rank's operations in a step with this many micro-batches."""
        return self.schedule_of(num_microbatches).programs[self.ctx.pp.rank]
