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

from megalite.core.base.log import logger
from megalite.core.mesh.agree import agree_in_rounds
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import ParallelContext
from megalite.runtime.base.waits import tell
from megalite.runtime.checkpoint.fragments import fragment_name, parse_fragment, read_fragment
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint
from megalite.runtime.checkpoint.upload import METRICS, Part, TakenError, commit_part, send_part, send_run_files
from megalite.runtime.places.names import TEMPORARY, step_of
from megalite.runtime.places.place import COMMIT
from megalite.runtime.places.store import MissingObject, Store, StoreError
from megalite.runtime.places.store_place import OWNER, StorePlace

# Name of a save -> number of its parts, and of each part that some host has, the ranks that see it.
_Found = dict[str, tuple[int, dict[int, list[int]]]]


def upload_waiting(root: Path, url: str, ctx: ParallelContext, patience: float) -> list[str]:
    """Upload and commit what is left of earlier saves, if it is whole; every rank calls this.

    Of full checkpoints only the newest, and only if it is newer than those of the store. Each part may be on any host,
    or in the store already.

    Args:
        root: the run's checkpoints folder, of which each host may have its own.
        url: its place in the store.
        patience: seconds for which an upload is tried again, once the store has answered at all.

    Returns:
        Names of saves of which parts are missing: another start, on other hosts, may find them.

    Raises:
        StoreError: the store is away; nothing is lost. Raised on every rank.
    """
    mine = _parts_in(root)
    listed = {name: [parts[0].job["world"], [part.job["rank"] for part in parts]] for name, parts in mine.items()}
    found: _Found = {}
    for rank, text in enumerate(gather_texts(json.dumps(listed), ctx.world, ctx.device)):
        for name, (world, saved_by) in json.loads(text).items():
            for part in saved_by:
                found.setdefault(name, (world, {}))[1].setdefault(part, []).append(rank)
    incomplete = list[str]()
    if found:
        place = StorePlace(Store(url, patience=patience))
        chosen = agree_in_rounds(
            ctx, lambda: _choose(StorePlace(Store(url)), found) if ctx.rank == 0 else ([], []), tell
        )
        whole, incomplete = json.loads(gather_texts(json.dumps(chosen), ctx.world, ctx.device)[0])
        for name in whole:
            senders = {part: _sender(part, ranks) for part, ranks in found[name][1].items()}
            own = [part for part in mine.get(name, []) if senders[part.job["rank"]] == ctx.rank]
            agree_in_rounds(ctx, partial(_send, place, root, own), tell)
            commit = partial(_commit, place, name, root if 0 in senders else None)
            lacks = agree_in_rounds(ctx, commit if ctx.rank == senders.get(0, 0) else lambda: "", tell)
            if any(gather_texts(lacks, ctx.world, ctx.device)):
                incomplete.append(name)
    for part in (part for parts in mine.values() for part in parts):
        part.close()
    return incomplete


def _sender(part: int, ranks: list[int]) -> int:
    """Choose who of a host's ranks uploads a part, so that they share the work."""
    return part if part in ranks else ranks[part % len(ranks)]


def _parts_in(root: Path) -> dict[str, list[Part]]:
    """List the parts of this host that were written to their end, by their names in the store."""
    parts: dict[str, list[Part]] = {}
    for path in sorted(root.glob(f"{TEMPORARY}*/rank_*.json")):
        with contextlib.suppress(OSError, ValueError):
            fragment = parse_fragment(path.read_bytes())
            if fragment is None or "job" not in fragment:
                continue
            shard = path.with_name(fragment["file"]["name"])
            if shard.stat().st_size == fragment["file"]["size"]:
                part = Part(fragment["job"], os.open(shard, os.O_RDONLY), fragment)
                parts.setdefault(part.name, []).append(part)
    return parts


