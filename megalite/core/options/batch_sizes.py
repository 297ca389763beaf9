"""Global batch size of each step (`--batch-size-schedule`), and the samples that steps consume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

Phases = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class BatchSizes:
    """Global batch sizes by phase.

    Attributes:
        phases: (completed steps from which it applies, samples per step), in order; the first from 0.
    """

    phases: tuple[tuple[int, int], ...]

    @classmethod
    @lru_cache(maxsize=64)
    def read(cls, text: str) -> BatchSizes:
        """Read "STEP:SIZE STEP:SIZE ...".

        Raises:
            ValueError: the message is the rule that the text breaks.
        """
        try:
            phases = tuple((int(step), int(size)) for step, size in (pair.split(":") for pair in text.split()))
        except ValueError:
            raise ValueError("must be STEP:SIZE pairs of whole numbers") from None
        steps = [step for step, _ in phases]
        if steps[:1] != [0]:
            raise ValueError("must begin with the batch size of step 0")
        if any(later <= step for step, later in zip(steps, steps[1:])):
            raise ValueError("must list steps in increasing order, each once")
        return cls(phases)

    @classmethod
    def by_samples(cls, thresholds: Phases) -> BatchSizes:
        """Convert thresholds in samples to steps: a size applies from the first step at or after its threshold.

        Args:
            thresholds: (consumed samples, samples per step), in increasing order, the first from 0.
        """
        phases: list[tuple[int, int]] = []
        steps_before = consumed = 0
        for (_, size), (following, _) in zip(thresholds, thresholds[1:]):
            steps = max(0, -(-(following - consumed) // size))
            phases += [(steps_before, size)] if steps else []
            steps_before, consumed = steps_before + steps, consumed + steps * size
        return cls((*phases, (steps_before, thresholds[-1][1])))

    def __str__(self) -> str:
        return " ".join(f"{step}:{size}" for step, size in self.phases)

    @property
    def summary(self) -> str:
        """The phases, or the first and last of many: "16 samples, 32 from step 401 on"."""
        (_, first), *others = self.phases
        shown = [f"{size:,} from step {start + 1:,} on" for start, size in others]
        if len(shown) > 4:
            shown[2:-1] = [f"... ({len(self.phases)} sizes)"]
        return ", ".join([f"{first:,} samples", *shown])

    @property
    def sizes(self) -> list[int]:
        """The distinct sizes, in increasing order."""
        return sorted({size for _, size in self.phases})

    def size(self, step: int) -> int:
        """Return the samples of optimizer step `step` (the first is 1)."""
        return next(size for start, size in reversed(self.phases) if start < step)

    def samples(self, steps: int) -> int:
        """Count the samples of the first `steps` steps."""
        return sum(size * max(0, min(steps, end) - start) for start, end, size in self._spans(steps))

    def steps(self, samples: int) -> int:
        """Count the complete steps, from the first, that `samples` are enough for."""
        completed = 0
        for start, end, size in self._spans(samples):
            fit = min(end - start, samples // size)
            completed, samples = completed + fit, samples - fit * size
            if fit < end - start:
                break
        return completed

    def steps_to(self, samples: int) -> int:
        """Count the steps, from the first, that it takes to consume `samples`."""
        complete = self.steps(samples)
        return complete + (self.samples(complete) < samples)

    def from_then_on(self, step: int, later: BatchSizes) -> BatchSizes:
        """Return these sizes for the first `step` steps, and those of `later` after them."""
        before = [phase for phase in self.phases if phase[0] < step]
        after = [phase for phase in later.phases if phase[0] > step]
        at = [] if before and before[-1][1] == later.size(step + 1) else [(step, later.size(step + 1))]
        return BatchSizes((*before, *at, *after))

    def following(self, step: int) -> Iterator[int]:
        """Yield the samples of each step after step `step`, without end."""
        return map(self.size, count(step + 1))

    def _spans(self, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first step - 1, last step, size) of each phase; the final one ends at `last` or before it begins."""
        ends = [start for start, _ in self.phases[1:]] + [max(last, self.phases[-1][0])]
        return ((start, end, size) for (start, size), end in zip(self.phases, ends))
