"""A host that comes back when the run is done: what its launcher returns."""

from __future__ import annotations

import socket

import pytest

from megalite.extras.launch.local import LOST_CODE, LocalRanks, Place

ELASTIC = ["pretrain_gpt.py", "--recover", "host", "--elastic"]


@pytest.mark.parametrize(
    ("script", "host", "code", "expected"),
    [
        (ELASTIC, 1, 1, LOST_CODE),
        (ELASTIC, 1, 2, LOST_CODE),
        (ELASTIC, 1, 0, 0),
        (ELASTIC, 0, 1, 1),
        (["pretrain_gpt.py"], 1, 1, 1),
    ],
)
def test_an_error_after_the_end_is_none_of_the_run(script: list[str], host: int, code: int, expected: int) -> None:
    """A Job whose first pod had succeeded, or was about to, was marked as failed by it."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        ranks = LocalRanks(Place(1, 2, host, "127.0.0.1", first.getsockname()[1]), script)
        assert ranks.unless_late(code) == code
    assert ranks.unless_late(code) == expected
