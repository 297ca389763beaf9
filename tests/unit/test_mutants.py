"""Every mutant can be planted; `python -m tests.mutants` plants them."""

from __future__ import annotations

from collections import Counter

import pytest

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
