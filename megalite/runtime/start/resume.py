"""Choose the checkpoint that a run starts from, check that it belongs to the run, and load it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.engine import Engine
from megalite.core.mesh.agree import agree
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import ParallelContext
from megalite.core.model.dropout import VERSION_OF_MASKS
from megalite.core.options.model import ModelConfig
from megalite.core.options.optim import OptimConfig
from megalite.core.options.rates import full_batch, rates_at
from megalite.core.options.train import TrainConfig
from megalite.runtime.base.permitted import permitted
from megalite.runtime.base.urls import is_url
from megalite.runtime.checkpoint.hf.config import TRAINING_ONLY
from megalite.runtime.checkpoint.load import Verified, find_good, load_checkpoint, model_config, verify_together
from megalite.runtime.checkpoint.manifest import read_manifest
from megalite.runtime.checkpoint.meta import require_entries
from megalite.runtime.checkpoint.mirror import Mirror, copy_together
from megalite.runtime.checkpoint.new_head import NEW_HEAD, gets_new_head, taken_over, tensors_only_in
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint
from megalite.runtime.data import VERSION_OF_DATA
from megalite.runtime.options.fields import GROUPS
from megalite.runtime.options.run import Config
from megalite.runtime.places.names import checkpoints_folder, refuse_megatron, step_folders
from megalite.runtime.start.moments import unfit_moments

# Data options that determine the order of samples.
_ORDER = (
    *("seed", "seq_len", "data", "valid_data", "split", "shuffle", "mock_data", "long_documents"),
    *("key", "data_lanes", "shuffle_tokens", "chat_template"),
)

# Options of other groups that influence updates.
_UPDATES = {"run": ("on_spike", "spike_threshold"), "data": ("document_mask", "loss_on", "loss_per")}

# Options of the run that decide what is computed; the others say where it writes, how often, and for how long.
_DECISIVE = ("resume", "reset_data", "reset_optimizer", "reset_step", "init_from_hf", *_UPDATES["run"])

# Model options that a new stage of training may change: they rotate queries and keys, and have no weights.
_ROTARY = ("rope_theta", "rope_scaling", "rope_linear_factor", "rope_theta_local")

# Parts of a manifest's meta that a run continues from; those of the optimizer only together with its moments, those of
# the order of samples where data were read.
_PARTS = ("step", "consumed_samples", "config.model")
_ORDER_PARTS = ("config.data", "config.train")
_SCALARS = ("scalars.num_steps", "scalars.loss_scale", "scalars.loss_scale_good_steps")

_RESETS = "--reset-data (with it, --reset-optimizer and --reset-step are possible)"


class Source(NamedTuple):
    """A verified checkpoint to start from, and what a run does not take over from it."""

    checkpoint: Verified
    reset_data: bool = False
    reset_optimizer: bool = False
    reset_step: bool = False

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.checkpoint.path

    @property
    def data_version(self) -> int:
        """Version of the order of samples and of the hash of the data: the checkpoint's, if the run continues it."""
        meta = {} if self.reset_data else self.checkpoint.manifest.meta
        return int(meta.get("data_version", 1)) if meta.get("data_hash") else VERSION_OF_DATA

    @property
    def resets(self) -> list[str]:
        """The flags that were given."""
        return [f"--reset-{name}" for name, is_set in zip(("data", "optimizer", "step"), self[1:]) if is_set]

    def state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the metadata that the run continues from, given what the checkpoint recorded."""
        data = {"consumed_samples": 0, "loss_history": [], "blend": {}, "windows": []} if self.reset_data else {}
        step = {"step": 0, "skipped_steps": 0} if self.reset_step else {}
        return {**saved, **data, **step}


@permitted()
def check_folders(cfg: Config) -> None:
    """Refuse to train beside, or resume from, checkpoints of Megatron-LM: they would be ignored silently."""
    run_dir = cfg.run.folder
    if not step_folders(checkpoints_folder(run_dir)):
        refuse_megatron(run_dir, f"--run-dir {run_dir}")
    if cfg.run.resume not in ("latest", "never") and not is_url(cfg.run.resume):
        refuse_megatron(Path(cfg.run.resume), f"--resume {cfg.run.resume}")


def choose_checkpoint(engine: Engine[Config], mirror: Mirror | None) -> Source | None:
    """Find and verify the checkpoint to start from, the same on every rank; None for a new run."""
    cfg, ctx = engine.cfg, engine.ctx
    requested, own = cfg.run.resume, checkpoints_folder(cfg.run.folder)
    if requested == "never":
        return None
    states = engine.optimizer.states()
    find = partial(find_good, ctx=ctx, fallback=cfg.run.resume_fallback, states=states)
    if requested == "latest":
        newest = find(own, mirror=mirror)
        return Source(newest) if newest else None
    resets = (cfg.run.reset_data, cfg.run.reset_optimizer, cfg.run.reset_step)
    path = Path(requested)
    elsewhere = is_url(requested) or own.resolve() not in (path.resolve().parent, checkpoints_folder(path).resolve())
    # Before a URL is read: the run itself may have pruned what it names.
    if (elsewhere or any(resets)) and _saved_by(cfg, own, ctx, mirror):
        logger.info(f"the same command has saved checkpoints in {own}: continuing from there, not from {requested}")
        newest = find(own, mirror=mirror)
        return Source(newest) if newest else None
    path = copy_together(requested, cfg.run.cache_dir, ctx)
    if (newest := find(checkpoints_folder(path))) is not None:
        return Source(newest, *resets)
    if not (path / "manifest.json").exists():
        raise UserError(
            f"--resume {path}",
            "must be latest, never, a checkpoint, or a run directory with a checkpoint",
            "check the path",
        )
    return Source(verify_together(path, ctx, states), *resets)


def _saved_by(cfg: Config, root: Path, ctx: ParallelContext, mirror: Mirror | None) -> bool:
    """Whether the newest checkpoint of a folder was saved with the same options: a job that was started again.

    The layout may differ, as it may be started again on fewer hosts, and so may what is not `_DECISIVE`.
    """
    ours, theirs = _command({"config": json.loads(json.dumps(dataclasses.asdict(cfg)))}), None

    def read_newest() -> None:
        nonlocal theirs
        folders = [path for _, path in step_folders(root)]
        if not folders and mirror is not None:
            folders = [mirror.fetch(name) for name in mirror.committed()[:1]]
        for path in folders:
            with contextlib.suppress(BadCheckpoint):
                theirs = _command(read_manifest(path).meta)
                return

    agree(ctx, lambda: read_newest() if ctx.rank == 0 else None)
    return gather_texts("same" if theirs == ours else "", ctx.world, ctx.device)[0] == "same"


def _command(saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options by which a command is recognized."""
    groups = {group: _recorded(saved, group) for group in GROUPS if group != "parallel"}
    return {**groups, "run": {name: groups["run"][name] for name in _DECISIVE}}


