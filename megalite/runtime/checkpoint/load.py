"""Loading a checkpoint into any layout: each rank reads the intersections of what it holds with what was saved.

Every block of every shard is checked before any byte is used; the ranks share this work.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.base.slices import Slice
from megalite.core.mesh.agree import agree
from megalite.core.mesh.collectives import all_reduce, gather_texts
from megalite.core.mesh.context import ParallelContext
from megalite.core.options.model import ModelConfig
from megalite.core.sharding import StateTensor
from megalite.runtime.checkpoint.manifest import Manifest, Part, TensorEntry, manifest_text, read_manifest
from megalite.runtime.checkpoint.mirror import Mirror, path_of
from megalite.runtime.checkpoint.reader import ReadStats, ShardReader
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint
from megalite.runtime.places.folder_place import FolderPlace


def find_latest(root: str | Path) -> Path | None:
    """Find the newest committed full checkpoint in a checkpoints folder; return None if there is none.

    Folders without COMMIT are skipped with a warning. Shards are not read.

    Raises:
        BadCheckpoint: the manifest of the newest one is not the committed one.
    """
    for name in FolderPlace(Path(root)).committed():
        read_manifest(Path(root) / name)
        return Path(root) / name
    return None


class Verified(NamedTuple):
    """A checkpoint that all ranks have verified.

    Attributes:
        path: its folder.
        manifest: this rank's part of the manifest, without checksums.
        stats: bytes that this rank read.
    """

    path: Path
    manifest: Manifest
    stats: ReadStats


def find_good(
    root: str | Path,
    ctx: ParallelContext,
    fallback: bool = False,
    states: Sequence[StateTensor] | None = None,
    mirror: Mirror | None = None,
) -> Verified | None:
    """As `find_latest`, all ranks together, and verify every checksum.

    Args:
        root, ctx: the checkpoints folder, and this rank's axes.
        fallback: use the previous checkpoint, with a warning, if one is damaged.
        states: see `verify_together`.
        mirror: look for a newer one there too; what is needed of it is downloaded.
    """
    names = _list_together(Path(root), ctx, mirror)
    for name in names:
        try:
            path = agree(ctx, partial(path_of, name, Path(root), mirror))
            return verify_together(path, ctx, states)
        except UserError as e:
            if not fallback and name != names[-1]:
                raise UserError.from_message(f"{e}, or resume from the previous one with --resume-fallback") from None
            if not fallback:
                raise
            logger.warning(f"--resume-fallback: skipping {name}: {e}")
    if names:
        raise BadCheckpoint(
            str(root), "all of its checkpoints are damaged", "restore one, or start a new run with --resume never"
        )
    return None


def _list_together(root: Path, ctx: ParallelContext, mirror: Mirror | None) -> list[str]:
    """List the committed checkpoints of a folder, and of a place in a store, newest first."""
    listed = "\n".join(FolderPlace(root).committed()) if ctx.rank == 0 or mirror else ""
    lists = [text.split() for text in gather_texts(listed, ctx.world, ctx.device)]
    if mirror is None:
        return lists[0]
    # Without a shared folder, every host has to hold it.
    local = [name for name in lists[0] if all(name in names for names in lists)]
    text = agree(ctx, lambda: "\n".join(mirror.committed()) if ctx.rank == 0 else "")
    remote = gather_texts(text, ctx.world, ctx.device)[0].split()
    # "step_NNNNNNNN" or, there, "step_NNNNNNNN-ID"; of one step, the local one first.
    return sorted(sorted([*local, *remote]), key=lambda name: int(name.split("_")[1].split("-")[0]), reverse=True)


def read_meta(path: str | Path) -> dict[str, Any]:
    """Return the `meta` that a checkpoint was saved with.

    Raises:
        BadCheckpoint: not a committed checkpoint.
    """
    return read_manifest(Path(path)).meta


def model_config(meta: dict[str, Any], path: Path) -> ModelConfig:
    """Return the model that a checkpoint's meta describes.

    Raises:
        UserError: the meta of the checkpoint `path` does not describe a model.
    """
    try:
        return ModelConfig.from_dict(meta["config"]["model"])
    except (KeyError, TypeError, AttributeError) as e:
        raise BadCheckpoint(str(path), f"its manifest does not describe the model ({e!r:.100})") from None


def verify_together(path: Path, ctx: ParallelContext, states: Sequence[StateTensor] | None = None) -> Verified:
    """Verify a checkpoint, each rank a share of it; raise `UserError` on every rank if one finds damage.

    The manifest is parsed once on every rank, and only rank 0 asks for the sizes of all shards.

    Args:
        path: the checkpoint's folder.
        ctx: this rank's axes.
        states: what this rank will load: nothing else is kept of the manifest. Default: keep all.
    """
    text = agree(ctx, lambda: manifest_text(path) if ctx.rank == 0 else b"")
    size = int(gather_texts(str(len(text)), ctx.world, ctx.device)[0])

    def verify_share() -> Verified:
        data, part = text or manifest_text(path, size), Part(ctx.rank, ctx.world.size, wanted_boxes(states))
        reader = ShardReader(path, Manifest.from_json(data, str(path / "manifest.json"), part))
        try:
            reader.verify(ctx.rank, ctx.world.size)
            if ctx.rank == 0 and (extra := reader.extra_files()):
                logger.warning(f"{path} holds files that are not part of it and are ignored: {', '.join(extra)}")
        finally:
            reader.close()
        return Verified(path, reader.manifest.verified(), reader.stats)

    return agree(ctx, verify_share)


def wanted_boxes(states: Sequence[StateTensor] | None) -> dict[tuple[str, str], list[Slice]] | None:
    if states is None:
        return None
    wanted: dict[tuple[str, str], list[Slice]] = {}
    for state in states:
        wanted.setdefault((state.role, state.name), []).extend(state.slices)
    return wanted


def load_checkpoint(
    checkpoint: str | Path | Verified,
    states: Sequence[StateTensor],
    ctx: ParallelContext,
    moments: bool = True,
    left_out: Collection[str] = (),
) -> tuple[dict[str, Any], ReadStats]:
    """Fill the states of all ranks from a checkpoint of any layout; every rank calls this.

    Moments that the checkpoint does not hold (it has weights alone) become zero, with a warning.

    Args:
        checkpoint: its folder, to be verified first, or what `find_good` found for these states.
        states: what this rank holds; filled in place.
        ctx: this rank's axes.
        moments: load moments and residuals of compression; otherwise they become zero.
        left_out: names of tensors that no rank needs.

    Returns:
        The checkpoint's meta, and the number of bytes that this rank read.

    Raises:
        UserError: the checkpoint is damaged or of another model; raised on every rank, before any state changes.
    """
    if not isinstance(checkpoint, Verified):
        checkpoint = verify_together(Path(checkpoint), ctx, states)
    path, manifest, stats = checkpoint
    sources = agree(ctx, lambda: _sources(path, manifest, states, moments))
    _check_all_used(path, manifest, {*left_out, *(state.name for state in states)}, ctx)
    reader = ShardReader(path, manifest, stats)

    def fill() -> None:
        try:
            for state, source in zip(states, sources):
                # Checkpoints do not hold the vocabulary padding; it is zero, as in a new run.
                state.flat.detach().zero_()
                for box in state.slices:
                    _fill(reader, source, box, state)
        finally:
            reader.close()

    agree(ctx, fill)
    missing = sorted({s.role for s, source in zip(states, sources) if not source})
    if moments and missing and ctx.rank == 0:
        logger.warning(f"{path} has no {', '.join(missing)}: they start at zero")
    return manifest.meta, stats


def _fill(reader: ShardReader, source: list[TensorEntry], box: Slice, state: StateTensor) -> None:
    """Read a box of a state: from its tensor, or as an equal fraction of the sum of several."""
    out = state.flat.detach()[box.at : box.at + box.numel].view(box.shape)
    if len(source) == 1:
        reader.read(source[0], box, out)
    elif source:
        assert state.summand is not None
        term = torch.empty(box.shape)
        for entry in source:
            reader.read(entry, box, term)
            out.add_(term.to(out.device))
        out.div_(state.summand[1])


def weights_of(manifest: Manifest, path: Path) -> dict[str, TensorEntry]:
    """Return a checkpoint's weights: masters, or bf16 weights saved alone."""
    return manifest.tensors[_kind_of_weights(manifest, path)]


