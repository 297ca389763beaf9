"""What a manifest's `meta` may contain: a stranger may have written it, so types and ranges are checked before any use.

Every part is optional here: imported weights have no data, say. `require_parts` names what a reader cannot do without.
Does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megalite.checkpoint.safetensors_io import BadCheckpoint
from megalite.config.options import GROUPS, TYPES
from megalite.foreign import MAX_TEMPLATE

# Far beyond any run; products of two still fit into 128 bits, sums into a float.
MAX_COUNT = 10**12
_MAX_INT, _MAX_TEXT, _MAX_ITEMS, _MAX_DEPTH = 1 << 64, 4096, 100_000, 5


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
    if len(meta) > 64 or not _plain({key: item for key, item in meta.items() if key != "chat_template"}, _MAX_DEPTH):
        rule = (
            f"at most {_MAX_ITEMS} items, {_MAX_TEXT} characters and {_MAX_DEPTH} levels, integers within 2^64, no NaN"
        )
        raise BadMeta(f"meta holds a value that no run writes ({rule})")
    for key, (good, rule) in _ENTRIES.items():
        if key in meta and not good(meta[key]):
            raise BadMeta(f"meta.{key} {meta[key]!r:.60} must be {rule}")
    if meta.get("step", step) != step:
        raise BadMeta(f"meta.step {meta['step']} differs from the manifest's step {step}")
    for section, options in meta.get("config", {}).items():
        for name, value in options.items():
            if section in GROUPS and name in TYPES and not fits(TYPES[name], value):
                raise BadMeta(f"meta.config.{section}.{name} {value!r:.60} is not a value of that option")
    return meta


def require_parts(meta: Mapping[str, Any], names: Iterable[str], path: Path) -> None:
    """Raise `BadCheckpoint` unless `meta` has the entries ("a" or "a.b") that a reader needs."""
    for name in names:
        at: Any = meta
        for key in name.split("."):
            if key not in at:
                raise BadCheckpoint(str(path), f"its manifest has no meta.{name}", "use a checkpoint that a run saved")
            at = at[key]


def _plain(value: Any, depth: int) -> bool:
    """Whether JSON content is small and free of NaN and infinity."""
    if isinstance(value, dict | list):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return depth > 0 and len(value) <= _MAX_ITEMS and all(_plain(item, depth - 1) for item in items)
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or abs(value) <= _MAX_INT


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _template(value: Any) -> bool:
    return _text(value) and len((value or "").encode(errors="surrogatepass")) <= MAX_TEMPLATE


def _sections(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(options, dict) for options in value.values())


def _scalars(value: Any) -> bool:
    """The optimizer's and the loss scale's numbers, all positive or zero."""
    if not isinstance(value, dict) or not all(type(n) in (int, float) and n >= 0 for n in value.values()):
        return False
    counts = ("num_steps", "loss_scale_good_steps", "loss_scale_chances")
    whole = all(_count(n) for key, n in value.items() if key in counts)
    return whole and value.get("loss_scale", 1) > 0


def _hf(value: Any) -> bool:
    """The type of imported weights, and ids of special tokens: none, one or several."""
    if not isinstance(value, dict) or not _text(value.get("dtype")):
        return False
    ids = [i for key, n in value.items() if key != "dtype" for i in (n if isinstance(n, list) else [n])]
    return all(i is None or _count(i) for i in ids)


def _losses(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 1000 and all(type(loss) in (int, float) for loss in value)


_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("step", "consumed_samples", "skipped_steps"), (_count, f"an integer from 0 to {MAX_COUNT}")),
    **dict.fromkeys(("data_hash", "valid_data_hash", "tokenizer_sha256"), (_text, "text or null")),
    "chat_template": (_template, f"text of at most {MAX_TEMPLATE} bytes, or null"),
    "loss_history": (_losses, "a list of at most 1000 numbers"),
    "scalars": (_scalars, "numbers of the optimizer and the loss scale"),
    "config": (_sections, "sections of options"),
    "hf": (_hf, "a type and ids of special tokens"),
}


def fits(hint: Any, value: Any) -> bool:
    """Check whether a JSON value has the type of an option; choices that are no longer offered do."""
    if type(None) in get_args(hint):
        return value is None or fits(get_args(hint)[0], value)
    if hasattr(hint, "__metadata__"):
        return fits(get_args(hint)[0], value)
    if get_origin(hint) is Literal:
        return type(value) in {type(choice) for choice in get_args(hint)}
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(fits(get_args(hint)[0], item) for item in value)
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        return isinstance(value, dict) and all(key in hints and fits(hints[key], v) for key, v in value.items())
    return type(value) is hint or (hint is float and type(value) is int)
