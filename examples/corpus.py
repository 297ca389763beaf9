#!/usr/bin/env python3
"""Make a corpus that every machine has: this Python's standard library, its source and its documentation topics.

    python examples/corpus.py --out corpus.jsonl --max-mb 5
    python examples/corpus.py --out text.jsonl --packages --held-out held_out.jsonl

With --packages, also the Python sources of the packages installed beside it: whatever pip brought. All texts are read
in place, under their own licenses, and differ between versions: the versions and the hash of what was used are written
to `OUT.manifest.json`.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import importlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TextIO

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger, setup_logging
from megalite.extras.tool import run_tool

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
# Whole directories, since the files of one resemble each other.
_ONE_HELD_OUT_IN = 50


def python_corpus(
    out: str | Path, max_mb: float | None = None, packages: bool = False, held_out: str | Path | None = None
) -> dict[str, Any]:
    """Write the corpus as JSON lines {"source", "text"} and what it holds to `OUT.manifest.json`.

    Texts are in the order of the SHA-256 of their names, not of the names, so that a part of the corpus (`max_mb`, or a
    split by documents) is like the whole. Equal texts are written once.

    Args:
        out: a `.jsonl` file; its folder is made.
        max_mb: skip texts that would bring the sum above this many MB; by default use all.
        packages: add the Python sources of the packages installed in this environment.
        held_out: another `.jsonl` file, which gets the texts of one in 50 directories, chosen by the hash of its name,
            in place of `out`.

    Returns:
        The manifest: Python version, number of texts, bytes, SHA-256 over the sorted list of names and text hashes;
        with packages also their versions, with held_out also its texts and bytes (counted in the former too).

    Raises:
        UserError: a file cannot be written, or no text fits into max_mb.
    """
    limit = float("inf") if max_mb is None else max_mb * 1e6
    paths = {"--out": Path(out)} | ({} if held_out is None else {"--held-out": Path(held_out)})
    for flag, path in paths.items():
        if path.suffix != ".jsonl":
            raise UserError(f"{flag} {path}", "must be a .jsonl file", f"use {path}.jsonl")
    entries: list[str] = []
    seen: set[str] = set()
    sizes: list[list[int]] = [[] for _ in paths]
    with _made_whole(paths) as files:
        for name, text in _texts(packages):
            content = text.encode()
            digest = hashlib.sha256(content).hexdigest()
            if digest in seen or sum(map(sum, sizes)) + len(content) > limit:
                continue
            seen.add(digest)
            entries.append(f"{name} {digest}")
            where = len(paths) - 1 if _is_held_out(name) else 0
            sizes[where].append(len(content))
            files[where].write(json.dumps({"source": name, "text": text}, ensure_ascii=False) + "\n")
        if not entries:
            raise UserError(f"--max-mb {max_mb}", "every text is larger", "use at least --max-mb 1")
        manifest: dict[str, Any] = {
            "python": platform.python_version(),
            "texts": len(entries),
            "bytes": sum(map(sum, sizes)),
            "list_sha256": hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest(),
        }
        if held_out is not None:
            manifest |= {"held_out_texts": len(sizes[1]), "held_out_bytes": sum(sizes[1])}
        if packages:
            manifest["packages"] = {d.metadata["Name"]: d.version for d in distributions()}
        Path(f"{out}.manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


@contextmanager
def _made_whole(paths: dict[str, Path]) -> Iterator[list[TextIO]]:
    """Open a temporary file for each flag's path; at the end they become these files, after a failure none is left."""
    unwritable, remedy = "cannot be written ({})", "choose another path"
    with ExitStack() as left:
        files, temporary = list[TextIO](), [path.with_name(path.name + ".tmp") for path in paths.values()]
        for (flag, path), file in zip(paths.items(), temporary):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                files.append(left.enter_context(file.open("w", encoding="utf-8")))
            except OSError as e:
                raise UserError(f"{flag} {path}", unwritable.format(e.strerror), remedy) from e
            left.callback(file.unlink, missing_ok=True)
        try:
            yield files
            for opened, file, path in zip(files, temporary, paths.values()):
                opened.close()
                file.replace(path)
        except OSError as e:
            given = " and ".join(f"{flag} {path}" for flag, path in paths.items())
            raise UserError(given, unwritable.format(e.strerror), remedy) from e


def _is_held_out(name: str) -> bool:
    directory = name.rpartition("/")[0]
    return int(hashlib.sha256(directory.encode()).hexdigest(), 16) % _ONE_HELD_OUT_IN == 0


def _texts(packages: bool) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every file and topic, in the order of the hash of the names."""
    places = sysconfig.get_paths()
    # The last one wins where two have the same name.
    roots = {Path(places[kind]) for kind in ("purelib", "platlib") if packages}
    sources: dict[str, Path | str] = {
        str(path.relative_to(root)): path
        for root in (*sorted(roots), Path(places["stdlib"]))
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
        logger.info(f"{unread} files that are not readable UTF-8 were skipped")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the Python sources of this environment as JSON lines.")
    parser.add_argument("--out", required=True, metavar="FILE.jsonl")
    parser.add_argument("--max-mb", type=float, default=None, help="maximum MB of text (default: all, about 12)")
    parser.add_argument("--packages", action="store_true", help="also the installed packages (about 200 MB)")
    parser.add_argument("--held-out", metavar="FILE.jsonl", help="write the texts of one in 50 directories here")
    args = parser.parse_args()
    setup_logging()
    manifest = python_corpus(args.out, args.max_mb, args.packages, args.held_out)
    held_out = f" ({manifest['held_out_bytes'] / 1e6:.2f} MB of it in {args.held_out})" if args.held_out else ""
    print(
        f"{args.out}: {manifest['texts']} texts, {manifest['bytes'] / 1e6:.2f} MB{held_out} of Python "
        f"{manifest['python']}, list SHA-256 {manifest['list_sha256']}"
    )


if __name__ == "__main__":
    run_tool(main)
