"""Rows of a user's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.runtime.data import Rows
from megalite.runtime.data.own import OwnDataset

ROW = Rows(np.array([5, 6, 0, 0]), np.array([6, -1, -1, -1]))


class Own:
    def __init__(self, row: Rows) -> None:
        self.row = row

    def __len__(self) -> int:
        return 1

    def sample(self, i: int) -> Rows:
        return self.row


def padded(padding: Any) -> Rows:
    """Padding in a list, as users may give it."""
    return replace(ROW, padding=padding)


def test_padding_is_what_the_user_says() -> None:
    for padding, tokens in (([False, False, True, True], 2), (None, 4)):
        row = OwnDataset(Own(padded(padding)), 4, 9).sample(0)
        assert isinstance(row, Rows)
        assert row.num_tokens() == tokens
    for wrong in ([True, False, True, True], [False, True]):
        with pytest.raises(UserError, match="no target where it is true"):
            OwnDataset(Own(padded(wrong)), 4, 9)


def test_a_token_further_on_may_be_padding() -> None:
    """Of two documents and padding: the last places of each see no token of their own document."""
    starts, padding = np.array([0, 0, 0, 3, 3, 5]), np.arange(6) >= 5
    ahead = Rows(np.arange(6), np.arange(6), starts, padding=padding).ahead(1)
    assert ahead.padding is not None
    assert ahead.padding.tolist() == [False, False, True, False, True, True]
    assert Rows(np.arange(6), np.arange(6)).ahead(2).num_tokens() == 4
