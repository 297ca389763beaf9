"""URLs of stores on the command line of a tool: what they name is downloaded, and its local copy takes their place."""

from __future__ import annotations

from collections.abc import Iterable

from megalite.base.store import Store, cached_at, check_local, check_url, is_url
from megalite.checkpoint.remote import local_copy
from megalite.data import bring_prefix, bring_tree

# Commands that read what exists. Training has its own options for what it keeps locally.
READERS = ("convert", "evaluate", "generate", "inspect", "lm-eval", "plot")
# Apart from the folders of runs, which may be writing to theirs.
_CACHE, _LIMIT = "~/.cache/megalite/tools", 100 * 10**9
_LOCAL_ONLY = ("preprocess", "tokenizer")
_TEXTS, _OUTPUTS = ("--prompt", "--system"), ("--out", "--json")


def local_words(command: str, words: Iterable[str]) -> list[str]:
    """Replace URLs among the arguments of a command that reads, alone or as --flag=URL; leave all else as it is.

    Raises:
        StoreError: there is no such thing in the store, or it cannot be read.
        UserError: what the command writes, or reads from the disk alone, is a URL.
    """
    out, flag = [], ""
    for word in words:
        before, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        flag = before or flag
        if command in _LOCAL_ONLY or (command in READERS and flag in _OUTPUTS):
            check_local(f"megalite {command} {flag}".strip(), value)
        bring = command in READERS and flag not in _TEXTS and is_url(value)
        out.append(f"{before}{equals}{_bring(command, flag, value)}" if bring else word)
        if flag in (*_TEXTS, *_OUTPUTS) and (equals or not before):
            flag = ""  # they take one word
    return out


def _bring(command: str, flag: str, url: str) -> str:
    check_url(flag or command, url)
    if flag in ("--data", "--valid-data"):
        bring_prefix(url, _CACHE, _LIMIT)
        return str(cached_at(url, _CACHE))
    # A Hugging Face folder, a tokenizer, and of a run what is drawn: files side by side.
    if command == "plot" or flag == "--tokenizer" or "config.json" in Store(url).names():
        return str(bring_tree(url, _CACHE))
    return str(local_copy(url, _CACHE))
