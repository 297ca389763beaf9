"""Transcripts: files of command lines, each followed by what it prints.

    # A comment.
    $ pretrain_gpt.py --tp 0
    | error: --tp 0: must be at least 1 and below 100000; use a value in that range
    [2]

The last line is an exit code that is not 0. To make one anew, lines with $ and # are kept, and the rest is replaced.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.golden.doors import Output, call

Verb = Callable[..., Output]


def remake(text: str, verbs: Mapping[str, Verb], hide: Mapping[str, str]) -> str:
    """Run the command lines of a transcript again, and return it with what they print now.

    Args:
        text: the transcript.
        verbs: first word of a command line -> what runs the other words, besides pretrain_gpt.py and megalite.
        hide: patterns of what differs between hosts -> what to show instead.
    """
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(("#", "$")) or not line:
            lines.append(line)
        if line.startswith("$"):
            lines += _shown(_run(shlex.split(line[1:]), verbs), hide)
    return "\n".join(lines) + "\n"


def _run(words: list[str], verbs: Mapping[str, Verb]) -> Output:
    if words[0] in verbs:
        return verbs[words[0]](*words[1:])
    if words[0] == "ranks":
        return call(words[2], *words[3:], ranks=int(words[1]))
    return call(*words)


def _shown(output: Output, hide: Mapping[str, str]) -> list[str]:
    text = output.out + output.err
    for pattern, shown in hide.items():
        text = re.sub(pattern, shown, text)
    lines = [f"| {line}" if line else "|" for line in text.removesuffix("\n").split("\n") if text]
    return lines + [f"[{output.codes[0]}]"] * (output.codes[0] != 0)


def transcripts() -> dict[str, Path]:
    """Return the transcripts by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.txt"))}
