"""Types of option values: what JSON holds and what a word or a file's value is read as."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest

from megalite.core.base.errors import UserError
from megalite.core.options.names import Choices
from megalite.core.options.rope import RopeScaling
from megalite.core.options.values import fits, read_value

NAME = Annotated[str, Choices({"a": 1, "b": 2})]
# (type, value, whether JSON of a checkpoint may hold it, what the command line or YAML makes of it; ... is an error)
CASES: list[tuple[Any, Any, bool, Any]] = [
    (int, 3, True, 3),
    (int, True, False, ...),
    (int, 3.0, False, ...),
    (int, "3", False, 3),
    (float, 3, True, 3.0),
    (float, "1e-4", False, 1e-4),
    (float, False, False, ...),
    (bool, True, True, True),
    (bool, 1, False, ...),
    (bool, "true", False, ...),
    (str, "x", True, "x"),
    (str, "x\0", False, ...),
    (str, 5, False, "5"),
    (str, [], False, ...),
    (int | None, None, True, None),
    (int | None, "null", False, None),
    (int, None, False, ...),
    (Literal[0, 1], 1, True, 1),
    (Literal[0, 1], "1", False, 1),
    (Literal[0, 1], 7, True, ...),  # not offered any more
    (Literal[0, 1], True, False, ...),
    (Literal["off", "x"], False, False, "off"),  # YAML's `off` without quotes
    (Literal["off", "x"], True, False, ...),
    (NAME, "b", True, "b"),
    (NAME, "c", True, ...),
    (tuple[int, ...], [1, 2], True, (1, 2)),
    (tuple[int, ...], [1, "a"], False, ...),
    (tuple[str, ...], "a", False, ("a",)),
    (RopeScaling, {"factor": 2}, True, RopeScaling(factor=2.0)),
    (RopeScaling, {"factor": "two"}, False, ...),
    (RopeScaling, {"fact": 2}, False, ...),
    (RopeScaling | None, "{factor: 2}", False, RopeScaling(factor=2.0)),
]


@pytest.mark.parametrize(("hint", "value", "is_stored", "expected"), CASES)
def test_types_of_values(hint: Any, value: Any, is_stored: bool, expected: Any) -> None:
    assert fits(hint, value) == is_stored
    if expected is ...:
        with pytest.raises(UserError, match="^given: "):
            read_value(hint, value, "given")
    else:
        got = read_value(hint, value, "given")
        assert got == expected
        assert type(got) is type(expected)
