#!/usr/bin/env python3
"""Make a corpus that every machine has: this Python's standard library, its source and its documentation topics.

    python examples/corpus.py --out corpus.jsonl --max-mb 5

The text is Python's, under the PSF license, read in place: it differs between Python versions, so the hash of what was
used is written to `OUT.manifest.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.errors import UserError, run_tool
from megalite.log import logger, setup_logging

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


def stdlib_corpus(out: str | Path, max_mb: float | None = None) -> dict[str, Any]:
    """Write the corpus as JSON lines {"source", "text"} and what it holds to `OUT.manifest.json`.

    Texts are in the order of the SHA-256 of their names, not of the names, so that a part of the corpus (`max_mb`, or a
    split by documents) is like the whole. Equal texts are written once.

    Args:
        out: a `.jsonl` file; its folder is made.
        max_mb: skip texts that would bring the sum above this many MB; by default use all.

    Returns:
        The manifest: Python version, number of texts, bytes, SHA-256 over the sorted list of names and text hashes.

    Raises:
        UserError: the file cannot be written, or no text fits into max_mb.
    """
    out, limit = Path(out), float("inf") if max_mb is None else max_mb * 1e6
    if out.suffix != ".jsonl":
        raise UserError(f"--out {out}", "must be a .jsonl file", f"use {out}.jsonl")
    entries: list[str] = []
    seen: set[str] = set()
    size = 0
    temporary = out.with_name(out.name + ".tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as f:
            for name, text in _texts():
                content = text.encode()
                digest = hashlib.sha256(content).hexdigest()
                if digest in seen or size + len(content) > limit:
                    continue
                seen.add(digest)
                entries.append(f"{name} {digest}")
                size += len(content)
                f.write(json.dumps({"source": name, "text": text}, ensure_ascii=False) + "\n")
        if not entries:
            temporary.unlink()
            raise UserError(f"--max-mb {max_mb}", "every text is larger", "use at least --max-mb 1")
        manifest = {
            "python": platform.python_version(),
            "texts": len(entries),
            "bytes": size,
            "list_sha256": hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest(),
        }
        out.with_name(out.name + ".manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        temporary.replace(out)
    except OSError as e:
        raise UserError(f"--out {out}", f"cannot be written ({e.strerror})", "choose another path") from e
    return manifest


def _texts() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every file and topic, in the order of the hash of the names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: dict[str, Path | str] = {
        str(path.relative_to(root)): path
        for path in root.rglob("*.py")
        if not _SKIPPED.intersection(path.relative_to(root).parts)
    }
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    sources |= {f"pydoc topic {name}": text for name, text in topics.items()}
    unread = 0
    for name in sorted(sources, key=lambda n: hashlib.sha256(n.encode()).digest()):
        source = sources[name]
        try:
            text = source if isinstance(source, str) else source.read_bytes().decode()
        except (UnicodeDecodeError, OSError):
            unread += 1
            continue
        if text:
            yield name, text
    if unread:
        logger.info(f"standard library: {unread} files that are not readable UTF-8 were skipped")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write this Python's standard library as a text corpus (JSON lines).")
    parser.add_argument("--out", required=True, metavar="FILE.jsonl")
    parser.add_argument("--max-mb", type=float, default=None, help="maximum MB of text (default: all, about 12)")
    args = parser.parse_args()
    setup_logging()
    manifest = stdlib_corpus(args.out, args.max_mb)
    print(
        f"{args.out}: {manifest['texts']} texts, {manifest['bytes'] / 1e6:.2f} MB of Python {manifest['python']}, "
        f"list SHA-256 {manifest['list_sha256']}"
    )


if __name__ == "__main__":
    run_tool(main)
