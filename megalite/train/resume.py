"""Choose the checkpoint that a run starts from, check that it belongs to the run, and load it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megalite.checkpoint.hf.config import TRAINING_ONLY
from megalite.checkpoint.load import find_good, load_checkpoint, model_config, read_meta, verify_together
from megalite.checkpoint.manifest import read_manifest
from megalite.config.options import GROUPS
from megalite.config.run import Config
from megalite.dist.agree import agree
from megalite.dist.context import ParallelContext
from megalite.errors import UserError
from megalite.log import logger
from megalite.train.build import Engine

# Data options that determine the order of samples.
_ORDER = ("seed", "seq_len", "data", "valid_data", "split", "shuffle", "mock_data")

# Run options that influence updates.
_RUN = ("on_spike", "spike_threshold")


def choose_checkpoint(cfg: Config, run_dir: Path, ctx: ParallelContext) -> Path | None:
    """Find and verify the checkpoint to start from, the same on every rank; None for a new run."""
    asked, fallback = cfg.run.resume, cfg.run.resume_fallback
    if asked == "never":
        return None
    if asked == "latest":
        return find_good(run_dir / "checkpoints", ctx, fallback)
    path = Path(asked)
    if (path / "checkpoints").is_dir():
        found = find_good(path / "checkpoints", ctx, fallback)
        if found is not None:
            return found
    if not (path / "manifest.json").exists():
        raise UserError(
            f"--resume {path}",
            "must be latest, never, a checkpoint, or a run directory with a checkpoint",
            "check the path",
        )
    verify_together(path, ctx)
    return path


def resume(engine: Engine, source: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Check that a checkpoint fits the run, and load it into the engine; return its metadata."""
    saved = agree(engine.ctx, lambda: read_meta(source))
    ours = json.loads(json.dumps(meta))
    # An option that is newer than the checkpoint has its default there.
    theirs = agree(engine.ctx, lambda: model_config(saved, source))
    free = {*TRAINING_ONLY, *(("max_position_embeddings",) if engine.cfg.model.position == "rope" else ())}
    differ = [
        f"{key} {there} there, {here} here"
        for key, here in vars(engine.cfg.model).items()
        if key not in free and (there := getattr(theirs, key)) != here
    ]
    if differ:
        raise UserError(
            f"checkpoint {source}",
            f"was made with another model ({'; '.join(differ)})",
            "use the same model options, another --run-dir, or --resume never",
        )
    _check_data(source, saved, ours)
    optimizer = engine.optimizer
    load_checkpoint(source, optimizer.states(), engine.ctx, verify=False)
    # Imported weights come without optimizer state.
    if saved["scalars"]:
        optimizer.load_scalars(saved["scalars"])
        engine.scaler.load_scalars(saved["scalars"])
    optimizer.finish_load()
    logger.info(f"resumed from {source} at step {saved['step']}")
    there, here = read_manifest(source).topology, engine.ctx.grid.as_dict()
    if there != here:
        layouts = [", ".join(f"{key} {value}" for key, value in layout.items()) for layout in (there, here)]
        logger.info(f"saved by {layouts[0]}; continuing with {layouts[1]}: the data order is unchanged")
    return saved


def log_changes(saved: dict[str, Any], meta: dict[str, Any]) -> None:
    """Log the options because of which a resumed run continues differently from the one that saved."""
    changed = [
        f"--{key.replace('_', '-')} {there} -> {here}"
        for section in ("model", "train", "optim", "run")
        if section in saved["config"]
        for key, here in json.loads(json.dumps(meta["config"][section])).items()
        if (section != "run" or key in _RUN) and (there := _recorded(saved, section)[key]) != here
    ]
    if changed:
        logger.info(f"options changed since that checkpoint: {', '.join(changed)}")


def _recorded(saved: dict[str, Any], section: str) -> dict[str, Any]:
    """Return a section of the config that a checkpoint records; options that are newer than it have their defaults."""
    defaults = json.loads(json.dumps(dataclasses.asdict(GROUPS[section]())))
    return {**defaults, **saved["config"].get(section, {})}


def _check_data(source: Path, saved: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuse another tokenizer or other data: the order of samples would change silently."""
    if saved.get("tokenizer_sha256") and ours["tokenizer_sha256"]:
        there, here = saved["tokenizer_sha256"], ours["tokenizer_sha256"]
        if there != here:
            raise UserError(
                f"--tokenizer of SHA-256 {here}",
                f"checkpoint {source} was trained with the one of SHA-256 {there}",
                "use that tokenizer, or --resume never",
            )
    if not saved.get("data_hash"):
        return
    there, here = (
        {"seq_len": model["seq_len"], "seed": train["seed"], **data}
        for model, train, data in ([_recorded(m, part) for part in ("model", "train", "data")] for m in (saved, ours))
    )
    reordered = any(there[key] != here[key] for key in ("seed", "shuffle"))
    if reordered or saved["data_hash"] != ours["data_hash"]:
        changed = [f"{key} {there[key]} there, {here[key]} here" for key in _ORDER if there[key] != here[key]]
        raise UserError(
            "the training data",
            f"checkpoint {source} was trained on other samples ({'; '.join(changed) or 'the files have changed'})",
            "use the data, --split and --seed of the run, or --resume never",
        )
