"""README.zh.md follows README.md: section by section the same code, tables, lists, links, names and figures."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```\w*\n.*?^```$", re.M | re.S)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FIGURE = re.compile(r"\d[\d.,]*(?:e[-+]?\d+)?")


class Words(NamedTuple):
    """What a translation keeps of a text; in any order, since sentences are built otherwise."""

    code: Counter[str]
    links: Counter[str]
    figures: Counter[str]


class Section(NamedTuple):
    """A heading's level, and what stands below it."""

    level: int
    fences: list[str]
    rows: list[list[Words]]
    items: int
    prose: Words


def words(text: str) -> Words:
    links = [link for link in LINK.findall(text) if not link.startswith("README.")]
    rest = LINK.sub("]", CODE.sub("", text))
    figures = [figure.rstrip(".,") for figure in FIGURE.findall(rest)]
    code = [" ".join(piece.split()) for piece in CODE.findall(text)]
    return Words(Counter(code), Counter(links), Counter(figures))


def section(level: int, text: str) -> Section:
    rest = FENCE.sub("", text)
    rows = [[words(cell) for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", rest, re.M)]
    prose = re.sub(r"^\|.*\|\n", "", rest, flags=re.M)
    return Section(level, FENCE.findall(text), rows, len(re.findall(r"^- ", prose, re.M)), words(prose))


def sections(text: str) -> list[Section]:
    # Comments in code begin as headings do.
    starts = [m for m in re.finditer(r"^(#+) .*\n", text, re.M) if not inside_fence(text, m.start())]
    ends = [*(m.start() for m in starts[1:]), len(text)]
    return [section(len(m[1]), text[m.end() : end]) for m, end in zip(starts, ends)]


def inside_fence(text: str, at: int) -> bool:
    return any(m.start() < at < m.end() for m in FENCE.finditer(text))


def test_the_chinese_readme_follows_the_english_one() -> None:
    english, chinese = (sections((ROOT / name).read_text()) for name in ("README.md", "README.zh.md"))
    assert len(english) >= 5
    assert sum(len(part.rows) for part in english) >= 20
    for number, (ours, theirs) in enumerate(zip(english, chinese)):
        assert theirs == ours, f"README.zh.md must follow README.md in section {number}"
    assert len(chinese) == len(english)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("Python 3.10 or newer", "Python 3.11 or newer"),
        ("agree to 1e-5", "agree to 1e-6"),
        ("--train-steps 10000", "--train-steps 20000"),
        ("| mixtures of", "| `a` | b |\n| mixtures of"),
        ("(docs/offload.md) ·", "(docs/layout.md) ·"),
        ("## Read the code", "### Read the code"),
        ("`--emit k8s`", "`--emit slurm`"),
        ("- **A kernel", "**A kernel"),
    ],
)
def test_a_change_that_was_not_followed_is_seen(was: str, becomes: str) -> None:
    text = (ROOT / "README.md").read_text()
    assert was in text
    assert sections(text.replace(was, becomes, 1)) != sections(text)


def test_each_readme_names_the_other() -> None:
    for name, other in (("README.md", "README.zh.md"), ("README.zh.md", "README.md")):
        assert f"]({other})" in (ROOT / name).read_text().splitlines()[1]
