"""Two passes that take turns: their order, their ends, and what happens if one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from megalite.core.mesh.turns import OtherPassFailedError, Side, Turns


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Logged:
    """Passes that hand over after each of their parts, and what ran when."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.log: list[str] = []

    def make(self, side: Side, parts: int, fails_in: int | None = None) -> Callable[[], None]:
        def run() -> None:
            try:
                for part in range(parts):
                    self.log.append(f"{side}{part}")
                    if part == fails_in:
                        raise ValueError(side)
                    self.turns.hand_over(side)
            except OtherPassFailedError:
                self.log.append(f"{side} ends")
                raise

        return run


@pytest.mark.parametrize(
    ("forward", "backward", "order"),
    [
        (2, 2, "B0 F0 B1 F1"),
        (1, 3, "B0 F0 B1 B2"),
        (3, 1, "B0 F0 F1 F2"),
        (0, 2, "B0 B1"),
        (2, 0, "F0 F1"),
    ],
)
def test_they_alternate_and_the_longer_one_goes_on_alone(
    worker: ThreadPoolExecutor, forward: int, backward: int, order: str
) -> None:
    passes = Logged()
    for _ in range(20):
        passes.log.clear()
        passes.turns.run(passes.make("F", forward), passes.make("B", backward), worker)
        assert passes.log == order.split()


def test_without_another_pass_there_is_nothing_to_hand_over_to() -> None:
    passes = Logged()
    passes.make("F", 2)()
    passes.make("B", 2)()
    assert passes.log == ["F0", "F1", "B0", "B1"]


def test_a_forward_pass_within_a_backward_pass_keeps_the_turn(worker: ThreadPoolExecutor) -> None:
    """Recomputation, whose exchanges the forward pass beside it has no counterpart for."""
    passes = Logged()
    again = passes.make("F", 2)

    def backward() -> None:
        again()
        passes.make("B", 2)()

    passes.turns.run(passes.make("F", 2), backward, worker)
    assert passes.log == ["F0", "F1", "B0", "F0", "B1", "F1"]


@pytest.mark.parametrize(
    ("fails", "order"), [("F", "B0 F0 B1 F1 B ends"), ("B", "B0 F0 B1 F ends")], ids=["forward", "backward"]
)
def test_if_one_fails_the_other_ends_and_its_error_comes_out(
    worker: ThreadPoolExecutor, fails: Side, order: str
) -> None:
    passes = Logged()
    for _ in range(20):
        passes.log.clear()
        forward, backward = (passes.make(side, 3, 1 if side == fails else None) for side in ("F", "B"))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=fails):
            passes.turns.run(forward, backward, worker)
        assert " ".join(passes.log) == order
    # And the next pair runs as if nothing had been.
    passes.log.clear()
    passes.turns.run(passes.make("F", 1), passes.make("B", 1), worker)
    assert passes.log == ["B0", "F0"]


def test_a_pass_that_fails_before_the_other_has_begun(worker: ThreadPoolExecutor) -> None:
    passes = Logged()
    with pytest.raises(ValueError, match="B"):
        passes.turns.run(passes.make("F", 1), passes.make("B", 1, fails_in=0), worker)
    assert passes.log == ["B0"]
