"""`PREFIX.json`, written by preprocessing beside `PREFIX.bin` and `.idx`: the tokenizer, and checksums of every byte.

Checksums of a file: of every block of 32 KiB the first 8 bytes of its SHA-256, so that training can check each block
when it first reads it, and one SHA-256 over those of all blocks ("root"). A sample of 8,192 ids of 4 bytes then reads
twice its bytes. Older data have blocks of 256 KiB, and the SHA-256 of the file.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from megalite.core.base.errors import UserError
from megalite.core.base.log import warn_on_rank_0
from megalite.runtime.base.untrusted import BadFile, read_json

BLOCK = 32 << 10
_OLD_BLOCK = 256 << 10
DIGEST = 8
_MAX_BYTES = 1 << 20
_REMEDY = "preprocess the text again, or remove the file"


class Checksums(NamedTuple):
    """Checksums of a file as preprocessing wrote it.

    Attributes:
        root: SHA-256 (hex) of the SHA-256 of all blocks; in older data, of the file.
        blocks: the concatenated digests of its blocks.
        block: bytes of a block.
    """

    root: str
    blocks: bytes
    block: int = BLOCK

    def matches(self, block: int, data: bytes) -> bool:
        """Whether these are the bytes that preprocessing wrote as a block."""
        return hashlib.sha256(data).digest()[:DIGEST] == self.blocks[block * DIGEST : (block + 1) * DIGEST]


class BlockHasher:
    """Hash a file while it is written, in blocks of `block` bytes: every byte once."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._root = hashlib.sha256()
        self._blocks = bytearray()
        self._pending = bytearray()

    def update(self, data: bytes) -> None:
        """Add the bytes that were written next."""
        self._pending += data
        whole = len(self._pending) // self._block * self._block
        with memoryview(self._pending) as view:
            for at in range(0, whole, self._block):
                self._add(view[at : at + self._block])
        del self._pending[:whole]

    def _add(self, block: bytearray | memoryview) -> None:
        digest = hashlib.sha256(block).digest()
        self._root.update(digest)
        self._blocks += digest[:DIGEST]

    def to_json(self) -> dict[str, str]:
        """Return the file's entry in `PREFIX.json`, after the last `update`."""
        if self._pending:
            self._add(self._pending)
            self._pending.clear()
        return {"root": self._root.hexdigest(), "blocks": base64.b64encode(self._blocks).decode()}


def read_sidecar(prefix: str | Path) -> dict[str, Any] | None:
    """Return the contents of `PREFIX.json`, None if there is no such file (data made by Megatron-LM).

    Raises:
        UserError: the file was not written by preprocessing.
    """
    content = _read(prefix)
    if content is not None and not (type(content.get("vocab_size")) is int and "tokenizer_sha256" in content):
        rule = "must hold tokenizer_sha256 and vocab_size, as preprocess_data.py writes them"
        raise UserError(f"{prefix}.json", rule, _REMEDY)
    return content


def max_bytes(documents: int) -> int:
    """Return the most bytes that `PREFIX.json` may have, but for checksums: each document may be a piece."""
    return _MAX_BYTES + 800 * documents


class StreamPieces(NamedTuple):
    """How the documents of token files lie in the pieces of the text that they were made of.

    Attributes:
        text_bytes: see `stream.sources.Source.tokens`.
        pieces: of each piece its parts: (documents, `Source.key`).
    """

    text_bytes: int
    pieces: list[list[tuple[int, str]]]


def read_stream_pieces(prefix: str | Path) -> StreamPieces | None:
    """Return the pieces of data that `megalite preprocess --order stream` made, None of other data.

    Raises:
        UserError: they are malformed.
    """
    if (entry := (_read(prefix) or {}).get("stream")) is None:
        return None
    try:
        pieces = [[(documents, key) for documents, key in parts] for parts in entry["pieces"]]
        found = StreamPieces(entry["text_bytes"], pieces)
        kinds = {(type(documents), type(key)) for parts in pieces for documents, key in parts}
        if kinds != {(int, str)} or type(found.text_bytes) is not int or not all(pieces):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{prefix}.json", "its pieces are not as megalite preprocess writes them", _REMEDY) from None
    return found


def chat_template_of(
    prefixes: Iterable[str], learned: str | None = None, streamed: Mapping[str, str] | None = None
) -> str | None:
    """Return the chat template of a model that trains on these data; None if several templates wrote them.

    Args:
        prefixes: prefixes of the data.
        learned: template of the checkpoint that the run starts from, used if no template wrote the data.
        streamed: names of chats that are read as text, and their templates.

    Raises:
        UserError: as `read_sidecar`.
    """
    entries = ((prefix, (read_sidecar(prefix) or {}).get("chat_template")) for prefix in prefixes)
    named = chain(entries, (streamed or {}).items())
    prefix_of = {template: prefix for prefix, template in named if isinstance(template, str)}
    if len(prefix_of) > 1:
        names = " and ".join(sorted(prefix_of.values())[:2])
        warn_on_rank_0(f"{names} were written by different chat templates: checkpoints and exports will have none")
        return None
    return next(iter(prefix_of), learned)


def read_checksums(prefix: str | Path) -> dict[str, Checksums]:
    """Return the checksums in `PREFIX.json` by file ("bin", "idx"); empty without it, or if it has none.

    Raises:
        UserError: they are malformed.
    """
    files = (_read(prefix) or {}).get("checksums", {})
    try:
        block = files.pop("block_bytes") if files else BLOCK
        if block not in (BLOCK, _OLD_BLOCK):
            raise ValueError
        name_of_root = "root" if block == BLOCK else "sha256"
        if any(len(bytes.fromhex(entry[name_of_root])) != 32 for entry in files.values()):
            raise ValueError
        return {
            name: Checksums(entry[name_of_root], base64.b64decode(entry["blocks"], validate=True), block)
            for name, entry in files.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        rule = "its checksums are not as preprocess_data.py writes them"
        raise UserError(f"{prefix}.json", rule, _REMEDY) from None


def _read(prefix: str | Path) -> dict[str, Any] | None:
    path, data = Path(f"{prefix}.json"), Path(f"{prefix}.bin")
    try:
        # A block's digest takes 11 characters; there may be a mask of as many blocks. `.idx` has 20 bytes a document.
        size, index = (file.stat().st_size if file.exists() else 0 for file in (data, Path(f"{prefix}.idx")))
        content = read_json(path, 32 * (size // BLOCK) + max_bytes(index // 20))
    except FileNotFoundError:
        return None
    except (OSError, BadFile) as e:
        reason = f"cannot be read ({e.strerror})" if isinstance(e, OSError) else str(e)
        raise UserError(str(path), reason, _REMEDY) from None
    if not isinstance(content, dict):
        raise UserError(str(path), "must hold tokenizer_sha256 and vocab_size in a JSON object", _REMEDY)
    return content
