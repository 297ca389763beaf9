"""Why a layout does not fit, and the one change that makes it fit and costs the least time."""

from __future__ import annotations

from typing import Any

from megalite.plan.search import Found, flags

# Options that change together: the schedule follows vp, the group of ZeRO follows its stage. dp follows tp and pp.
_CHOICES = (("tp", "sequence_parallel"), ("pp",), ("vp", "schedule"), ("micro_batch_size",), ("recompute",),
            ("zero", "zero_group"), ("offload",))  # fmt: skip


class Changes:
    """The layouts that fit, by all of their options but one choice: the neighbors of a layout that does not."""

    def __init__(self, found: list[Found]) -> None:
        self._fastest: dict[Any, Found] = {}
        for layout in found:
            if layout.fits:
                for key in _keys(layout):
                    other = self._fastest.setdefault(key, layout)
                    if (layout.time.total, layout.order) < (other.time.total, other.order):
                        self._fastest[key] = layout

    def cheapest(self, layout: Found) -> Found | None:
        """Find the fastest layout that fits and differs in one choice; None if there is none."""
        near = [self._fastest[key] for key in _keys(layout) if key in self._fastest]
        return min(near, key=lambda f: (f.time.total, f.order), default=None)

    def why_not(self, layout: Found) -> str | None:
        """Explain why a layout does not fit, and what would; None if it does."""
        cause, worst, unit = layout.cause, layout.worst, 1e9
        if cause is None:
            return None
        if cause == "host memory":
            host = max(rank.host for rank in layout.ranks)
            text = f"host memory: {host / unit:.1f} GB per rank of {layout.host_limit / unit:.1f}"
        else:
            states = worst.total - worst.activations - worst.logits
            text = (
                f"{cause}: {worst.total / unit:.1f} GB of {layout.limit / unit:.1f} (states {states / unit:.1f}, "
                f"activations {worst.activations / unit:.1f}, logits {worst.logits / unit:.1f})"
            )
        change = self.cheapest(layout)
        if change is None:
            return f"{text}; no single change makes it fit"
        slower = change.time.total / layout.time.total - 1
        return f"{text}; fits with {' '.join(flags(change.options, than=layout.options))} ({slower:+.0%} time)"


def _keys(layout: Found) -> list[tuple[Any, ...]]:
    """A key per choice: all options but those of the choice."""
    values = tuple(layout.options.items())
    return [(choice, tuple(item for item in values if item[0] not in choice)) for choice in _CHOICES]
