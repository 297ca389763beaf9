"""Open a run from its config: data, engine, run directory, and the state of an earlier run in it."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from functools import partial
from pathlib import Path
from typing import Any

from megalite.core.base.dtypes import DTYPES
from megalite.core.base.errors import require
from megalite.core.base.log import logger, setup_logging
from megalite.core.engine import Engine
from megalite.core.mesh.agree import agree, check_equal
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import ParallelContext
from megalite.core.model.dropout import VERSION_OF_MASKS
from megalite.core.model.parameters import describe_parameters
from megalite.core.ops.attention import why_masked
from megalite.core.optim.check_buckets import check_buckets
from megalite.core.options.choices import PREFERENCES
from megalite.core.parts.options.fp8_options import describe_fp8
from megalite.runtime.checkpoint.hf.start import load_hf
from megalite.runtime.checkpoint.mirror import Mirror
from megalite.runtime.checkpoint.pruning import Keep
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.data import (
    VERSION_OF_DATA,
    Datasets,
    Samples,
    Tokenizer,
    chat_template_of,
    mask_path,
    prefixes_of,
)
from megalite.runtime.loop.run import Run, open_loader
from megalite.runtime.loop.spike import SpikeDetector
from megalite.runtime.options import cli
from megalite.runtime.options.fields import by_group
from megalite.runtime.options.run import Config
from megalite.runtime.options.windows import step_range
from megalite.runtime.places.downloads import bring_tree
from megalite.runtime.places.names import step_folders
from megalite.runtime.record.gpu_readings import GpuReadings
from megalite.runtime.record.metrics import MetricsLogger
from megalite.runtime.record.profile import StepProfiler
from megalite.runtime.record.schedule_recorder import Recorder
from megalite.runtime.recover import restore
from megalite.runtime.recover.copies import Copies
from megalite.runtime.recover.member import NOBODY, Companion
from megalite.runtime.recover.messages import Data
from megalite.runtime.start.growth import Growth
from megalite.runtime.start.inputs import digest_of, identity_of, open_data, resolve_vocabulary
from megalite.runtime.start.references import score_references
from megalite.runtime.start.resume import Source, check_folders, choose_checkpoint, log_start, resume
from megalite.runtime.start.run_dir import make_run_dir, write_config, write_pid
from megalite.runtime.watch.heartbeat import Heartbeat
from megalite.runtime.watch.watchdog import IDLE, OWN


def open_run(
    cfg: Config,
    ctx: ParallelContext,
    train_data: Samples | None = None,
    valid_data: Samples | None = None,
    companion: Companion = NOBODY,
    tasks: str = "",
) -> Run:
    """Check everything, build the engine, and resume from the run directory's last checkpoint if there is one.

    Args:
        cfg: all options.
        ctx: this rank's axes.
        train_data, valid_data: samples of the caller's own, in place of `--data`.
        companion: of this process.
        tasks: identity of `--eval-tasks`, which rank 0 reads.

    Raises:
        UserError: a request cannot be met on some rank; raised on every rank, after everything opened is closed again.
    """
    with contextlib.ExitStack() as exit_stack:
        restore.meet_guards(cfg, ctx, companion)
        agree(ctx, lambda: check_folders(cfg))
        heartbeat = Heartbeat(cfg.run.folder, ctx, cfg.run.watchdog_timeout, cfg.run.recover != "none")
        exit_stack.callback(heartbeat.close)
        cfg, tokenizer = agree(ctx, lambda: resolve_vocabulary(cfg, train_data is not None))
        text = cli.to_yaml(cfg)
        check_equal(ctx, "the configuration", digest_of(text), "start every rank with the same flags and files")
        cfg.num_microbatches(ctx.dp.size)
        heartbeat.beat("set-up: data", patience=OWN)
        datasets = agree(ctx, lambda: open_data(cfg, tokenizer, train_data, valid_data, (ctx.rank, ctx.world.size)))
        _check_same_data(ctx, datasets, tokenizer, companion, tasks)
        heartbeat.beat("set-up: model", patience=OWN)
        engine = agree(ctx, lambda: restore.build(cfg, ctx, companion))
        engine.executor.observers = (heartbeat,)
        check_buckets(engine.optimizer.buckets, ctx)
        run_dir = cfg.run.folder
        agree(ctx, lambda: make_run_dir(run_dir))
        agree(ctx, lambda: setup_logging(ctx.rank, run_dir / "logs" / f"rank_{ctx.rank}.log"))
        if companion.round == 0:
            log_banner(engine, chats=bool(datasets.chat_templates()))
        heartbeat.beat("set-up: checkpoint", patience=OWN)
        copies = restore.open_copies(engine, companion)
        # Rank 0's on every rank: one of another host may be rank 0 next.
        run_id = gather_texts(companion.turn.run_id or secrets.token_hex(8), ctx.world, ctx.device)[0]
        checkpointer = _make_checkpointer(cfg, run_dir, ctx, run_id)
        exit_stack.callback(checkpointer.close)
        datasets, added, source, meta, state = _starting_point(
            engine, datasets, tokenizer, checkpointer, copies, companion
        )
        # Only now is it this run's folder: an earlier run's config stays until this run is certain to start.
        agree(ctx, lambda: write_config(run_dir, text) if ctx.rank == 0 else None)
        if companion.round == 0 and ctx.rank == 0 and (how := restore.how_to_join(cfg)):
            write_config(run_dir, how, restore.JOIN)
        checkpointer.take()
        if copies:
            agree(ctx, lambda: write_pid(run_dir, ctx.rank))
        run = make_run(
            engine, datasets=datasets, meta=meta, state=state, checkpointer=checkpointer, heartbeat=heartbeat
        )
        run.copies, run.companion = copies, companion
        _record_start(run, source)
        if added:
            run.metrics.event("data_grows", step=run.step, added=added)
        exit_stack.pop_all()
        run.heartbeat.beat("between calls", run.step, IDLE)
        return run


def _starting_point(
    engine: Engine[Config],
    datasets: Datasets,
    tokenizer: Tokenizer | None,
    checkpointer: Checkpointer,
    copies: Copies | None,
    companion: Companion,
) -> tuple[Datasets, str, Source | None, dict[str, Any], dict[str, Any]]:
    """Load the state that the run starts from, unless it was restored from copies.

    Returns:
        The data, and what was added to them; the checkpoint, if it was one; what checkpoints of this run record; the
        metadata that the run continues from.
    """
    cfg = engine.cfg
    ctx = engine.ctx
    restored = copies.restored if copies else None
    source = None
    if not restored:
        newest = restore.newest_of(engine, checkpointer) if companion.round else None
        source = newest or choose_checkpoint(engine, checkpointer.mirror)
    datasets.use_version(restored["data_version"] if restored else source.data_version if source else VERSION_OF_DATA)
    continued = source.checkpoint.manifest.meta if source and not source.reset_data else {}
    growth, added = Growth(datasets, ctx, restored or continued), ""
    datasets = growth.before()
    meta = {"config": by_group(cfg), **_hashes(datasets, ctx, tokenizer)}
    restore.check_unchanged(restored, meta)
    state = restored or (source.state(resume(engine, source, meta)) if source else init_weights(engine))
    prefixes, learned = prefixes_of(cfg.local_data.data) if cfg.data.data else (), state.get("chat_template")
    meta["chat_template"] = agree(ctx, lambda: chat_template_of(prefixes, learned, datasets.chat_templates()))
    if source:
        log_start(engine, source, meta)
        datasets, added = growth.after(datasets, state)
        if added:
            meta |= _hashes(datasets, ctx, tokenizer)
    if cfg.train.stage == "dpo" and PREFERENCES[cfg.train.dpo_loss].has_reference:
        # A stage on other data has another reference: the weights that it starts from.
        kept = {} if source and source.reset_data else (restored["meta"] if restored else state)
        recorded = kept.get("references")
        begun = restored or (source and not source.reset_data)
        rule = "compares with the model that the run began with, which it has not scored"
        remedy = "go on with --dpo-loss simpo, or begin a stage with --reset-data"
        require(recorded or not begun, f"--dpo-loss {cfg.train.dpo_loss}", rule, remedy)
        meta["references"] = score_references(engine, datasets, recorded)
    return datasets, added, source, meta, state


def _check_same_data(
    ctx: ParallelContext, datasets: Datasets, tokenizer: Tokenizer | None, companion: Companion, tasks: str
) -> None:
    """Check that all ranks have the same data; hosts that join later must have them, and those of tasks, too."""
    identity = agree(ctx, lambda: identity_of(datasets, tokenizer))
    check_equal(ctx, "the data", digest_of(identity), "give every host the same files")
    if ctx.rank == 0:
        companion.say(Data(digest_of(identity_of(datasets, tokenizer, tasks))))


def _make_checkpointer(cfg: Config, run_dir: Path, ctx: ParallelContext, run_id: str) -> Checkpointer:
    run, place = cfg.run, Mirror.of(cfg.run.run_dir, run_dir, cfg.run.upload_patience)
    scratch = Path(cfg.train.offload_dir) if cfg.train.offload_dir is not None else None
    folder = run_dir / "checkpoints"
    return Checkpointer(
        folder, ctx, run_id, Keep.of(run), run.save_errors, scratch, place, run.save_code, run.save_model_delta
    )


def _hashes(datasets: Datasets, ctx: ParallelContext, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return what a checkpoint records of the data: rank 0 alone may have to read files for it."""
    text = agree(ctx, lambda: json.dumps(datasets.content_hashes()) if ctx.rank == 0 else "")
    hashes = json.loads(gather_texts(text, ctx.world, ctx.device)[0])
    return {
        **hashes,
        "data_version": datasets.train.version,
        "mask_version": VERSION_OF_MASKS,
        "tokenizer_sha256": tokenizer.sha256 if tokenizer else None,
    }


