"""`run_ranks`: functions of a notebook on real processes."""

from __future__ import annotations

from typing import Any

import pytest

import megalite

CELLS = """
import torch
import torch.distributed as dist

SCALE = 3

def scaled(x, by=2):
    return SCALE * by * x

def total(rank, start):
    print("rank", rank)
    x = scaled(torch.tensor([start + rank]))
    dist.all_reduce(x)
    return rank, x, [scaled(i) for i in range(2)]

def one_fails(rank):
    dist.barrier()
    if rank == 1:
        raise ValueError("on purpose")
    dist.barrier()

def mistake(rank):
    megalite.configure(tensor_parallel=2)

class Mine:
    pass

mine = Mine()

def with_a_class(rank):
    return mine

def outer():
    x = 1
    return lambda rank: x
"""


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__", "megalite": megalite}
    exec(CELLS, names)
    return names


def test_functions_of_a_cell_travel(cells: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    results = megalite.run_ranks(3, cells["total"], 10)
    # 6 x (10 + 11 + 12)
    assert [(rank, x.tolist(), more) for rank, x, more in results] == [(rank, [198], [0, 6]) for rank in range(3)]
    assert capsys.readouterr().out == "rank 0\nrank 1\nrank 2\n"


def test_failures_are_raised_here(cells: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*ValueError: on purpose"):
        megalite.run_ranks(2, cells["one_fails"])
    with pytest.raises(megalite.UserError, match="unknown flag"):
        megalite.run_ranks(1, cells["mistake"])
    with pytest.raises(megalite.UserError, match="mine .* is of class Mine"):
        megalite.run_ranks(1, cells["with_a_class"])
    with pytest.raises(megalite.UserError, match="uses variables of an enclosing function"):
        megalite.run_ranks(1, cells["outer"]())
    with pytest.raises(megalite.UserError, match="world 0"):
        megalite.run_ranks(0, cells["total"], 1)
