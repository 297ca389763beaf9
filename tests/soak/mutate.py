"""Damage to files, drawn from a random generator: bytes, text, JSON values."""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Callable
from random import Random
from typing import Any


class Canary:
    """Unpickled, it would make a file: a reader that unpickles anything is found out."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("open('canary', 'w')",)


PICKLE = pickle.dumps(Canary())
_NUMBERS = (0, 1, -1, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 10**30)
_TEXTS = (
    *(
        "",
        " ",
        "x" * 5000,
        "../../etc/passwd",
        "/dev/zero",
        "/dev/stdin",
        "null",
        "NaN",
        "1e999",
        "0x10",
        "é\u2028\u202e",
    ),
    *(
        "\x1b[2J\x1b]0;owned\x07",
        "a\nb",
        "\x00",
        "\x9b31m",
        "\ud800",
        "!!python/object/apply:os.system [true]",
        "~",
        "1" * 5000,
    ),
)
_WORDS = (
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    '"',
    "-",
    "&a",
    "*a",
    "%",
    "#",
    "slots=",
    "\\",
    "'",
    "$(touch canary)",
    "\t",
    "\r\n",
)


def bytes_of(rng: Random, data: bytes) -> bytes:
    """Change bytes: one of the kinds below."""
    return rng.choice(_BYTE_KINDS)(rng, data)


def _place(rng: Random, data: bytes, most: int) -> tuple[int, int]:
    at = rng.randrange(len(data) + 1)
    return at, min(len(data), at + rng.randint(1, most))


def _flip(rng: Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 8)) if data else 0):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _flip_early(rng: Random, data: bytes) -> bytes:
    """Headers are where the consequences are."""
    return _flip(rng, data[:64]) + data[64:]


def _truncate(rng: Random, data: bytes) -> bytes:
    return data[: rng.choice((0, rng.randrange(len(data) + 1), max(0, len(data) - rng.randint(1, 9))))]


def _delete(rng: Random, data: bytes) -> bytes:
    begin, end = _place(rng, data, 100)
    return data[:begin] + data[end:]


def _repeat(rng: Random, data: bytes) -> bytes:
    begin, end = _place(rng, data, 200)
    return data[:end] + data[begin:end] * rng.choice((1, 2, 500)) + data[end:]


def _zero(rng: Random, data: bytes) -> bytes:
    begin, end = _place(rng, data, 4096)
    return data[:begin] + bytes(end - begin) + data[end:]


def _noise(rng: Random, data: bytes) -> bytes:
    begin, end = _place(rng, data, 64)
    return data[:begin] + rng.randbytes(rng.randint(0, 64)) + data[end:]


def _move(rng: Random, data: bytes) -> bytes:
    """Splice: a part of the file elsewhere in it."""
    begin, end = _place(rng, data, 2000)
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[begin:end] + data[at + (end - begin if rng.random() < 0.5 else 0) :]


def _length_field(rng: Random, data: bytes) -> bytes:
    """A whole number of 1, 4 or 8 bytes, mostly where binary formats have theirs."""
    size, form = rng.choice(((8, "<Q"), (8, "<Q"), (4, "<I"), (1, "<B")))
    if len(data) < size:
        return data
    at = rng.choice((0, 8, 9, 17, 18, 26, 34, rng.randrange(len(data) - size + 1)))
    if at + size > len(data):
        return data
    (old,) = struct.unpack_from(form, data, at)
    new = rng.choice((*_NUMBERS, old + 1, old - 1, old * 2, len(data), len(data) - 8)) % (1 << 8 * size)
    return data[:at] + struct.pack(form, new) + data[at + size :]


def _text(rng: Random, data: bytes) -> bytes:
    """Odd words and numbers in a text."""
    begin, end = _place(rng, data, 12)
    word = rng.choice((rng.choice(_TEXTS), rng.choice(_WORDS), str(rng.choice(_NUMBERS)))).encode(
        errors="surrogatepass"
    )
    return data[:begin] + word + (data[begin:] if rng.random() < 0.5 else data[end:])


def _nest(rng: Random, data: bytes) -> bytes:
    opening = rng.choice((b"[", b'{"a":', b"- ", b"{", b"("))
    begin, end = _place(rng, data, 12)
    return data[:begin] + opening * rng.choice((10, 1000, 100_000)) + data[end:]


def _lines(rng: Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(3)
    if kind == 0:
        lines[i], lines[j] = lines[j], lines[i]
    elif kind == 1:
        lines.insert(i, lines[j])
    else:
        lines[i] = b"  " + lines[i]
    return b"\n".join(lines)


def _pickle(rng: Random, data: bytes) -> bytes:
    return PICKLE if rng.random() < 0.5 else PICKLE + data


_BYTE_KINDS: tuple[Callable[[Random, bytes], bytes], ...] = (
    *(_flip, _flip, _flip_early, _truncate, _truncate, _delete, _repeat, _zero, _noise, _move),
    *(_length_field, _length_field, _text, _text, _nest, _lines, _pickle),
)


def json_of(rng: Random, data: bytes) -> bytes:
    """Change values, keys or nesting of a JSON document; what is none is changed as bytes."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return bytes_of(rng, data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        tree = _edit(rng, tree)
    return json.dumps(tree).encode()


def value(rng: Random) -> Any:
    """Draw an odd JSON value."""
    scalars = (
        None,
        True,
        False,
        0.5,
        -0.0,
        1e308,
        math.nan,
        math.inf,
        -math.inf,
        *_NUMBERS,
        *(-n for n in _NUMBERS),
        *_TEXTS,
    )
    deep: Any = 0
    for _ in range(rng.choice((2, 60, 900))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return rng.choice(
        (rng.choice(scalars), rng.choice(scalars), [], {}, [rng.choice(scalars)] * 3, deep, [[]] * 20_000)
    )


def _edit(rng: Random, tree: Any) -> Any:
    """Change one place, drawn by walking down from the root."""
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.1:
        return _changed(rng, tree)
    key: Any = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
    kind = rng.random()
    if kind < 0.8:
        tree[key] = _edit(rng, tree[key])
    elif kind < 0.87:
        del tree[key]
    elif isinstance(tree, list):
        tree.insert(key, value(rng) if kind < 0.93 else tree[key])
    elif kind < 0.93:
        tree[rng.choice(_TEXTS).encode(errors="replace").decode()] = tree[key]
    else:
        tree[key], other = tree[rng.choice(list(tree))], tree[key]
        tree[rng.choice(list(tree))] = other
    return tree


def _changed(rng: Random, old: Any) -> Any:
    if isinstance(old, bool) or rng.random() < 0.4:
        return value(rng)
    if isinstance(old, int):
        return rng.choice((old + 1, old - 1, -old, old * 2, old * 10**6, float(old), str(old), [old]))
    if isinstance(old, float):
        return rng.choice((old * 1e300, -old, int(old) if math.isfinite(old) else 0, str(old)))
    if isinstance(old, str):
        return rng.choice((old + rng.choice(_TEXTS), old[:-1], old.upper(), [old], {"a": old}))
    return value(rng)
