"""Where `--layout auto` acts: the layout of a new run is chosen, that of a run to be resumed is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.checkpoint.folder import checkpoints_folder, step_folders
from megalite.config.cli import Parsed, read_yaml
from megalite.config.options import LAYOUT, LAYOUT_DETAILS, with_options
from megalite.config.run import Config
from megalite.dist.context import world_size
from megalite.log import logger, setup_logging
from megalite.plan.auto import choose_layout
from megalite.plan.search import flags
from megalite.train.inputs import with_vocab_size


def settle_layout(parsed: Parsed) -> Config:
    """Return the options of a run, its layout chosen if `--layout auto` asks for that.

    Every rank chooses for itself, and all find the same; a run that resumes has the layout of its `config.yaml`.

    Raises:
        UserError: nothing fits.
    """
    if parsed.layout is None:
        return parsed.config
    setup_logging()
    cfg = parsed.config
    recorded = _recorded(cfg)
    if recorded is not None:
        kept = {name: value for name, value in recorded.items() if name not in parsed.layout}
        cfg = with_options(cfg, kept)
        words = " ".join(flags({name: kept[name] for name in LAYOUT if name in kept}))
        logger.info(f"--layout auto: resuming in the layout of {Path(cfg.run.run_dir) / 'config.yaml'}: {words}")
        return cfg
    world = world_size(otherwise=parsed.world or cfg.parallel.tp * cfg.parallel.pp)
    choice = choose_layout(with_vocab_size(cfg), world, parsed.layout)
    for line in choice.report():
        logger.info(line)
    return choice.cfg


def _recorded(cfg: Config) -> dict[str, Any] | None:
    """The layout of the run that would be resumed from this run directory; None for a new run."""
    run_dir = Path(cfg.run.run_dir)
    written = run_dir / "config.yaml"
    if cfg.run.resume == "never" or not written.exists() or not step_folders(checkpoints_folder(run_dir)):
        return None
    layer = read_yaml(written)
    return {name: layer[name].value for name in (*LAYOUT, *LAYOUT_DETAILS) if name in layer}
