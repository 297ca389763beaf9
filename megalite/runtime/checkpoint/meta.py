"""Checks of a manifest's `meta`, which is untrusted input: types and ranges, before any use.

Every entry is optional here (imported weights have no data, for example); `require_entries` checks those that a reader
needs. Does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megalite.runtime.base.untrusted import MAX_TEMPLATE
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint

# Far beyond any run; the product of two still fits into 128 bits.
MAX_COUNT = 10**12
_MAX_INT = 1 << 64
_MAX_TEXT = 4096
_MAX_ITEMS = 100_000
_MAX_DEPTH = 5
_REFERENCE = re.compile("[0-9a-f]{16} [0-9a-f]{64}")


class BadMeta(Exception):
    """An entry breaks a rule; the message names both."""


def check_meta(meta: Any, step: int) -> dict[str, Any]:
    """Return a manifest's `meta` if every entry has the type, range and size that a run writes.

    Args:
        meta: parsed JSON.
        step: the manifest's own step, which an entry of that name must equal.

    Raises:
        BadMeta: an entry breaks a rule.
    """
    if not isinstance(meta, dict):
        raise BadMeta("meta is missing")
    if len(meta) > 64 or not _is_plain({key: item for key, item in meta.items() if key != "chat_template"}, _MAX_DEPTH):
        rule = (
            f"at most {_MAX_ITEMS} items, {_MAX_TEXT} characters and {_MAX_DEPTH} levels, integers within 2^64, no NaN"
        )
        raise BadMeta(f"meta holds a value that no run writes ({rule})")
    for key, (is_valid, rule) in _ENTRIES.items():
        if key in meta and not is_valid(meta[key]):
            raise BadMeta(f"meta.{key} {meta[key]!r:.60} must be {rule}")
    if meta.get("step", step) != step:
        raise BadMeta(f"meta.step {meta['step']} differs from the manifest's step {step}")
    # The writer imports this file, and checks no options.
    from megalite.core.options.values import fits
    from megalite.runtime.options.fields import GROUPS, TYPES

    for section, options in meta.get("config", {}).items():
        for name, value in options.items():
            if section in GROUPS and name in TYPES and not fits(TYPES[name], value):
                raise BadMeta(f"meta.config.{section}.{name} {value!r:.60} is not a value of that option")
    return meta


def require_entries(meta: Mapping[str, Any], names: Iterable[str], path: Path) -> None:
    """Raise `BadCheckpoint` unless `meta` has the entries ("a" or "a.b") that a reader needs."""
    for name in names:
        node: Any = meta
        for key in name.split("."):
            if key not in node:
                raise BadCheckpoint(str(path), f"its manifest has no meta.{name}", "use a checkpoint that a run saved")
            node = node[key]


def _is_plain(value: Any, depth: int) -> bool:
    """Whether JSON content is small and free of NaN and infinity."""
    if isinstance(value, dict | list):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return depth > 0 and len(value) <= _MAX_ITEMS and all(_is_plain(item, depth - 1) for item in items)
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or abs(value) <= _MAX_INT


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_template(value: Any) -> bool:
    return _is_text(value) and len((value or "").encode(errors="surrogatepass")) <= MAX_TEMPLATE


def _are_sections(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(options, dict) for options in value.values())


def _are_scalars(value: Any) -> bool:
    """Whether a value holds the numbers of optimizer and loss scale, none negative."""
    if not isinstance(value, dict) or not all(type(n) in (int, float) and n >= 0 for n in value.values()):
        return False
    counts = ("num_steps", "loss_scale_good_steps", "loss_scale_chances")
    whole = all(_is_count(n) for key, n in value.items() if key in counts)
    return whole and value.get("loss_scale", 1) > 0


def _is_hf(value: Any) -> bool:
    """Whether a value holds the type of imported weights, and ids of special tokens: none, one or several."""
    if not isinstance(value, dict) or not _is_text(value.get("dtype")):
        return False
    ids = [i for key, n in value.items() if key != "dtype" for i in (n if isinstance(n, list) else [n])]
    return all(i is None or _is_count(i) for i in ids)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_losses(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 1000 and all(map(_is_number, value))


def _is_blend(value: Any) -> bool:
    """Whether a value is empty, or counts samples taken from each set, all of them before a position."""
    if not isinstance(value, dict) or not value:
        return value == {}
    taken = value.get("taken")
    return isinstance(taken, list) and all(map(_is_count, taken)) and value.get("position") == sum(taken)


def _are_windows(value: Any) -> bool:
    """Whether a value says of lanes where they are: eight counts of text, ten of chats, see `StreamOrder.state`."""
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) in (8, 10) and all(map(_is_count, row)) for row in value
    )


def _are_files(value: Any) -> bool:
    """Whether a value names, for each source of text, files."""
    return isinstance(value, list) and all(isinstance(names, list) and all(map(_is_name, names)) for names in value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _are_passes(value: Any) -> bool:
    """Whether a value has rows of counts: which source, which addition to it, passes of lanes."""
    return isinstance(value, list) and all(isinstance(row, list) and all(map(_is_count, row)) for row in value)


def _are_references(value: Any) -> bool:
    """Whether a value names scores of a reference by the data that they are of: a key, and a SHA-256."""
    return isinstance(value, dict) and all(
        isinstance(found, str) and _REFERENCE.fullmatch(found) for found in value.values()
    )


_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("step", "consumed_samples", "skipped_steps"), (_is_count, f"an integer from 0 to {MAX_COUNT}")),
    **dict.fromkeys(("data_hash", "valid_data_hash", "tokenizer_sha256"), (_is_text, "text or null")),
    "chat_template": (_is_template, f"text of at most {MAX_TEMPLATE} bytes, or null"),
    "data_version": (lambda value: type(value) is int and 1 <= value <= 4, "an integer from 1 to 4"),
    "mask_version": (lambda value: value == 2, "2"),
    "blend": (_is_blend, "samples taken of each set, which sum to a position"),
    "files": (_are_files, "names of files of each source"),
    "passes": (_are_passes, "counts of each addition to a source"),
    "windows": (_are_windows, "eight or ten counts of each lane"),
    "loss_history": (_are_losses, "a list of at most 1000 numbers"),
    "valid_loss": (_is_number, "a number"),
    "scalars": (_are_scalars, "numbers of the optimizer and the loss scale"),
    "config": (_are_sections, "sections of options"),
    "hf": (_is_hf, "a type and ids of special tokens"),
    "references": (_are_references, "a key and a SHA-256 for each part of the data"),
}
