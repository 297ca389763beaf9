"""Find, check and read the files of a tokenizer, which are untrusted input."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.runtime.base import untrusted

# Key in an export's tokenizer_config.json: SHA-256 of the tokenizer that it came from, and of its tokenizer.json.
EXPORTED_FROM = "megalite_exported_from"
# Real tokenizers have some ten MB at most.
_MAX_BYTES = 256 << 20
# The JSON beside them describes some hundred special tokens; parsed, it takes twenty times the memory.
_MAX_JSON = 16 << 20


def exported_from(config: dict[str, Any], file_sha: str) -> str | None:
    """Return the SHA-256 of the tokenizer that was exported as the tokenizer.json of SHA-256 `file_sha`; or None."""
    exported = config.get(EXPORTED_FROM)
    # Only for the file that the export wrote: another one may give other ids.
    if not isinstance(exported, dict) or exported.get("tokenizer_json") != file_sha or not exported.get("sha256"):
        return None
    return str(exported["sha256"])


def file_in(folder: Path, log: bool = False) -> Path:
    """Choose the tokenizer file of a folder, and log which; raises `UserError` if there is none, or several."""
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).exists():
            if log:
                logger.info(f"tokenizer: {folder / name}")
            return folder / name
    candidates = sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")])
    if len(candidates) != 1:
        rule = f"must hold one tokenizer.json, *.model or *.tiktoken, but holds {[p.name for p in candidates]}"
        raise UserError(f"tokenizer folder {folder}", rule, "pass the file itself")
    return candidates[0]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file of a tokenizer; raises `UserError` as `read_regular`."""
    return hashlib.sha256(read_regular(path)).hexdigest()


def read_regular(path: Path) -> bytes:
    """Read a file of a tokenizer.

    Raises:
        UserError: it cannot be read, is not a regular file (a pipe would block, a device has no end), or is too large.
    """
    what = f"tokenizer {path}"
    try:
        return untrusted.read_regular(path, _MAX_BYTES)
    except untrusted.BadFile as e:
        raise UserError(what, str(e), "give the tokenizer's own file") from None
    except OSError as e:
        remedy = "give a folder or file: *.model, tokenizer.json, a tiktoken rank file, or the word bytes"
        raise UserError(what, f"cannot be read ({e.strerror})", remedy) from e


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that belongs to a tokenizer, {} where there is no such file."""
    if not path.exists():
        return {}
    try:
        content = untrusted.read_json(path, _MAX_JSON)
    except (OSError, untrusted.BadFile) as e:
        rule = f"cannot be read ({e.strerror})" if isinstance(e, OSError) else str(e)
        raise UserError(f"tokenizer {path}", rule, "correct or remove it") from None
    if not isinstance(content, dict):
        raise UserError(str(path), "must hold a JSON object", "correct or remove it")
    return content


def protobuf_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of a protocol-buffers message; a value is an int, a float, or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        first = at
        while data[at] & 0x80:
            at += 1
        at += 1
        return sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data[first:at]))

    while at < len(data):
        number, wire_type = divmod(varint(), 8)
        if wire_type == 0:
            yield number, varint()
            continue
        length = varint() if wire_type == 2 else {5: 4, 1: 8}[wire_type]
        value = data[at : at + length]
        at += length
        yield number, value if wire_type == 2 else struct.unpack({5: "<f", 1: "<d"}[wire_type], value)[0]
