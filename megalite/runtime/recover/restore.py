"""A process that takes over a rank: it meets the others, loads the last copies, and continues the run's history."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError, require
from megalite.core.base.log import logger
from megalite.core.base.redact import mask
from megalite.core.build import build_engine
from megalite.core.engine import Engine
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.rendezvous import (
    RENDEZVOUS_TIMEOUT,
    join_store,
    local_world_size,
    store_address,
    store_host,
    under_torchrun,
    world_size,
)
from megalite.core.rows import share_of
from megalite.runtime.checkpoint.load import find_good
from megalite.runtime.checkpoint.manifest import read_manifest
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.data import Samples
from megalite.runtime.loop.run import Run
from megalite.runtime.options.cli import to_yaml
from megalite.runtime.options.run import Config
from megalite.runtime.recover import succession
from megalite.runtime.recover.connections import LOOPBACK, network
from megalite.runtime.recover.copies import Copies
from megalite.runtime.recover.member import Companion, GuardedRank
from megalite.runtime.recover.messages import Listen
from megalite.runtime.start.inputs import digest_of, identity_of, open_data, resolve_vocabulary
from megalite.runtime.start.resume import Source

# With --elastic: an address of IPv6 and a port take up to 60 bytes of `MAX_MESSAGE`.
_MOST_RANKS = 2048
# How another host joins the run: file of the run's folder, which `megalite join` reads.
JOIN = "join.json"
# Key of the launcher's store.
_HUB = "megalite/hub"
# How long a store or a hub may take to answer, and a lost hub to have moved: 15 s to notice, and the turn of each rank.
_ASK, _MOVE_S = timedelta(seconds=10), 20.0


def meet_guards(cfg: Config, ctx: ParallelContext, companion: Companion) -> None:
    """Connect the guards of all ranks, in the first round; every rank calls it.

    Raises:
        UserError: the run is to recover, and this process has no guard.
    """
    if cfg.run.recover == "none":
        return
    require(
        isinstance(companion, GuardedRank),
        f"--recover {cfg.run.recover}",
        "needs ranks that can be started again",
        "start them as pretrain_gpt.py, with torchrun or megalite train, or use --recover none",
    )
    assert isinstance(companion, GuardedRank)
    spares, rule = cfg.run.spare_ranks, "must be known before the ranks start"
    require(companion.turn.spares == spares, f"--spare-ranks {spares}", rule, "give it on the command line")
    if companion.round == 0:
        if cfg.run.elastic:
            _check_sizes(cfg, ctx)
        folder = folder_of_hubs(cfg)
        alone = len(set(gather_texts(network(), ctx.world, ctx.device))) == 1
        elsewhere, offer = cfg.run.recover == "host", ""
        require(not (alone and elsewhere), "--recover host", "needs ranks on several hosts", "use --recover process")
        if ctx.rank == 0:
            unit = Grid.from_config(cfg.parallel).world if cfg.run.elastic else 0
            listen = Listen(ctx.world.size, cfg.run.max_recoveries, alone, elsewhere, unit, cfg.run.min_ranks)
            listen = listen._replace(grow_after=cfg.run.grow_after, identity=identity_of_code(cfg), folder=folder)
            offer = companion.host(listen)
            if cfg.run.spare_ranks or cfg.run.elastic:
                join_store()[0].set(_HUB, offer)
            (cfg.run.folder / JOIN).unlink(missing_ok=True)  # an earlier start's
            succession.clear(cfg.run.folder)
        offer = gather_texts(offer, ctx.world, ctx.device)[0]
        hub = f"{LOOPBACK if alone else store_host()} {offer}"
        companion.meet(ctx.rank, hub, elsewhere, cfg.run.elastic, folder=folder)
    companion.met = time.monotonic()


def folder_of_hubs(cfg: Config) -> str:
    """Name the folder of the files in `succession`, as this host reaches it; "" where the run ends with its hub."""
    return str((cfg.run.folder / succession.FOLDER).absolute()) if cfg.run.elastic else ""


def how_to_join(cfg: Config) -> str:
    """Return what a host needs to join as those did that the launcher started, as JSON; "" if none can.

    Without the hub's token, which is in the store: who reads the folder need not be able to read states.
    """
    if not (cfg.run.elastic and under_torchrun()):
        return ""
    nproc = local_world_size()
    place = {"nproc": nproc, "nnodes": -(-(world_size() + cfg.run.spare_ranks) // nproc), **store_address()}
    return json.dumps({**place, "directory": os.getcwd(), "command": sys.argv}, indent=1) + "\n"


def identity_of_code(cfg: Config) -> str:
    """Return what a host that comes later must have as those of the run have it: options and code; "" if any may come.

    With others, all ranks would find out when they meet, and end.
    """
    if not cfg.run.elastic:
        return ""
    total, package = hashlib.sha256(to_yaml(cfg).encode()), Path(__file__).resolve().parents[2]
    for path in sorted(package.rglob("*.py")):
        total.update(f"{path.relative_to(package)} ".encode() + path.read_bytes())
    return total.hexdigest()[:16]


def identify(
    cfg: Config,
    train_data: Samples | None = None,
    valid_data: Samples | None = None,
    tasks_of: Callable[[Config], str] = lambda _: "",
) -> tuple[str, str]:
    """Return `identity_of_code`, and the digest of the data that this host would use; both "" if any may come.

    Data that cannot be opened are told of in a line, and have a digest that no others have: the hub refuses this host.

    Args:
        tasks_of: reads `--eval-tasks`; returns their identity. As rank 0 of a later round this host would evaluate.
    """
    if not (identity := identity_of_code(cfg)):
        return "", ""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        resolved, tokenizer = resolve_vocabulary(cfg, train_data is not None)
        datasets = open_data(resolved, tokenizer, train_data, valid_data)
        with contextlib.closing(datasets):
            return identity, digest_of(identity_of(datasets, tokenizer, tasks_of(cfg)))
    except UserError as e:
        print(mask(f"error: {e}"), file=sys.stderr, flush=True)
        return identity, "none"
    finally:
        logger.setLevel(level)


def _check_sizes(cfg: Config, ctx: ParallelContext) -> None:
    """Check that a step runs on every number of ranks that `--elastic` may leave.

    Raises:
        UserError: on some it does not, there are fewer ranks than `--min-ranks`, or more than guards can speak of.
    """
    fewest, world = cfg.run.min_ranks, ctx.world.size
    rule = f"names the hosts of all ranks in one message, which has room for {_MOST_RANKS}"
    require(world <= _MOST_RANKS, f"--elastic on {world} ranks", rule, "use --spare-ranks without it")
    rule = f"is more than the {world} ranks that train"
    require(fewest <= world, f"--min-ranks {fewest}", rule, "lower it, or start more ranks")
    unit = Grid.from_config(cfg.parallel).world
    for ranks in range(unit, world + 1, unit):
        if ranks >= fewest:
            cfg.num_microbatches(Grid.from_config(cfg.parallel, ranks)["dp"])


def find_hub(folder: str, waits: bool) -> str:
    """Find where the guards meet; return what `GuardedRank.meet` takes.

    The launcher's store says it, unless the hub has moved. What nobody listens at is from an earlier attempt, as
    torchrun keeps one store across restarts; or a hub that is lost, and the next one is there within seconds.

    Args:
        folder: from `folder_of_hubs`.
        waits: whether to wait until rank 0 has told; otherwise "" if it has not, or the launcher has no store then.
    """
    began, store = time.monotonic(), None
    while True:
        if folder and (offer := succession.answering_offer(folder)):
            return " ".join(map(str, offer))
        if not (waits or under_torchrun()):
            return ""
        # Once the hub has moved, the launcher's store may be gone.
        if not (folder and succession.newest_offer(folder)):
            with contextlib.suppress(OSError, RuntimeError):  # torch's errors are of the latter kind
                store = store or join_store(timeout=_ASK)[0]
                if not (waits or store.check([_HUB])):
                    return ""
                told = store.get(_HUB).decode()
                socket.create_connection((store_host(), int(told.split()[0])), timeout=_ASK.total_seconds()).close()
                return f"{store_host()} {told}"
        if time.monotonic() - began > (RENDEZVOUS_TIMEOUT.total_seconds() if waits else _MOVE_S * bool(folder)):
            if waits:
                raise TimeoutError(f"no guard of rank 0 answers that {store_host()} names")
            return ""
        time.sleep(0.5)


def build(cfg: Config, ctx: ParallelContext, companion: Companion) -> Engine[Config]:
    """As `build_engine`; on a CPU that computes nothing, without the kernels that only a GPU has."""
    if not companion.turn.go.on_cpu:
        return build_engine(cfg, ctx)
    train = replace(cfg.train, ops="auto", attention="auto", compile=False, fp8_emulate=cfg.train.fp8 != "off")
    return replace(build_engine(replace(cfg, train=train), ctx), cfg=cfg)


def open_copies(engine: Engine[Config], companion: Companion) -> Copies | None:
    """Return the copies of this rank, with the newest loaded into the engine if there is one; None without a guard."""
    if engine.cfg.run.recover == "none":
        return None
    assert isinstance(companion, GuardedRank)
    optimizer = engine.optimizer
    run = engine.cfg.run
    copies = Copies(companion, optimizer.states(), run.recover == "host", run.elastic, engine.ctx.device)
    problems = copies.load(engine.ctx)
    for problem in problems:
        older = "the copies before it" if copies.restored else "the newest checkpoint on disk"
        if engine.ctx.rank == 0:
            logger.warning(f"{problem}: using {older} on all ranks")
    if companion.round and copies.restored is None and not problems and engine.ctx.rank == 0:
        logger.warning("no copy is left that all ranks have: using the newest checkpoint on disk")
    if copies.restored is not None:
        optimizer.load_scalars(copies.restored["scalars"])
        engine.scaler.load_scalars(copies.restored["scalars"])
    if copies.restored is not None or problems:  # codecs complete what is zero
        optimizer.finish_load()
    return copies


def newest_of(engine: Engine[Config], checkpointer: Checkpointer) -> Source | None:
    """Find the newest checkpoint of a run whose copies are lost: it counts more than what `--resume` says.

    Returns:
        It, the same on every rank; None if the run has saved none.
    """
    run, states = engine.cfg.run, engine.optimizer.states()
    newest = find_good(checkpointer.root, engine.ctx, run.resume_fallback, states, checkpointer.mirror)
    return Source(newest) if newest and newest.manifest.run_id == checkpointer.run_id else None


def check_unchanged(restored: dict[str, Any] | None, now: dict[str, Any]) -> None:
    """Refuse to go on from copies that were made with another config or other data.

    Args:
        restored: see `Copies`.
        now: what checkpoints record of config and data.

    Raises:
        UserError: they have changed.
    """
    before = restored["meta"] if restored else now
    changed = [name for name, value in json.loads(json.dumps(now)).items() if restored and value != before.get(name)]
    rule = f"the copies in memory were made with another {', '.join(changed)}"
    require(not changed, "--recover process", rule, "leave files of options and data alone, and start the run again")


def continue_recovered(run: Run, restored: dict[str, Any]) -> None:
    """Continue the history of the run's earlier processes: which checkpoints are its own, what a rewind counted."""
    run.recovered, run.rewinds = restored["trained"], dict(restored["rewinds"])
    for step, path in restored["continues"]:
        run.continues = step, Path(path)
        run.checkpointer.continues(path)
    saved = [(step, Path(path)) for step, path in restored["saved"]]
    # What rank 0 had not heard to be committed when it made the copy.
    found = json.dumps([*_find_saved(run, saved), restored["weights"]]) if run.engine.ctx.rank == 0 else ""
    run.written, whole, weights = json.loads(gather_texts(found, run.engine.ctx.world, run.engine.ctx.device)[0])
    run.saved = [saved[i] for i in whole]
    run.save_lost = saved[-1:] != run.saved[-1:]
    # Its name may be that of one from before a rewind.
    run.weights_lost = weights is not None and run.written.get(weights[0]) != weights[1]
    for name in run.written:
        run.checkpointer.adopt(name)


