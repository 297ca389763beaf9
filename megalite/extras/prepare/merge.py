"""Join prepared token files: byte for byte what one run over the texts of all of them, in this order, would write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megalite.core.base.errors import UserError, require
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data.packing import LossMask, mask_path
from megalite.runtime.data.sidecar import read_sidecar, read_stream_pieces
from megalite.runtime.data.tokens import IndexedDataset

# Entries of `PREFIX.json` that are sums over the parts.
_SUMS = ("documents", "tokens", "learned_tokens")
# Tokens that are copied at a time.
_PIECE = 1 << 22


def merge(prefixes: Sequence[str], out_prefix: str) -> tuple[int, int]:
    """Write the documents of several prefixes, one after the other, under a new one.

    Args:
        prefixes: prepared data of one tokenizer (and one chat template), checked against their checksums.
        out_prefix: prefix of the joined data.

    Returns:
        Number of documents and of tokens.

    Raises:
        UserError: a prefix cannot be read, or they were made in different ways.
    """
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    masked = [mask_path(prefix).exists() for prefix in prefixes]
    sidecar = _joined([read_sidecar(prefix) for prefix in prefixes], prefixes)
    for part, has_mask in zip(parts, masked):
        rule = "was made with --order stream, and has the pieces of one folder"
        require(read_stream_pieces(part.prefix) is None, part.prefix, rule, "blend the prefixes in --data")
        alike = part.dtype == parts[0].dtype and has_mask == masked[0]
        rule = f"has ids of {part.dtype}{' and marked answers' * has_mask}, {parts[0].prefix} of {parts[0].dtype}"
        require(alike, part.prefix, rule + " and marked answers" * masked[0], "merge data of one kind")
        rule = "has several sequences in a document, which are written as one here"
        require(part.index.one_sequence_each, part.prefix, rule, "merge it with the tool that made it")
    with IndexedDatasetWriter(out_prefix, parts[0].dtype, masked=masked[0]) as writer:
        for part in parts:
            mask = LossMask(part, "answers") if masked[0] else None
            for first, stop in _pieces(part):
                begin, end = int(part.starts[first]), int(part.starts[stop])
                marks = np.frombuffer(mask.file.read(begin, end - begin), np.uint8) if mask else None
                writer.add_documents(part.tokens(begin, end), part.sizes[first:stop], marks)
        writer.finalize(sidecar)
    return sum(part.num_documents for part in parts), sum(part.num_tokens for part in parts)


def _joined(sidecars: list[dict[str, Any] | None], prefixes: Sequence[str]) -> dict[str, Any] | None:
    """Return the description of the joined data; None where no part has one."""
    kinds = [
        {key: value for key, value in sidecar.items() if key not in (*_SUMS, "checksums")} if sidecar else None
        for sidecar in sidecars
    ]
    for prefix, kind in zip(prefixes, kinds):
        if kind != kinds[0]:
            there = {} if kinds[0] is None else kinds[0]
            differ = sorted(k for k in {*there, *(kind or {})} if there.get(k) != (kind or {}).get(k))
            rule = f"was made in another way than {prefixes[0]} ({', '.join(differ)} differ)"
            raise UserError(prefix, rule, "prepare all parts with one tokenizer, template and version of megalite")
    described = [sidecar for sidecar in sidecars if sidecar is not None]
    if not described:
        return None
    sums = {key: sum(sidecar[key] for sidecar in described) for key in _SUMS if key in described[0]}
    return {key: sums.get(key, value) for key, value in described[0].items() if key != "checksums"}


def _pieces(part: IndexedDataset) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) documents of about `_PIECE` tokens."""
    first = 0
    while first < part.num_documents:
        stop = int(np.searchsorted(part.starts, int(part.starts[first]) + _PIECE, "right")) - 1
        stop = min(max(stop, first + 1), part.num_documents)
        yield first, stop
        first = stop