def _record_start(run: Run, source: Source | None) -> None:
    """Record in metrics.jsonl what the run starts from, and continue the history of that checkpoint."""
    if run.copies is not None and run.copies.restored is not None:
        restore.continue_recovered(run, run.copies.restored)
    elif source and not source.resets:
        continue_history(run, source.path)
    origin = {"checkpoint": str(source.path), "resets": " ".join(source.resets)} if source else {}
    if restore.record_recovery(run):
        return
    event, ranks = "resume" if source else "start", run.engine.ctx.world.size
    run.metrics.event(event, step=run.step, consumed_samples=run.consumed_samples, ranks=ranks, **origin)


def continue_history(run: Run, source: Path) -> None:
    """Make the checkpoint that a run starts from, and those before it in its folder, part of this run's history."""
    run.continues = run.step, source
    run.checkpointer.continues(source)
    older = step_folders(source.parent) if source.parent == run.checkpointer.root else []
    run.saved = [(step, path) for step, path in reversed(older) if step < run.step] + [(run.step, source)]


def init_weights(engine: Engine[Config]) -> dict[str, Any]:
    """Give a new run its weights, random or from a Hugging Face folder; return what a checkpoint would record."""
    folder = engine.cfg.run.init_from_hf
    if folder is None:
        engine.optimizer.init_parameters(engine.cfg.train.seed)
        logger.info(f"new run: random weights of --seed {engine.cfg.train.seed}")
    else:
        local = agree(engine.ctx, lambda: bring_tree(folder, engine.cfg.run.cache_dir))
        if engine.cfg.model.head == "score":
            engine.optimizer.init_parameters(engine.cfg.train.seed)
        source = load_hf(local, engine.cfg.model, engine.optimizer.states(), engine.ctx)
        engine.optimizer.finish_load()
        logger.info(f"weights from {folder} ({source.dtype}); the optimizer starts at zero")
        source.log_left_out(engine.cfg.model)
    return {"step": 0, "consumed_samples": 0}


