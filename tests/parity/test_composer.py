"""Draws of fixed seeds, and proof that the composer finds what it should. For hours: `python -m tests.composer`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from tests.composer import draws
from tests.composer.draws import Draw
from tests.composer.faults import FAULTS
from tests.composer.judge import Judge
from tests.composer.shrink import shrink
from tests.workers import WorkerPool

SEED = 2026
# The fourth alone takes as long as six others.
NUMBERS = [(1, 2, 3), (5, 6, 7, 8, 9, 10)]


@pytest.fixture(scope="module")
def judge(pool: WorkerPool) -> Iterator[Judge]:
    made = Judge(pool)
    yield made
    made.close()


@pytest.mark.full
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_draws_are_the_same_in_their_layouts(judge: Judge, numbers: tuple[int, ...]) -> None:
    for number in numbers:
        draw = draws.make(SEED, number)
        verdict = judge.judge(draw)
        if verdict.fails:
            least = judge.least(draw, verdict.kind, seconds=120)
            pytest.fail(f'{verdict.kind}: {verdict.why}\npython -m tests.composer --draw "{least}"')


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(pool: WorkerPool, fault: str) -> None:
    """In one of the first four draws of two ranks that can meet it, most often in the first."""
    judge = Judge(pool, fault)
    fits, _ = FAULTS[fault]
    kinds = []
    for draw in islice(draws.wanted(SEED, lambda draw: fits(draw) and draws.ranks(draw) == 2), 4):
        kinds.append(judge.judge(draw, sure=False).kind)
        if kinds[-1] in ("differs", "copies"):
            break
    judge.close()
    assert kinds[-1] in ("differs", "copies"), kinds


def test_most_draws_run() -> None:
    """Refused by a rule of options that exclude each other are few."""
    from megalite.core.base.errors import UserError
    from megalite.runtime.options import cli

    refused = []
    for number in range(1, 201):
        try:
            cli.parse(draws.words(draws.make(SEED, number)))
        except UserError as e:
            refused.append(str(e))
    assert len(refused) < 20, refused


def test_what_fails_is_shrunk_to_what_it_takes() -> None:
    def fails(draw: Draw) -> bool:
        return draw.get("tp", 1) > 1 and "window" in draw and draw.get("num_layers", 2) > 2

    draw = next(draws.wanted(SEED, lambda draw: fails(draw) and draws.ranks(draw) == 4))
    least = shrink(draw, fails, seconds=60)
    assert least == {"seed": draw["seed"], "num_layers": 3, "window": draw["window"], "data": "mock", "tp": 2}
    assert draws.read(str(draw)) == draw