def resume(engine: Engine[Config], source: Source, meta: dict[str, Any]) -> dict[str, Any]:
    """Check that a checkpoint fits the run, and load it into the engine; return the metadata that it recorded.

    Without moments that fit, or with `reset_optimizer`, the optimizer and the loss scale start anew.
    """
    path = source.path
    optimizer = engine.optimizer
    manifest = source.checkpoint.manifest
    saved, ours = manifest.meta, json.loads(json.dumps(meta))
    with_moments = not (source.reset_optimizer or unfit_moments(engine.cfg, manifest))
    order = _ORDER_PARTS if saved.get("data_hash") and not source.reset_data else ()
    agree(engine.ctx, lambda: require_entries(saved, [*_PARTS, *(_SCALARS if with_moments else ()), *order], path))
    theirs = agree(engine.ctx, lambda: _check_model(engine.cfg, source, saved))
    _check_tokenizer(path, saved, ours)
    if not source.reset_data:
        _check_data(path, saved, ours)
    if not source.reset_step:
        _check_schedules(engine.cfg, path, saved)
    states, left_out, model = optimizer.states(), set[str](), engine.cfg.model
    if gets_new_head(theirs, model):
        logger.info(NEW_HEAD)
        optimizer.init_parameters(engine.cfg.train.seed)
        new, left_out = tensors_only_in(model, theirs), tensors_only_in(theirs, model)
        states = [state for state in states if state.name not in new]
    load_checkpoint(source.checkpoint, states, engine.ctx, moments=with_moments, left_out=left_out)
    if with_moments:
        optimizer.load_scalars(saved["scalars"])
        engine.scaler.load_scalars(saved["scalars"])
    else:
        optimizer.num_steps = 0
    optimizer.finish_load()
    return saved