def make_run(
    engine: Engine[Config],
    *,
    datasets: Datasets,
    meta: dict[str, Any],
    state: dict[str, Any],
    checkpointer: Checkpointer,
    heartbeat: Heartbeat,
) -> Run:
    """Make the run, given the state that it starts from."""
    cfg, ctx = engine.cfg, engine.ctx
    run_dir, sizes = cfg.run.folder, cfg.train.batches
    step, consumed = int(state["step"]), int(state["consumed_samples"])
    following = sizes.following(step)
    datasets.resume_position(state)
    loader = open_loader(engine, datasets.train, following, consumed)
    make_metrics = partial(
        MetricsLogger,
        run_dir,
        ctx.rank,
        total_steps=cfg.train.train_steps,
        log_every=cfg.run.log_every,
        tensorboard=cfg.run.tensorboard,
        wandb_project=cfg.run.wandb_project,
        config=meta["config"],
    )
    metrics = agree(ctx, make_metrics)
    checkpointer.on_commit = partial(metrics.event, "saved")
    profiler = agree(ctx, lambda: StepProfiler(cfg, ctx))
    steps = step_range("--record-schedule", cfg.run.record_schedule)
    count = cfg.passes(sizes.size(max(1, steps.start)), ctx.dp.size)
    recorder = Recorder(run_dir / "schedule", ctx, engine.executor, engine.schedule_of(count), steps)
    threshold = cfg.run.spike_threshold if cfg.run.on_spike != "ignore" else math.inf
    spikes = SpikeDetector(threshold, state.get("loss_history", ()))
    return Run(
        engine=engine,
        datasets=datasets,
        loader=loader,
        metrics=metrics,
        checkpointer=checkpointer,
        recorder=recorder,
        profiler=profiler,
        gpu=GpuReadings(ctx.device),
        meta=meta,
        heartbeat=heartbeat,
        spikes=spikes,
        step=step,
        sample_offset=consumed - sizes.samples(step),
        skipped_steps=int(state.get("skipped_steps", 0)),
    )


