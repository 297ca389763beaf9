"""What transcripts ask for besides the two programs: options that differ from the defaults, a run's files, the API."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.golden.doors import Output, call

# A run that takes half a second.
_TINY = "--num-layers 2 --hidden-size 16 --num-heads 2 --vocab-size 64 --seq-len 16 --global-batch-size 4"
TINY = [*_TINY.split(), "--device", "cpu", "--train-steps", "2"]


def config(*words: str) -> Output:
    """Show the resolved options that differ from the defaults."""
    done = call("pretrain_gpt.py", "--print-config", *words)
    return done if done.codes != [0] else done._replace(out=_difference(_default(), done.out))


@cache
def _default() -> str:
    return call("pretrain_gpt.py", "--print-config").out


def _difference(before: str, after: str) -> str:
    """Return the lines of YAML that differ; all of them where they do not correspond one to one."""
    old, new = _options(before), _options(after)
    if list(old) != list(new):
        return after
    return "".join(lines for key, lines in new.items() if old[key] != lines)


def _options(text: str) -> dict[str, str]:
    """Option -> its lines: a value may have several, which begin with a further blank or a dash."""
    return {lines.split(":")[0]: lines for lines in re.findall(r"^(?:  )?\w+:.*\n(?:   .*\n|  - .*\n)*", text, re.M)}


def presets() -> Output:
    """Show each preset's options."""
    names = call("pretrain_gpt.py", "--preset", "?").err.partition("must be one of ")[2].partition(";")[0]
    text = "".join(f"{name}\n{config('--preset', name).out}" for name in names.split(", "))
    return Output(text, "", [0])


def helps() -> Output:
    """Show the help of each command."""
    listed = call("megalite", "--help").out
    names = re.findall(r"^  (\S+)  ", listed, re.M)
    text = "".join(f"=== {name}\n{done.out}{done.err}" for name in names if (done := call("megalite", name, "--help")))
    return Output(listed + text, "", [0])


def api() -> Output:
    """Show the public names of the package, with their signatures; of classes also their methods."""
    import megalite

    lines: list[str] = []
    for name in megalite.__all__:
        value = getattr(megalite, name)
        lines.append(f"{name}{inspect.signature(value)}")
        if inspect.isclass(value):
            own = (key for key in dir(value) if not key.startswith("_") and not hasattr(Exception, key))
            methods = ((key, getattr(value, key)) for key in own)
            lines += [f"  .{key}{inspect.signature(method)}" for key, method in methods if callable(method)]
    return Output("\n".join(lines) + "\n", "", [0])


def tiny(ranks: str, *words: str) -> Output:
    """Train a tiny model for two steps, and show nothing if that works.

    Args:
        ranks: number of processes.
        words: flags; they may override the sizes.
    """
    data = () if {"--data", "--mock-data"} & set(words) else ("--mock-data",)
    done = call("pretrain_gpt.py", *TINY, *data, *words, ranks=int(ranks))
    return done if any(done.codes) else Output("", "", done.codes)


def run(ranks: str, folder: str, *words: str) -> Output:
    """As `tiny`, in a folder; show what stands in its lines and files."""
    done = tiny(ranks, "--run-dir", folder, *words)
    if any(done.codes):
        return done
    place = Path(folder)
    return Output("".join(show(place) for show in (_lines_of, _files_of, _checkpoint_of)), "", done.codes)


def _lines_of(place: Path) -> str:
    """The names in metrics.jsonl, by kind of line, in their order."""
    kinds: dict[str, str] = {}
    for line in (place / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kinds.setdefault(record.get("event", "step"), " ".join(record))
    return "".join(f"{kind}: {names}\n" for kind, names in sorted(kinds.items()))


def _files_of(place: Path) -> str:
    names = (str(path.relative_to(place)) for path in sorted(place.rglob("*")) if path.is_file() or path.is_symlink())
    return f"files: {' '.join(names)}\n"


def _checkpoint_of(place: Path) -> str:
    """The newest checkpoint's entries, and its tensors: those of the same shape and states on one line."""
    newest = max((place / "checkpoints").glob("step_*"))
    manifest = json.loads((newest / "manifest.json").read_text())
    meta = manifest["meta"]
    lines = [
        f"manifest: {' '.join(manifest)}",
        f"topology: {json.dumps(manifest['topology'])}",
        f"meta: {' '.join(meta)}",
        f"scalars: {json.dumps(meta['scalars'])}",
        f"config: {' '.join(meta['config'])}",
    ]
    roles: dict[str, list[str]] = {}
    for role, tensors in manifest["tensors"].items():
        for name, tensor in tensors.items():
            roles.setdefault(name, []).append(f"{role} {tensor['dtype']} {tensor['shape']}")
    lines += [f"{name}: {', '.join(states)}" for name, states in sorted(roles.items())]
    return "\n".join(lines) + "\n"


def keys(program: str, *words: str) -> Output:
    """Show the names in the JSON that a command prints: of a list, those of its first element."""
    done = call(program, *words)
    if any(done.codes):
        return done
    return done._replace(out="\n".join(_names(json.loads(done.out))) + "\n")


def _names(node: Any, above: str = "") -> list[str]:
    if isinstance(node, list) and node:
        return _names(node[0], f"{above}[]")
    if isinstance(node, dict):
        return [line for name, below in node.items() for line in _names(below, f"{above}.{name}".lstrip("."))]
    return [above]


def log(folder: str) -> Output:
    """Show the different lines of a run's log, without numbers and sorted: a save is reported when it is done."""
    text = (Path(folder) / "logs" / "rank_0.log").read_text()
    text = re.sub(r"^\S+ \S+ (?=\[rank)", "", text, flags=re.M)
    text = re.sub(r"^(.* ops: ).*$", r"\1...", text, flags=re.M)
    text = re.sub(r"(?<![\w-])\d[\d.,:]*(e[+-]?\d+)?", "#", text)
    return Output("".join(sorted(set(text.splitlines(keepends=True)))), "", [0])


VERBS: dict[str, Callable[..., Any]] = {
    "api": api,
    "config": config,
    "helps": helps,
    "keys": keys,
    "log": log,
    "presets": presets,
    "run": run,
    "tiny": tiny,
}
