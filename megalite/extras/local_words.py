"""URLs of stores on the command line of a tool: local copies take their place, and what is written is uploaded."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from megalite.core.base.errors import require
from megalite.core.base.log import logger, setup_logging
from megalite.runtime.base.urls import cached_at, check_local, check_url, check_user, is_url
from megalite.runtime.checkpoint.local_copies import local_copy
from megalite.runtime.data import bring_prefix
from megalite.runtime.places.downloads import bring_tree
from megalite.runtime.places.store import Store

# Commands that read what exists. Training has its own options for what it keeps locally.
TOOLS = ("convert", "evaluate", "generate", "inspect", "lm-eval", "plot", "preprocess", "tokenizer")
# Apart from the folders of runs, which may be writing to theirs.
_CACHE, _LIMIT = "~/.cache/megalite/tools", 100 * 10**9
# Those that refuse to write over what exists.
_MAKERS = ("convert", "inspect", "preprocess", "tokenizer")
_TEXTS, _OUTPUTS = ("--prompt", "--system"), ("--out", "--json", "--flatten")
_PREFIXES = ("--data", "--valid-data", "--merge")
_FILES = ("--tokenizer", "--chat-template", "--text")
# Paths of every command that are none of a store.
_LOCAL = ("--include-path", "--log-dir", "--megatron", "--perfetto", "--png")
# Of what is written, the files without which nothing is read: they are uploaded last.
_LAST = (".idx", "config.json", "manifest.json", "COMMIT")


@contextlib.contextmanager
def local_words(command: str, words: Iterable[str]) -> Iterator[list[str]]:
    """Replace URLs among the arguments of a command, alone or as --flag=URL; leave all else as it is.

    What the command writes to a URL is uploaded at the end, if there was no error.

    Raises:
        StoreError: there is no such thing in the store, or it cannot be read or written.
        UserError: there is already what would be written, or the command knows only paths there.
    """
    out = []
    flag = ""
    uploads = list[tuple[Path, str]]()
    words = list(words)
    for_another = False
    with contextlib.ExitStack() as remove:
        for word in words:
            before, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
            flag = before or flag
            for_another |= word == "--" and command not in TOOLS
            if flag not in _TEXTS:
                check_user(flag or command, value)  # before other processes show it in their command lines
            if not for_another and _is_local(command, flag):
                check_local(flag, value)
            if command in TOOLS and flag not in _TEXTS and is_url(value):
                check_url(flag or command, value)
                if flag in _OUTPUTS:
                    if command in _MAKERS and "--overwrite" not in words:
                        _check_free(flag, value)
                    cache = Path(_CACHE).expanduser()
                    cache.mkdir(parents=True, exist_ok=True)
                    folder = Path(remove.enter_context(tempfile.TemporaryDirectory(prefix="out_", dir=cache)))
                    uploads.append((folder, value))
                    value = str(folder / _split(value)[1])
                else:
                    value = _bring(command, flag, value)
            out.append(f"{before}{equals}{value}")
            if flag in (*_TEXTS, *_OUTPUTS) and (equals or not before):
                flag = ""  # they take one word
        yield out
        if uploads and not logger.handlers:
            setup_logging()  # the command itself has named a folder that is gone when it ends
        for folder, url in uploads:
            _upload(folder, url)
            logger.info(f"uploaded {url}")


def _is_local(command: str, flag: str) -> bool:
    """Whether only a path will do: what else would be written into a folder `s3:` of this machine."""
    return flag in _LOCAL or (command not in TOOLS and flag in _OUTPUTS) or (command, flag) == ("check", "--run-dir")


def _bring(command: str, flag: str, url: str) -> str:
    if flag in _PREFIXES:
        bring_prefix(url, _CACHE, _LIMIT)
        return str(cached_at(url, _CACHE))
    if flag == "--input":
        return str(bring_tree(url, _CACHE, deep=True))
    # A Hugging Face folder, a tokenizer, and of a run what is drawn: files side by side.
    if command == "plot" or flag in _FILES or "config.json" in Store(url).names():
        return str(bring_tree(url, _CACHE))
    return str(local_copy(url, _CACHE))


def _split(url: str) -> tuple[str, str]:
    """Return the folder that a URL is in, and its last name."""
    folder, _, name = url.rstrip("/").rpartition("/")
    return folder, name


def _check_free(flag: str, url: str) -> None:
    """Refuse to write where there is something, as the commands do on a disk."""
    parent, name = _split(url)
    there = {n.rstrip("/") for n in Store(parent).names()}
    for end in ("", ".bin", ".idx", ".json", ".mask.bin"):
        rule = f"{parent}/{name}{end} exists"
        require(name + end not in there, f"{flag} {url}", rule, "choose another name, or give --overwrite if it has it")


def _upload(folder: Path, url: str) -> None:
    """Upload all files of a folder: what is read first is deleted first and uploaded last, so nothing mixed is read."""
    parent, name = _split(url)
    store, files = Store(parent), [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]

    def position(file: str) -> int:
        return max((i for i, end in enumerate(_LAST, 1) if file.endswith(end)), default=0)

    # Marks of answers may be left from conversations that text replaces.
    store.delete([*filter(position, files), f"{name}.mask.bin"])
    for file in sorted(files, key=lambda file: (position(file), file)):
        store.upload(file, str(folder / file), os.path.getsize(folder / file))