def _find_saved(run: Run, saved: list[tuple[int, Path]]) -> tuple[dict[str, int], list[int]]:
    """Find which checkpoints this run has committed, and the samples consumed at each; and which of `saved` there are.

    Some may have been committed after the copy was made.
    """
    root, base = run.checkpointer.root, run.continues[0] if run.continues else -1
    written = {}
    for path in [*root.glob("step_*"), *root.glob("model_*")]:
        with contextlib.suppress(BadCheckpoint):
            if (path / "COMMIT").exists() and (manifest := read_manifest(path)).run_id == run.checkpointer.run_id:
                written[path.name] = int(manifest.meta["consumed_samples"])
    whole = [i for i, (step, path) in enumerate(saved) if step <= base or path.name in written]
    whole = [i for i in whole if (saved[i][1] / "COMMIT").exists()]
    if saved and saved[-1][0] > base and (name := saved[-1][1].name) not in run.rewinds:
        # It may have been cut short, and its name be that of one from before a rewind.
        consumed = run.engine.cfg.train.batches.samples(saved[-1][0]) + run.sample_offset
        whole = [i for i in whole if i < len(saved) - 1 or written[name] == consumed]
    return written, whole


def record_recovery(run: Run) -> bool:
    """Log and record what a recovery cost; return False if this is none."""
    companion = run.companion
    if companion.round == 0:
        return False
    go, met, now = companion.turn.go, companion.met, time.monotonic()
    resized = f": {_describe_resize(run)}" if go.was else ""
    back = f"{go.cause}{resized}: {'back to' if go.ranks else 'on from'} step {run.step}"
    if run.engine.ctx.rank != 0:
        logger.info(back)  # other hosts' clocks say nothing of when it died
        return True
    logger.info(f"{back} {'in' if go.ranks else 'after'} {now - go.died:.1f} s")
    if go.gave_up:
        logger.info(f"{go.gave_up}: saving, then exiting")
    seconds = {"end": go.gone - go.died, "meet": met - go.gone, "load": now - met}
    told = {"round": go.round, "ranks": go.ranks, "cause": go.cause, "seconds": seconds}
    if go.ranks:
        run.metrics.event("recovery", step=run.step, **told)
    if go.was:
        sizes = {"from": go.was, "to": run.engine.ctx.world.size, "reserve": go.reserve, "cause": go.cause}
        brought = {"bytes": run.copies.brought if run.copies else 0, "seconds": now - go.died}
        run.metrics.event("resize", step=run.step, round=go.round, **sizes, **brought)
        for path in (run.engine.cfg.run.folder / "logs").glob("rank_*.pid"):
            if int(path.stem.removeprefix("rank_")) >= run.engine.ctx.world.size:
                path.unlink(missing_ok=True)  # a rank that is no more
    return True


def _describe_resize(run: Run) -> str:
    """Say on how many replicas a run goes on, and how they share a step."""
    cfg, ctx, go = run.engine.cfg, run.engine.ctx, run.companion.turn.go
    size, micro, dp = cfg.train.batches.size(run.step + 1), cfg.train.micro_batch_size, ctx.dp.size
    counts = [len(share_of(size, dp, replica, micro)) // micro for replica in range(dp)]
    each = f" as {' '.join(map(str, counts))}" if dp <= 16 else ""
    waiting = f", {go.reserve} rank{'s' * (go.reserve > 1)} in reserve" * (go.reserve > 0)
    alone = ", and no other host keeps copies" * (go.buddy is None)
    return f"dp {go.was * dp // ctx.world.size} -> {dp}, {size // micro} micro-batches{each}{waiting}{alone}"
