"""`--layout auto`: the layout of a run on the machine at hand, with the reasons for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megalite.config.options import with_options
from megalite.config.run import Config
from megalite.errors import UserError
from megalite.plan import device
from megalite.plan.search import SAME_TIME, SHARE, Found, flags, pick, search


@dataclass(frozen=True)
class Choice:
    """A layout, and what it was chosen from.

    Attributes:
        cfg: the run with the layout.
        best: the layout.
        runner_up: the fastest of the others that fit; None if there is none.
        found, fits: number of layouts, and of those that fit.
        machine: devices and rates, in words.
    """

    cfg: Config
    best: Found
    runner_up: Found | None
    found: int
    fits: int
    machine: str

    def report(self) -> list[str]:
        """Say in a few lines what was chosen and why, and the flags that make the same layout."""
        lines = [f"--layout auto on {self.machine}"]
        lines += [f"  {self.fits:,} of {self.found:,} layouts fit into {SHARE:.0%} of the memory"]
        lines += [f"  chosen: {describe(self.best)}"]
        if self.runner_up is not None:
            lines += [f"  runner-up: {describe(self.runner_up)}", f"    not chosen: {self._why_not(self.runner_up)}"]
        return [*lines, f"  the same again: {' '.join(flags(self.best.options))}"]

    def _why_not(self, other: Found) -> str:
        ratio = other.time.total / self.best.time.total
        if ratio >= SAME_TIME:
            return f"{ratio - 1:.1%} slower"
        changed = flags(self.best.options, than=other.options)
        pace = f"{abs(ratio - 1):.1%} {'slower' if ratio >= 1 else 'faster'}"
        return f"{pace}, and within {SAME_TIME - 1:.0%} the simpler layout is taken ({' '.join(changed)})"


def choose_layout(cfg: Config, world: int, settled: Collection[str] = ()) -> Choice:
    """Choose the layout with the least predicted time of those that fit; the same arguments give the same choice.

    Args:
        cfg: the run, its vocabulary known.
        world: number of ranks.
        settled: options of the layout that stay as they are.

    Raises:
        UserError: nothing fits, or nothing divides.
    """
    if cfg.model.vocab_size is None:
        rule = "requires the size of the vocabulary"
        raise UserError("--layout auto", rule, "give --vocab-size, --tokenizer or --data")
    seen = device.read_device(cfg.parallel.device)
    cluster, source = device.machine(seen, world, cfg.run.calibration)
    planned, fixed = cfg, set(settled)
    if seen.on_cpu:
        planned = with_options(cfg, {"device": "cpu"})
        fixed.add("offload")  # there is nowhere to offload to
    found = search(planned, cluster, fixed)
    best = pick(found)
    if best is None:
        raise _too_large(found, world, seen)
    others = [f for f in found if f.fits and f is not best]
    chosen = with_options(cfg, best.options)
    words = f"{world} x {seen.name}, {_size(seen.memory)} each ({source})"
    return Choice(chosen, best, min(others, key=lambda f: (f.time.total, f.order), default=None),
                  len(found), len(others) + 1, words)  # fmt: skip


def describe(layout: Found) -> str:
    """Describe a layout in one line, with its memory and time."""
    o, grid = layout.options, layout.grid
    words = [f"dp {grid['dp']}", f"pp {o['pp']}", f"tp {o['tp']}"]
    words += [f"vp {o['vp']}"] * (o["vp"] > 1) + [o["schedule"]] * (o["pp"] > 1)
    words += [f"ZeRO-{o['zero']}"] + [f"in groups of {o['zero_group']}"] * (o["zero_group"] != "full")
    words += [f"micro-batch {o['micro_batch_size']}", f"recompute {o['recompute']}"]
    words += [f"offload {o['offload']}"] * (o["offload"] != "none")
    memory = _size(layout.worst.total)
    if host := max(rank.host for rank in layout.ranks):
        memory += f", {_size(host)} on the host"
    return f"{', '.join(words)}: {memory}, {layout.time.total:.3g} s per step"


def _size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _too_large(found: list[Found], world: int, seen: device.Seen) -> UserError:
    least = min(found, key=lambda f: f.worst.total)
    need, host = least.worst.total, max(rank.host for rank in least.ranks)
    words = " ".join(flags(least.options))
    rule = (
        f"no layout fits: the smallest needs {need:,} bytes per rank of {least.limit:,.0f} ({SHARE:.0%} of its memory)"
    )
    if need <= least.limit:
        rule = f"no layout fits: the smallest needs {host:,} bytes of host memory per rank of {least.host_limit:,.0f}"
    return UserError(
        f"--layout auto on {world} x {seen.name}",
        f"{rule}, with {words}",
        "use more ranks, a smaller model or --seq-len",
    )