def log_banner(engine: Engine[Config], chats: bool = False) -> None:
    """Log what is about to be trained; `chats`: some of it is read from text."""
    cfg, ctx = engine.cfg, engine.ctx
    *fewer, count = cfg.microbatch_counts(ctx.dp.size)
    others = "".join(f", {axis.name} {axis.size}" for axis in (ctx.axis("cp"), ctx.ep) if axis.size > 1)
    sharing = f"ZeRO-{cfg.parallel.zero}" + f", gradients {cfg.train.compress}" * (cfg.train.compress != "none")
    logger.info(
        f"{cfg.model.arch}, {describe_parameters(cfg.model)}, on {ctx.world.size} x {ctx.device.type}: "
        f"dp {ctx.dp.size}, pp {ctx.pp.size}, tp {ctx.tp.size}{others}; {f'{fewer[0]} to ' if fewer else ''}{count} "
        f"micro-batch{'es' * (count > 1)} of {cfg.train.micro_batch_size} per dp rank and step"
        f"{cfg.without_samples(ctx.dp.size)}; "
        f"{cfg.train.precision}{describe_fp8(cfg.model, cfg.train)}, {sharing}"
    )
    if cfg.peak_rate:
        logger.info(f"peak learning rate {cfg.peak_rate}")
    _log_documents(engine, chats)
    _log_sharding(engine)


def _log_documents(engine: Engine[Config], chats: bool) -> None:
    """Log how attention stays within documents, if it does."""
    cfg, dtype = engine.cfg, DTYPES[engine.cfg.train.precision]
    packed = cfg.data.data and any(mask_path(prefix).exists() for prefix in prefixes_of(cfg.local_data.data))
    if not packed and not chats and not cfg.data.document_mask:
        return
    model = cfg.model
    why = why_masked(engine.ctx.device, dtype, model.key_size, model.attention_softcap)
    how = "FlashAttention over each" if why is None else f"a mask of seq_len x seq_len ({why})"
    how = "block by block, with dropout" if model.attention_dropout else how
    logger.info(f"attention within documents: {how}")


def _log_sharding(engine: Engine[Config]) -> None:
    """Log options for data-parallel ranks that have no effect here, and what ZeRO-3 shards."""
    cfg, buckets = engine.cfg, engine.optimizer.buckets
    p, alone = cfg.parallel, engine.ctx.batch.size == 1
    if cfg.train.compress != "none" and alone:
        logger.info(f"--compress {cfg.train.compress}: dp is 1, so no gradients are sent and none are compressed")
    if p.zero > 1 and alone and cfg.train.offload != "optimizer+params":
        logger.info(f"--zero {p.zero}: dp is 1, so there is nothing to shard")
    if p.zero == 3 and not alone:
        unsharded = sum(param.numel() for b in buckets if not b.sharded.weights for param in b.params)
        total, ranks = sum(param.numel() for b in buckets for param in b.params), buckets[0].share_axis.size
        logger.info(
            f"ZeRO-3: {total - unsharded:,} weights of this rank are sharded over {ranks} ranks; {unsharded:,} of "
            f"small layers are not (--zero-whole-below {p.zero_whole_below:,})"
        )
