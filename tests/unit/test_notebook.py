"""`run_ranks`: functions of a notebook on real processes."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

import megalite

CELLS = """
import os
import sys
import threading
import warnings

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

lock = threading.Lock()

def with_a_lock(rank):
    return lock

def size(rank, things):
    return len(things)

def talks(rank):
    print("printed", rank)
    print("logged", rank, file=sys.stderr)
    warnings.warn(f"warned {rank}")
    dist.barrier()
    if rank == 1:
        end()

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
    with pytest.raises(megalite.UserError, match="lock on other processes: cannot be pickled.*'_thread.lock'"):
        megalite.run_ranks(1, cells["with_a_lock"])
    with pytest.raises(megalite.UserError, match="argument 1 on other processes: cannot be pickled.*'_thread.lock'"):
        megalite.run_ranks(1, cells["size"], [threading.Lock()])
    with pytest.raises(megalite.UserError, match="uses variables of an enclosing function"):
        megalite.run_ranks(1, cells["outer"]())
    with pytest.raises(megalite.UserError, match="world 0"):
        megalite.run_ranks(0, cells["total"], 1)


def test_a_class_of_the_notebook_within_an_argument(cells: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be pickled here, but not be read there."""
    monkeypatch.setattr(sys.modules["__main__"], "Mine", cells["Mine"], raising=False)
    with pytest.raises(megalite.UserError, match="cannot be read on other processes .*'Mine'.* define classes"):
        megalite.run_ranks(1, cells["size"], [cells["mine"]])


@pytest.mark.parametrize(
    ("end", "failure"),
    [("int()", None), ("megalite.configure(typo=2)", "unknown flag"), ("1 / 0", "division"), ("os._exit(3)", "1 died")],
)
def test_what_ranks_print_and_log_is_shown_however_they_end(
    cells: dict[str, Any], capsys: pytest.CaptureFixture[str], end: str, failure: str | None
) -> None:
    exec(f"def end():\n    {end}", cells)
    if failure is None:
        megalite.run_ranks(2, cells["talks"])
    else:
        with pytest.raises((megalite.UserError, RuntimeError), match=failure):
            megalite.run_ranks(2, cells["talks"])
    out, err = capsys.readouterr()
    assert out == "printed 0\nprinted 1\n"
    for rank in range(2):
        assert f"logged {rank}\n" in err
        assert f"UserWarning: warned {rank}\n" in err
