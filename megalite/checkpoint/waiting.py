"""Parts of checkpoints that an earlier process has written but could not upload, where the hosts share no folder.

Such a checkpoint is nowhere else: its parts wait in `.tmp_NAME_ID/` of each host until COMMIT is in the store. At the
next start they are uploaded before anything looks for a checkpoint to resume from.
"""

from __future__ import annotations

import contextlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from megalite.base.log import logger
from megalite.base.store import Store
from megalite.checkpoint import remote
from megalite.checkpoint.commit import TEMPORARY
from megalite.checkpoint.upload import Part, TakenError, commit_part, send_part
from megalite.dist.agree import agree
from megalite.dist.collectives import gather_texts
from megalite.dist.context import ParallelContext


def upload_waiting(root: Path, url: str, ctx: ParallelContext) -> None:
    """Upload and commit what is left of earlier saves, if it is whole; every rank calls this.

    Of full checkpoints only the newest, and only if it is newer than those of the store. Each part may be on any host,
    or in the store already.

    Args:
        root: the run's checkpoints folder, of which each host may have its own.
        url: its place in the store.

    Raises:
        StoreError: the store is away; nothing is lost. Raised on every rank.
    """
    mine = _parts_in(root)
    listed = {name: [parts[0].job["world"], [part.job["rank"] for part in parts]] for name, parts in mine.items()}
    # Name -> number of parts, and of each part that some host has the first rank that sees it.
    found: dict[str, tuple[int, dict[int, int]]] = {}
    for rank, text in enumerate(gather_texts(json.dumps(listed), ctx.world, ctx.device)):
        for name, (world, saved_by) in json.loads(text).items():
            holders = found.setdefault(name, (world, {}))[1]
            for part in saved_by:
                holders.setdefault(part, rank)
    if found:
        store = Store(url)
        whole = agree(ctx, lambda: _choose(store, found) if ctx.rank == 0 else [])
        for name in json.loads(gather_texts(json.dumps(whole), ctx.world, ctx.device)[0]):
            holders = found[name][1]
            own = [part for part in mine.get(name, []) if holders[part.job["rank"]] == ctx.rank]
            agree(ctx, partial(_send, store, own))
            # Who has the part of rank 0 has the metrics up to there.
            agree(ctx, partial(_commit, store, [name] if ctx.rank == holders.get(0, 0) else [], root))
    for part in (part for parts in mine.values() for part in parts):
        part.close()


def _parts_in(root: Path) -> dict[str, list[Part]]:
    """List the parts of this host that were written to their end, by their names in the store."""
    parts: dict[str, list[Part]] = {}
    for path in sorted(root.glob(f"{TEMPORARY}*/rank_*.json")):
        with contextlib.suppress(OSError, ValueError):
            fragment = json.loads(path.read_bytes())
            shard = path.with_suffix(".safetensors")
            if "job" in fragment and shard.stat().st_size == fragment["file"]["size"]:
                part = Part(fragment["job"], os.open(shard, os.O_RDONLY), fragment)
                parts.setdefault(part.name, []).append(part)
    return parts


def _choose(store: Store, found: dict[str, tuple[int, dict[int, int]]]) -> list[str]:
    """Return the names of saves that can be completed, oldest first."""
    newest, chosen = max(map(remote.step_of, remote.committed(store)), default=-1), list[str]()
    for name in sorted(found, key=lambda name: int(name.split("_")[1].split("-")[0]), reverse=True):
        world, holders = found[name]
        is_full = remote.step_of(name) >= 0
        if (is_full and remote.step_of(name) <= newest) or remote.exists(store, f"{name}/COMMIT"):
            continue
        gone = [r for r in range(world) if r not in holders and not remote.exists(store, _fragment(name, r))]
        if gone:
            logger.warning(f"{name} was not uploaded by an earlier process, and cannot be: no host has part {gone[0]}")
            continue
        chosen.insert(0, name)
        newest = max(newest, remote.step_of(name))
    return chosen


def _send(store: Store, parts: list[Part]) -> None:
    for part in parts:
        send_part(store, part)


def _commit(store: Store, names: list[str], root: Path) -> None:
    """Commit saves whose parts are all in the store, for the process that wrote them, unless another run came since."""
    for name in names:
        job: dict[str, Any] = json.loads(store.read(_fragment(name, 0)))["job"]
        if not remote.exists(store, remote.OWNER):
            store.write(remote.OWNER, job["remote"]["owner"].encode())
        try:
            problems = commit_part(store, Part(job | {"root": str(root)}, -1, {}), 0.0)
        except TakenError as e:
            logger.warning(f"{name} was not uploaded by an earlier process, and is given up: {e}")
            continue
        logger.info(f"uploaded {store.url}/{name}, which an earlier process had written")
        for problem in problems:
            logger.warning(f"{name} is uploaded, but {problem}")


def _fragment(name: str, rank: int) -> str:
    return f"{name}/rank_{rank:05d}.json"