def _choose(place: StorePlace, found: _Found) -> tuple[list[str], list[str]]:
    """Return the names of saves that can be completed, oldest first, and of those that could be if more were found."""
    newest = max(map(step_of, place.committed()), default=-1)
    chosen = list[str]()
    incomplete = list[str]()
    for name in sorted(found, key=lambda name: int(name.split("_")[1].split("-")[0]), reverse=True):
        world, holders = found[name]
        is_full = step_of(name) >= 0
        if (is_full and step_of(name) <= newest) or place.exists(f"{name}/{COMMIT}"):
            continue
        gone = [r for r in range(world) if r not in holders and not place.exists(fragment_name(name, r))]
        if gone:
            logger.warning(
                f"{name} was not uploaded by an earlier process, and cannot be: no host has part {gone[0]}; "
                f"what there is of it is kept until this run has saved a checkpoint"
            )
            incomplete.append(name)
            continue
        chosen.insert(0, name)
        newest = max(newest, step_of(name))
    return chosen, incomplete


def _send(place: StorePlace, root: Path, parts: list[Part]) -> None:
    for part in parts:
        if _is_there(place, part):
            continue
        if part.job["rank"] == 0:
            with contextlib.suppress(StoreError, TakenError):  # which the commit meets again
                send_run_files(place, _job_here(place, part.job, root))
        send_part(place, part)


def _is_there(place: StorePlace, part: Part) -> bool:
    """Whether an earlier attempt has uploaded a part, whole: its fragment comes last."""
    file = part.fragment["file"]
    try:
        is_whole = place.store.size(f"{part.name}/{file['name']}") == file["size"]
    except MissingObject:
        return False
    data = place.read(fragment_name(part.name, part.job["rank"])) if is_whole else None
    return data is not None and parse_fragment(data) == part.fragment


def _commit(place: StorePlace, name: str, root: Path | None) -> str:
    """Commit a save whose parts are all in the store, for the process that wrote them, unless another run came since.

    Args:
        root: the checkpoints folder of a host that has the part of rank 0, and so may have the run's newest files.

    Returns:
        What is damaged there, and keeps the save from being committed; "" if nothing is.
    """
    try:
        fragment = read_fragment(place, fragment_name(name, 0))
        if fragment is None:
            raise MissingObject(fragment_name(name, 0), "is not there any more")
        problems = commit_part(place, Part(_job_here(place, fragment["job"], root), -1, {}), 0.0)
    except TakenError as e:
        logger.warning(f"{name} was not uploaded by an earlier process, and is given up: {e}")
        return ""
    except BadCheckpoint as e:
        logger.warning(
            f"{name} was not uploaded by an earlier process, and cannot be: {e}; what there is of it is kept until "
            f"this run has saved a checkpoint"
        )
        return str(e)
    logger.info(f"uploaded {place.store.url}/{name}, which an earlier process had written")
    for problem in problems:
        logger.warning(f"{name} is uploaded, but {problem}")
    return ""


def _job_here(place: StorePlace, job: dict[str, Any], root: Path | None) -> dict[str, Any]:
    """Return the job of the process that wrote a save, to be finished by this one."""
    has_files = root is not None and _has_newest_metrics(place.store.parent, root.parent)
    owner = _owner(place, job["remote"])
    return job | {"root": str(root) if has_files else "", "remote": job["remote"] | {"owner": owner}}


def _owner(place: StorePlace, orders: dict[str, Any]) -> str:
    """Return as whom to commit: a run that took the place and saved nothing, as on wrong hosts, is no obstacle."""
    owner = place.read(OWNER)
    if owner is None:
        place.put(OWNER, orders["owner"].encode())
        return orders["owner"]
    known = {*orders["written"], *orders["keep"]}
    return owner.decode(errors="replace") if known.issuperset(place.committed()[:1]) else orders["owner"]


def _has_newest_metrics(run: Store, run_dir: Path) -> bool:
    """Whether this host's metrics go on from those of the store: else an old disk has come back."""
    path = run_dir / METRICS
    try:
        return path.exists() and path.read_bytes().startswith(run.read(METRICS))
    except MissingObject:
        return True
