"""`--pipeline-layout`: the number of layers of every pipeline stage, written by hand."""

from __future__ import annotations

import re
from functools import lru_cache

# Far more than any model has; a short text could otherwise stand for endless stages.
_MOST = 10_000


@lru_cache(maxsize=256)
def read_stages(text: str) -> tuple[int, ...]:
    """Read the number of layers of every stage, in the order in which tokens pass.

    Args:
        text: numbers (`7,8*14,7`), or Megatron-LM's letters (`Et*7|(t*8|)*14t*7L`): E embedding, t layer, m module that
            predicts a further token (not counted), L loss, | between stages, and `x*n` or `(…)*n` for repetition.

    Raises:
        ValueError: it is neither; the message is the rule.
    """
    if "t" not in text:
        return _numbers(text)
    stages = _expanded(text).split("|")
    if not (stages[0].startswith("E") and stages[-1].endswith("L")):
        raise ValueError("must begin with E (embedding) and end with L (loss)")
    stages[0], stages[-1] = stages[0][1:], stages[-1][:-1].rstrip("m")
    for stage in stages:
        if stage.strip("t"):
            odd = stage.strip("t")[0]
            if odd == "m":
                raise ValueError("has 'm' elsewhere than directly before L: modules are on the last stage here")
            raise ValueError(f"has {odd!r} in a stage: E is for the first, L for the last, and all else are layers, t")
    return tuple(map(len, stages))


def count_modules(text: str) -> int:
    """Return the number of modules (m) that a layout in letters, as `read_stages` takes it, has on its last stage."""
    return _expanded(text).count("m") if "t" in text else 0


def _numbers(text: str) -> tuple[int, ...]:
    counts: list[int] = []
    for word in re.split(r"[\s,]+", text.strip()):
        match = re.fullmatch(r"(\d{1,5})(?:\*(\d{1,5}))?", word)
        if match is None:
            raise ValueError(f"has {word!r}, which is not a number of layers")
        counts += [int(match[1])] * min(int(match[2] or 1), _MOST)
        if len(counts) > _MOST:
            raise ValueError(f"has more than {_MOST} stages")
    return tuple(counts)


def _expanded(text: str) -> str:
    """Write out all repetitions, innermost first."""
    text = re.sub(r"[\s,]", "", text)
    repeated = re.compile(r"(?:\(([^()]*)\)|([EtmL|]))\*(\d{1,5})|\(([^()]*)\)")
    while match := repeated.search(text):
        part, times = match[1] or match[2] or match[4] or "", int(match[3] or 1)
        if len(text) + len(part) * times > _MOST:
            raise ValueError(f"stands for more than {_MOST} layers and stages")
        text = text[: match.start()] + part * times + text[match.end() :]
    if odd := re.search(r"[^EtmL|]", text):
        raise ValueError(f"has {odd[0]!r}, which is no part of a layout")
    return text
