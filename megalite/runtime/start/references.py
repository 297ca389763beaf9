"""Log-probabilities of pairs of answers under the reference model: the weights that a run of preferences starts from.

They are computed once, in the run's layout, and stored beside the data, `PREFIX.ref-KEY.bin`: fp64, one per document.
KEY and `PREFIX.ref-KEY.json` say of which weights, model, data, length and precision. So a run that is resumed, in
whatever layout, has the same reference, and another run from the same weights need not compute it. Of runs that compute
it at once, all take what the first has stored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megalite.core.base.errors import UserError, require
from megalite.core.base.log import logger
from megalite.core.engine import Engine
from megalite.core.mesh import collectives
from megalite.core.mesh.agree import agree
from megalite.core.rows import Rows
from megalite.core.scoring import rows_of_rank, score_rows
from megalite.runtime.data import BlendedDataset, Dataset, Datasets
from megalite.runtime.data.pairs import PairDataset
from megalite.runtime.options.run import Config
from megalite.runtime.places.downloads import locked
from megalite.runtime.recover.bit_sums import sum_of_bits

# Tokens of all ranks that are in memory at a time, some 100 bytes each; at least those of a step.
_TOKENS = 1 << 22
_REMEDY = "restore the file, or begin the stage anew in another --run-dir"


def score_references(engine: Engine[Config], datasets: Datasets, recorded: Mapping[str, str] | None) -> dict[str, str]:
    """Give the data the scores of the reference; every rank calls it.

    Args:
        engine: its weights are those that the run starts from; they are the reference unless one is recorded.
        recorded: what this returned when the run began; None in a new one.

    Returns:
        By the hash of each part of the data: the KEY of its scores, and their SHA-256.

    Raises:
        UserError: scores that the run began with are not there, or have changed; or they cannot be written.
    """
    out: dict[str, str] = {}
    model = None if recorded else digest_of_weights(engine)
    found: dict[str, npt.NDArray[np.float64]] = {}
    for dataset in _pair_datasets(datasets):
        prefix = dataset.indexed.prefix
        if prefix not in found:
            whole = dataset.whole()
            content = agree(engine.ctx, whole.content_hash)
            train = {name: getattr(engine.cfg.train, name) for name in ("precision", "fp8")}
            facts = {"model": model, "options": asdict(engine.cfg.model), "data": content, **train}
            key, digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16], ""
            if recorded:
                rule = "the run began without these pairs, and so without their scores by its first weights"
                require(content in recorded, f"--data or --valid-data {prefix}", rule, "give the data it began with")
                key, digest = recorded[content].split()
            path, documents = Path(f"{prefix}.ref-{key}.bin"), whole.indexed.num_documents
            scores = _stored(engine, path, documents, digest)
            if scores is None:
                _store(engine, path, _score(engine, whole), facts)
                scores = _stored(engine, path, documents, "")
                assert scores is not None
            found[prefix] = scores
            out[content] = f"{key} {_sha256(scores.tobytes())}"
        dataset.references = found[prefix]
    return out


def digest_of_weights(engine: Engine[Config]) -> str:
    """Return a hash of all weights, the same in any layout: SHA-256 of the sum of each one's bits as integers."""
    sums: dict[str, int] = {}
    for state in engine.optimizer.states():
        if state.role == "master" and state.is_owner:
            for box in state.slices:
                bits = sum_of_bits(state.flat[box.at : box.at + box.numel])
                sums[state.name] = sums.get(state.name, 0) + int(bits)
    total: dict[str, int] = {}
    for text in collectives.gather_texts(json.dumps(sums), engine.ctx.world, engine.ctx.device):
        for name, bits in json.loads(text).items():
            # As each box's sum is: whatever the boxes.
            total[name] = (total.get(name, 0) + bits) % 2**32
    return _sha256(json.dumps(total, sort_keys=True).encode())


def _pair_datasets(datasets: Datasets) -> list[PairDataset]:
    def parts(dataset: Dataset | None) -> list[Any]:
        return list(dataset.datasets) if isinstance(dataset, BlendedDataset) else [dataset]

    both = [*parts(datasets.train), *parts(datasets.valid)]
    return [dataset for dataset in both if isinstance(dataset, PairDataset)]


