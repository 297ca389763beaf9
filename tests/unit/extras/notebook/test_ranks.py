"""`run_ranks`: functions of a notebook on real processes."""

from __future__ import annotations

import os
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

import megalite
from megalite.extras.notebook import ranks as ranks_module

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

def one_dies(rank):
    dist.barrier()
    if rank == 1:
        os._exit(3)
    dist.barrier()

def mistake(rank):
    megalite.configure(tensor_parallel=2)

class Mine:
    def __init__(self, value):
        self.value = value

    def plus(self, other):
        return Mine(self.value + other)

mine = Mine(torch.tensor([1.0]))

def with_a_class(rank, one):
    assert type(one) is Mine
    return mine.plus(rank), one.plus(rank)

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

def outer(x):
    def inner(rank, y):
        nonlocal x
        x += rank
        return scaled(x) + y
    return inner
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
    with pytest.raises(megalite.UserError, match="lock on other processes: cannot be pickled.*'_thread.lock'"):
        megalite.run_ranks(1, cells["with_a_lock"])
    with pytest.raises(megalite.UserError, match="argument 1 on other processes: cannot be pickled.*'_thread.lock'"):
        megalite.run_ranks(1, cells["size"], [threading.Lock()])
    with pytest.raises(megalite.UserError, match="world 0"):
        megalite.run_ranks(0, cells["total"], 1)


def test_the_first_failure_is_raised(cells: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 fails too, as it loses rank 1; a busy notebook may look only when both have."""
    wait = ranks_module.wait
    monkeypatch.setattr(ranks_module, "wait", lambda sources, seconds: [c for c in sources if wait([c], seconds)])
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*ValueError: on purpose"):
        megalite.run_ranks(2, cells["one_fails"])
    with pytest.raises(RuntimeError, match="rank 1 died"):
        megalite.run_ranks(2, cells["one_dies"])


def test_classes_of_a_cell_travel_both_ways(cells: dict[str, Any]) -> None:
    results = megalite.run_ranks(2, cells["with_a_class"], cells["Mine"](10))
    for rank, (of_cell, of_argument) in enumerate(results):
        assert type(of_cell) is type(of_argument) is cells["Mine"]
        assert (of_cell.value.item(), of_argument.value) == (1 + rank, 10 + rank)


def test_ranks_take_no_more_threads_than_the_environment_gives() -> None:
    """A rank alone took all cores; on tiny tensors, and beside other work, its threads wait for each other."""
    import torch

    (threads,) = megalite.run_ranks(1, lambda rank: torch.get_num_threads())
    assert threads <= int(os.environ["OMP_NUM_THREADS"])


def test_closures_travel(cells: dict[str, Any]) -> None:
    # SCALE x by x (5 + rank) + y
    assert megalite.run_ranks(2, cells["outer"](5), 1) == [31, 37]
    offset = 3
    assert megalite.run_ranks(1, lambda rank: offset + rank) == [3]


def test_a_module_that_only_the_notebook_has(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_here")
    exec("def f(rank): return rank", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(megalite.UserError, match="cannot be read on other processes .*'only_here'.* define it in"):
        megalite.run_ranks(1, module.f)


def test_without_cloudpickle_the_extra_is_named(cells: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(
        megalite.UserError, match=r"run_ranks: requires cloudpickle; pip install 'megalite\[notebooks\]'"
    ):
        megalite.run_ranks(1, cells["total"], 1)


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