def _kind_of_weights(manifest: Manifest, path: Path) -> str:
    """Return the kind of a checkpoint's weights: "master", or "model" where they were saved alone."""
    for kind in ("master", "model"):
        if kind in manifest.tensors:
            return kind
    raise BadCheckpoint(str(path), "holds no weights")


def _sources(path: Path, manifest: Manifest, states: Sequence[StateTensor], moments: bool) -> list[list[TensorEntry]]:
    """Find the saved tensor of each state: several to be summed, or none where it was not saved or is not wanted."""
    sources: list[list[TensorEntry]] = []
    for state in states:
        if state.summand is not None:
            sources.append(_summands(manifest, state) if moments else [])
            continue
        if state.role == "master":
            tensors = weights_of(manifest, path)
        elif moments and state.role in manifest.tensors:
            tensors = manifest.tensors[state.role]
        else:
            sources.append([])
            continue
        entry = tensors.get(state.name)
        if entry is None or entry.shape != state.shape:
            rule = f"has shape {list(entry.shape)} there" if entry else "is missing"
            raise BadCheckpoint(
                str(path),
                f"{state.role} {state.name} of shape {list(state.shape)} {rule}: the checkpoint is of another model",
                "use the model options of the checkpoint",
            )
        sources.append([entry])
    return sources


def _summands(manifest: Manifest, state: StateTensor) -> list[TensorEntry]:
    """Find the same summand if their number has not changed, otherwise all of them."""
    assert state.summand is not None
    summands: list[TensorEntry] = []
    # Numbered without a gap; those of another shape (another rank of PowerSGD) count as missing.
    while entry := manifest.tensors.get(f"{state.role}_{len(summands)}", {}).get(state.name):
        if entry.shape != state.shape:
            return []
        summands.append(entry)
    i, n = state.summand
    return summands[i : i + 1] if len(summands) == n else summands


def _check_all_used(path: Path, manifest: Manifest, own_names: Collection[str], ctx: ParallelContext) -> None:
    """Refuse a checkpoint with tensors that no rank needs: it holds a larger model."""
    names = sorted(manifest.names(_kind_of_weights(manifest, path)))
    used = torch.tensor([float(name in own_names) for name in names], device=ctx.device)
    all_reduce(used, ctx.world, dist.ReduceOp.MAX).wait()
    unused = [name for name, flag in zip(names, used.tolist()) if not flag]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise BadCheckpoint(
            str(path),
            f"holds {unused[0]}{more}, which this model does not have",
            "use the model options of the checkpoint",
        )