def _stored(engine: Engine[Config], path: Path, documents: int, digest: str) -> npt.NDArray[np.float64] | None:
    """Read scores on rank 0, and share them; None where a new run has none, and can write them.

    Args:
        digest: SHA-256 that they must have, as the run began with them; "": that of their description.
    """

    def read() -> bytes:
        if engine.ctx.rank != 0:
            return b""
        if not (digest or path.exists()):
            with _writing(path):  # what cannot be written is not computed for hours
                return b""
        try:
            data = path.read_bytes()
            expected = digest or json.loads(path.with_suffix(".json").read_text())["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            rule = f"has the reference's log-probabilities, and cannot be read ({e})"
            raise UserError(str(path), rule, _REMEDY if digest else "delete it: it is made anew") from None
        rule = "is not as it was written: its SHA-256 is another"
        same = _sha256(data) == expected and len(data) == 8 * documents
        require(same, str(path), rule, _REMEDY if digest else "delete it: it is made anew")
        return data

    data = agree(engine.ctx, read)
    values = torch.zeros(1 + documents, dtype=torch.float64, device=engine.ctx.device)
    if data:
        values[0] = 1
        values[1:] = torch.from_numpy(np.frombuffer(data).copy())
    collectives.broadcast(values, engine.ctx.world).wait()
    has_some, *_ = values[:1].tolist()
    if has_some:
        logger.info(f"the reference's log-probabilities are those of {path}")
    return values[1:].cpu().numpy() if has_some else None


def _score(engine: Engine[Config], dataset: PairDataset) -> npt.NDArray[np.float64]:
    """Score all pairs with the weights as they are; NaN where a document is not used."""
    size = engine.cfg.train.micro_batch_size
    packs, documents = dataset.packs(), dataset.indexed.num_documents
    logger.info(f"computing the reference's log-probabilities: {len(packs)} samples, {documents // 2} pairs")
    engine.optimizer.wait_weights()
    out = np.full(documents, np.nan)
    of_a_step = size * engine.schedule.num_microbatches * engine.ctx.dp.size
    at_once = max(1, _TOKENS // (of_a_step * dataset.seq_len)) * of_a_step
    for first in range(0, len(packs), at_once):
        part = packs[first : first + at_once]
        mine = rows_of_rank(engine, part, size)
        rows = Rows.stack([dataset.row(pairs) for pairs in mine])
        numbers = np.zeros((len(mine), dataset.seq_len + 1), np.int64)
        for row, pairs in enumerate(mine):
            numbers[row, : 2 * len(pairs)] = [2 * pair + side for pair in pairs for side in (0, 1)]
        assert rows.owners is not None
        owners = np.where(rows.owners >= 0, np.take_along_axis(numbers, rows.owners.clip(0), 1), -1)
        scores = score_rows(engine, rows, owners, documents, size)
        assert scores is not None
        used = [2 * pair + side for pairs in part for pair in pairs for side in (0, 1)]
        out[used] = scores.logprobs[used]
        logger.info(f"scored {first + len(part)} of {len(packs)} samples")
    return out


def _store(engine: Engine[Config], path: Path, scores: npt.NDArray[np.float64], facts: Mapping[str, object]) -> None:
    """Write scores and what they are of, on rank 0, unless another run has; the scores last: runs look for them."""

    def write() -> None:
        if engine.ctx.rank != 0:
            return
        description = {**facts, "documents": len(scores), "sha256": _sha256(scores.tobytes())}
        with _writing(path):
            if path.exists():
                return
            for file, data in ((path.with_suffix(".json"), json.dumps(description).encode()), (path, scores.tobytes())):
                partial = file.with_name(f"{file.name}.partial")
                partial.write_bytes(data)
                os.replace(partial, file)

    agree(engine.ctx, write)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Be the only process that writes scores.

    Raises:
        UserError: they cannot be written.
    """
    try:
        with locked(path.with_name(f".lock_{path.stem}")):
            yield
    except OSError as e:
        rule = f"holds the reference's log-probabilities beside the data, and cannot be written ({e.strerror})"
        raise UserError(str(path), rule, "copy the data to a folder that can be written") from None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