def log_start(engine: Engine[Config], source: Source, meta: dict[str, Any]) -> None:
    """Log where the run starts, and how it differs from the run that saved the checkpoint."""
    manifest = source.checkpoint.manifest
    saved, state = manifest.meta, source.state(manifest.meta)
    start = f"{source.path} at step {saved['step']}"
    start += f" with {' '.join(source.resets)}" if source.resets else ""
    why = [] if source.reset_optimizer else unfit_moments(engine.cfg, manifest)
    if not (source.reset_optimizer or why):
        logger.info(f"resumed from {start}")
    else:
        dtype = "fp32" if "master" in manifest.tensors else "bf16"
        logger.info(
            f"weights from {start} ({dtype}); the optimizer starts at zero" + (f" ({', '.join(why)})" if why else "")
        )
    here = engine.ctx.grid.as_dict()
    # A checkpoint may be older than an axis.
    there = {name: manifest.topology.get(name, 1) for name in here}
    if there != here and saved.get("data_hash"):
        layouts = [", ".join(f"{key} {value}" for key, value in layout.items()) for layout in (there, here)]
        order = "" if source.reset_data else ": the data order is unchanged"
        logger.info(f"saved by {layouts[0]}; continuing with {layouts[1]}{order}")
    changed = [
        f"--{key.replace('_', '-')} {there} -> {here}"
        for section in ("model", "train", "optim", *_UPDATES)
        if section in saved["config"]
        for theirs in (_recorded(saved, section),)
        for key, here in json.loads(json.dumps(meta["config"][section])).items()
        if key in _UPDATES.get(section, (key,)) and (there := theirs[key]) != here
    ]
    if changed:
        logger.info(f"options changed since that checkpoint: {', '.join(changed)}")
    drops = engine.cfg.model.hidden_dropout or engine.cfg.model.attention_dropout
    if drops and saved.get("data_hash") and saved.get("mask_version") != VERSION_OF_MASKS:
        logger.info(
            "dropout masks are those of samples from here on, the same in any layout; before, a replica had its own"
        )
    _log_rates(engine.cfg, saved, int(state["step"]))


def _log_rates(cfg: Config, saved: dict[str, Any], start: int) -> None:
    """Log what jumps: is not between the rates at which the checkpoint's run ended and would have continued."""
    if (theirs := _options_of_rates(saved)) is None:
        return
    step = saved["step"]
    ours = rates_at(cfg.optim, cfg.train, start + 1)
    jumps = []
    named = {"learning rate": "lr", "weight decay": "weight_decay"}
    if not cfg.optim.decoupled_lr == theirs[0].decoupled_lr is None:
        named["learning rate of embedding and output layers"] = "decoupled_lr"
    for name, field in named.items():
        last, following = (getattr(rates_at(*theirs, at), field) for at in (step, step + 1))
        next_one = getattr(ours, field)
        if not min(last, following) <= next_one <= max(last, following):
            rises = "rises" if next_one > last else "falls"
            jumps.append(
                f"the {name} {rises}: {last:.3g} in step {step} of the checkpoint, {next_one:.3g} in the next step"
            )
    if jumps:
        logger.info("; ".join(jumps))


def _options_of_rates(saved: dict[str, Any]) -> tuple[OptimConfig, TrainConfig] | None:
    """Return the options of the run that saved a checkpoint; None without any, or if this version refuses them."""
    if "optim" not in saved["config"]:
        return None
    recorded = {group: _recorded(saved, group) for group in ("optim", "train")}
    recorded["train"]["train_steps"] = max(1, recorded["train"]["train_steps"])
    optim, train = (
        {f.name: options[f.name] for f in dataclasses.fields(GROUPS[group])} for group, options in recorded.items()
    )
    try:
        return OptimConfig(**optim), TrainConfig(**train)
    except UserError:
        return None


def _recorded(saved: dict[str, Any], section: str) -> dict[str, Any]:
    """Return a section of the config that a checkpoint records; options that are newer than it have their defaults."""
    given = saved.get("config", {}).get(section, {})
    # Options of a model have options of their own.
    whole = model_config(saved, Path("resume")) if section == "model" and given else GROUPS[section]()
    return {**json.loads(json.dumps(dataclasses.asdict(whole))), **({} if section == "model" else given)}


