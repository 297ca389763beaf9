"""Random numbers as functions of a key."""

from __future__ import annotations

import numpy as np

from megalite.core.mesh.seeding import derive, philox


def test_every_key_has_a_seed_of_its_own() -> None:
    # Concatenation is no confusion: ("1", 23) is not ("12", 3), and 1 is not "1".
    keys: list[tuple[int | str, ...]] = [(1, 23), (12, 3), ("1", 23), ("1", "23"), ("123",), (123,)]
    assert len({derive(*key) for key in keys}) == len(keys)


def test_philox_is_a_function_of_the_key() -> None:
    assert np.array_equal(philox(1, "init", "w").random(5), philox(1, "init", "w").random(5))
    assert not np.array_equal(philox(1, "init", "w").random(5), philox(1, "init", "v").random(5))
