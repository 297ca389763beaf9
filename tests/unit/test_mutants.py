"""Every mutant can be planted; `python -m tests.mutants` plants them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants.__main__ import PAGE, SEPARATOR
from tests.mutants.table import ROOT, Mutant, mutants


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_it_can_be_planted(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    planted = mutant.planted(text)
    assert planted != text
    compile(planted, mutant.file, "exec")
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)


def test_names_are_unique() -> None:
    assert max(Counter(mutant.name for mutant in mutants()).values()) == 1


def test_the_page_has_those_of_the_list() -> None:
    """In its order; `--write` updates the rows of those that it plants."""
    rows = PAGE.read_text().split(SEPARATOR)[1].splitlines()
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    assert names == [mutant.name for mutant in mutants() if mutant.name in names]
    assert len(names) > 0.9 * len(mutants())
    survivors = [row for row in rows if "**none**" in row]
    assert len(survivors) <= 0.05 * len(rows), survivors
