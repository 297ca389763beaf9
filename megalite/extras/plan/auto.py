"""`--layout auto`: choose the layout of a new run on the machine at hand, and say why; a resumed run keeps its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from megalite.core.base.errors import UserError, require
from megalite.core.base.log import logger, setup_logging
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.rendezvous import world_size
from megalite.extras.plan import device
from megalite.extras.plan.report import describe, flags, why_second
from megalite.extras.plan.search import SHARE, Candidate, pick, search
from megalite.runtime.options.cli import CommandLine, read_yaml
from megalite.runtime.options.fields import LAYOUT, LAYOUT_DETAILS, with_options
from megalite.runtime.options.run import Config
from megalite.runtime.places.names import checkpoints_folder, step_folders
from megalite.runtime.start.inputs import with_vocab_size


def settle_layout(parsed: CommandLine) -> Config:
    """Return the options of a run, with `--layout auto` resolved.

    Every rank chooses the same layout for itself; a run that resumes keeps the layout of its `config.yaml`.

    Raises:
        UserError: nothing fits.
    """
    if parsed.layout is None:
        return parsed.config
    rule = "would choose another one on the ranks that are left after a loss"
    require(not parsed.config.run.elastic, "--elastic with --layout auto", rule, "give the layout that it prints")
    setup_logging()
    cfg = parsed.config
    recorded = _recorded(cfg)
    if recorded is not None:
        kept = {name: value for name, value in recorded.items() if name not in parsed.layout}
        cfg = with_options(cfg, kept)
        words = " ".join(flags({name: kept[name] for name in LAYOUT if name in kept}))
        logger.info(f"--layout auto: resuming in the layout of {cfg.run.folder / 'config.yaml'}: {words}")
        return cfg
    world = world_size(otherwise=parsed.world or Grid.from_config(cfg.parallel).world)
    choice = choose_layout(with_vocab_size(cfg), world, parsed.layout)
    for line in choice.report():
        logger.info(line)
    return choice.cfg


def _recorded(cfg: Config) -> dict[str, Any] | None:
    """Read the layout of the run that would be resumed from this run directory; None for a new run."""
    run_dir = cfg.run.folder
    written = run_dir / "config.yaml"
    if cfg.run.resume == "never" or not written.exists() or not step_folders(checkpoints_folder(run_dir)):
        return None
    layer = read_yaml(written)
    return {name: layer[name].value for name in (*LAYOUT, *LAYOUT_DETAILS) if name in layer}


@dataclass(frozen=True)
class Choice:
    """A layout, and what it was chosen from.

    Attributes:
        cfg: options of the run in this layout.
        best: the layout.
        runner_up: the fastest of the other layouts that fit; None if there is none.
        considered, fits: number of layouts, and of those that fit.
        machine: devices and rates, in words.
    """

    cfg: Config
    best: Candidate
    runner_up: Candidate | None
    considered: int
    fits: int
    machine: str

    def report(self) -> list[str]:
        """Describe in a few lines what was chosen and why, and the flags of the layout."""
        lines = [f"--layout auto on {self.machine}"]
        lines += [f"  {self.fits:,} of {self.considered:,} layouts fit into {SHARE:.0%} of the memory"]
        lines += [f"  chosen: {_in_words(self.best)}"]
        if self.runner_up is not None:
            lines += [
                f"  runner-up: {_in_words(self.runner_up)}",
                f"    not chosen: {why_second(self.runner_up, self.best)}",
            ]
        return [*lines, f"  as flags: {' '.join(flags(self.best.options))}"]


def choose_layout(cfg: Config, world: int, settled: Collection[str] = ()) -> Choice:
    """Choose a layout that fits, by predicted time; the same arguments give the same choice.

    Args:
        cfg: options of the run, vocabulary size known.
        world: number of ranks.
        settled: names of options in `LAYOUT` that keep their values.

    Raises:
        UserError: nothing fits, or nothing divides.
    """
    if cfg.model.vocab_size is None:
        rule = "requires the size of the vocabulary"
        raise UserError("--layout auto", rule, "give --vocab-size, --tokenizer or --data")
    detected = device.read_device(cfg.parallel.device)
    cluster, source = device.machine(detected, world, cfg.run.calibration)
    planned, fixed = cfg, set(settled)
    if detected.on_cpu:
        planned = with_options(cfg, {"device": "cpu"})
        fixed.add("offload")  # there is nothing to offload to
    candidates = search(planned, cluster, fixed)
    best = pick(candidates)
    if best is None:
        raise _too_large(candidates, world, detected)
    others = [f for f in candidates if f.fits and f is not best]
    chosen = with_options(cfg, best.options)
    words = f"{world} x {detected.name}, {_size(detected.memory)} each ({source})"
    return Choice(
        chosen,
        best,
        min(others, key=lambda f: (f.time.total, f.order), default=None),
        len(candidates),
        len(others) + 1,
        words,
    )


def _in_words(layout: Candidate) -> str:
    """Describe a layout in one line, with its memory and time."""
    memory = _size(layout.worst.total)
    if host := max(rank.host for rank in layout.ranks):
        memory += f", {_size(host)} on the host"
    return f"{', '.join(describe(layout))}: {memory}, {layout.time.total:.3g} s per step"


def _size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _too_large(candidates: list[Candidate], world: int, detected: device.DetectedDevice) -> UserError:
    least = min(candidates, key=lambda f: f.worst.total)
    need, host = least.worst.total, max(rank.host for rank in least.ranks)
    words = " ".join(flags(least.options))
    rule = (
        f"no layout fits: the smallest needs {need:,} bytes per rank, of {least.limit:,.0f} ({SHARE:.0%} of its memory)"
    )
    if need <= least.limit:
        rule = f"no layout fits: the smallest needs {host:,} bytes of host memory per rank, of {least.host_limit:,.0f}"
    return UserError(
        f"--layout auto on {world} x {detected.name}",
        f"{rule}, with {words}",
        "use more ranks, a smaller model or --seq-len",
    )