def _check_model(cfg: Config, source: Source, saved: dict[str, Any]) -> ModelConfig:
    """Refuse a checkpoint of another model; returns its model. A stage on other data may have another head."""
    # An option that is newer than the checkpoint has its default there.
    held = model_config(saved, source.path)
    theirs = taken_over(held, cfg.model) if source.reset_data else held
    extends = not cfg.model.position_kind.limited
    free = {*TRAINING_ONLY, *(("max_position_embeddings",) if extends else ()), *(_ROTARY if source.reset_data else ())}
    differ = {
        key: f"{key} {there} there, {here} here"
        for key, here in vars(cfg.model).items()
        if key not in free and (there := getattr(theirs, key)) != here
    }
    if differ:
        more, count = "" if extends else " (learned positions cannot be extended)", theirs.mtp_num_layers
        advice = f"use the same model options{more}, another --run-dir, or --resume never"
        if differ.keys() == {"mtp_num_layers"}:
            why = ", or start a new run from its export, with --init-from-hf" if count else ": none can be added later"
            advice = f"give --mtp-num-layers {count}{why}"
        if held.head == "score" != cfg.model.head:
            differ, advice = {"head": differ["head"]}, "give --stage reward"
        elif gets_new_head(held, cfg.model) and not source.reset_data:
            advice = f"a reward model starts from it with --resume {source.path} --reset-data"
        rule = f"was made with another model ({'; '.join(differ.values())})"
        raise UserError(f"checkpoint {source.path}", rule, advice)
    return held


def _check_schedules(cfg: Config, path: Path, saved: dict[str, Any]) -> None:
    """Refuse schedules by samples that count the steps so far otherwise than the checkpoint's run: rates would jump.

    A `--lr-batch-size` that is given may be another.
    """
    theirs, step = _options_of_rates(saved), int(saved["step"])
    if theirs is None or cfg.optim.lr_by != "samples" or not step:
        return
    optim, train = theirs
    here, there = full_batch(cfg.optim, cfg.train), full_batch(optim, train)
    moved = optim.lr_by == "samples" and cfg.optim.lr_batch_size is None and here != there
    consumed, claimed = (options.batches.samples(step) for options in (train, cfg.train))
    if claimed != consumed:
        whole = train.batches.from_then_on(step, cfg.train.batches)
        unit = f" --lr-batch-size {there if moved else here}" if whole.sizes[-1] != here or moved else ""
        batches = f"--batch-size-schedule {cfg.train.batch_size_schedule}"
        raise UserError(
            f"--lr-by samples with {batches if cfg.train.batch_size_schedule else f'--global-batch-size {here}'}",
            f"says {claimed} samples of the {step} steps of checkpoint {path}, which had {consumed}",
            f"write --batch-size-schedule '{whole}'{unit}, or --lr-by steps",
        )
    if moved:
        raise UserError(
            f"--lr-by samples with --global-batch-size {here}",
            f"the schedules of checkpoint {path} count batches of {there} samples: counted by {here}, rates would jump",
            f"give --lr-batch-size {there} to go on, or --lr-batch-size {here} to count the past anew",
        )


def _check_tokenizer(path: Path, saved: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuse another tokenizer: the same ids would mean other text."""
    there, here = saved.get("tokenizer_sha256"), ours["tokenizer_sha256"]
    if there and here and there != here:
        raise UserError(
            f"--tokenizer of SHA-256 {here}",
            f"checkpoint {path} was trained with the one of SHA-256 {there}",
            "use that tokenizer, or --resume never",
        )


def _check_data(path: Path, saved: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuse other data: the order of samples would change silently, or evaluation losses could not be compared."""
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
            f"checkpoint {path} was trained on other samples ({'; '.join(changed) or 'the files have changed'})",
            f"use the data, --split and --seed of the run, or train on these with --resume {path} {_RESETS}",
        )
    valid_hashes = saved.get("valid_data_hash"), ours["valid_data_hash"]
    if all(valid_hashes) and valid_hashes[0] != valid_hashes[1]:
        changed = [
            f"{key} {there[key]} there, {here[key]} here" for key in ("valid_data", "split") if there[key] != here[key]
        ]
        raise UserError(
            "the evaluation data",
            f"checkpoint {path} was evaluated on other samples ({'; '.join(changed) or 'the files have changed'}), so "
            "losses before and after could not be compared",
            "use the --valid-data of the run; megalite evaluate evaluates a checkpoint on any data",
        )
