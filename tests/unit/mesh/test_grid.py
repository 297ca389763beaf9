"""Rank arithmetic against written-out groups, and as a rule for worlds up to 16,384 ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid

SIXTEEN = {
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    "dp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "pp": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
    "pp tp": [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]],
    "tp dp": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    "dp pp tp": [list(range(16))],
}


@pytest.mark.parametrize("axis", SIXTEEN)
def test_groups_of_sixteen_ranks(axis: str) -> None:
    assert [list(g) for g in Grid.of(16, tp=2, pp=4).groups(*axis.split())] == SIXTEEN[axis]


def test_coordinates_of_sixteen_ranks() -> None:
    t = Grid.of(16, tp=2, pp=4)
    assert t["dp"] == 2
    assert t["cp"] == 1
    assert t.coords(0) == {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    assert t.coords(3) == {"pp": 0, "dp": 1, "cp": 0, "tp": 1}
    assert t.coords(13) == {"pp": 3, "dp": 0, "cp": 0, "tp": 1}
    assert t.rank(dp=1, pp=3, tp=1) == 15


def test_groups_of_sixteen_ranks_that_share_samples() -> None:
    grid = Grid.of(16, tp=2, cp=2, pp=2)
    assert grid.batch == ("dp", "cp")
    assert grid.groups("cp")[:4] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("dp")[:4] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert grid.groups(*grid.batch)[:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    for names in (("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp")):
        assert sorted(rank for group in grid.groups(*names) for rank in group) == list(range(16))
    with pytest.raises(UserError, match="--tp 1 --cp 4 --pp 1 on 6 ranks: .* multiple of tp x cp x pp = 4"):
        Grid.of(6, cp=4)


def check_partition(topology: Grid) -> None:
    """Groups of every axis cover each rank once, in the axis's order, and are an independent grid's lines."""
    grid = np.arange(topology.world).reshape(topology["pp"], topology["dp"], topology["tp"])
    lines = {
        "tp": grid.reshape(-1, topology["tp"]),
        "dp": grid.transpose(0, 2, 1).reshape(-1, topology["dp"]),
        "pp": grid.transpose(1, 2, 0).reshape(-1, topology["pp"]),
        "pp tp": grid.transpose(1, 0, 2).reshape(topology["dp"], -1),
    }
    for axis, expected in lines.items():
        groups = np.array(topology.groups(*axis.split()))
        assert np.array_equal(groups, expected), axis
        assert np.array_equal(np.sort(groups, axis=None), np.arange(topology.world)), axis


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 14).flatmap(lambda n: st.tuples(st.integers(0, n), st.integers(0, n), st.just(n))))
def test_powers_of_two_up_to_16384_ranks(exponents: tuple[int, int, int]) -> None:
    tp, pp, world = exponents
    if tp + pp <= world:
        topology = Grid.of(2**world, tp=2**tp, pp=2**pp)
        check_partition(topology)
        for rank in {0, 1 % topology.world, topology.world // 3, topology.world - 1}:
            assert topology.rank(**topology.coords(rank)) == rank


@settings(max_examples=25, deadline=None)
@given(tp=st.integers(1, 12), pp=st.integers(1, 24), dp=st.integers(1, 56))
def test_any_factors(tp: int, pp: int, dp: int) -> None:
    topology = Grid.of(tp * pp * dp, tp=tp, pp=pp)
    assert topology["dp"] == dp
    check_partition(topology)
    # Rank -> place -> rank, for every rank of the world.
    assert [topology.rank(**topology.coords(r)) for r in range(topology.world)] == list(range(topology.world))


@pytest.mark.parametrize(
    ("world", "tp", "pp", "words"),
    [
        (6, 4, 1, ["--tp 4 --pp 1 on 6 ranks", "multiple of tp x pp = 4", "start 4 ranks (--nproc of megalite train"]),
        (1, 2, 2, ["--tp 2 --pp 2 on 1 rank:", "= 4", "start 4 ranks"]),
        (8, 3, 2, ["on 8 ranks", "= 6", "start 6 ranks"]),
        (4, 0, 1, ["--tp 0 --pp 1 on 4 ranks", "each must be at least 1", "use --tp 1"]),
        (4, -2, -2, ["--tp -2 --pp -2", "at least 1"]),
        (0, 1, 1, ["on 0 ranks"]),
    ],
)
def test_what_does_not_divide_is_refused(world: int, tp: int, pp: int, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        Grid.of(world, tp=tp, pp=pp)
    for word in words:
        assert word in str(error.value)


def test_places_outside_the_world() -> None:
    topology = Grid.of(4, tp=2, pp=2)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match="outside a world of 4"):
            topology.coords(rank)
    with pytest.raises(ValueError, match="unknown axis 'ep'"):
        topology.groups("ep")


def test_a_second_grid_over_the_same_ranks() -> None:
    """Experts: four data-parallel ranks are two expert-parallel ones, twice."""
    experts = Grid((("pp", 2), ("edp", 2), ("ep", 2), ("tp", 1)))
    assert experts.groups("ep") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert experts.groups("edp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert experts.groups("ep", "edp") == Grid.of(8, pp=2).groups("dp")


def test_products_of_axes_in_any_order() -> None:
    grid = Grid((("pp", 2), ("dp", 2), ("cp", 2), ("tp", 2)))
    assert (
        grid.groups("dp", "cp")
        == grid.groups("cp", "dp")
        == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    )
    assert [r for r in range(16) if grid.is_first(r, "cp", "tp")] == [0, 4, 8, 12]


def test_groups_of_experts_on_sixteen_ranks() -> None:
    cut = Grid.of(16, tp=2, ep=4).experts
    assert cut is not None
    assert cut.groups("ep") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert cut.groups("edp")[:2] == [(0, 8), (1, 9)]
    assert cut.groups("tp")[:2] == [(0, 1), (2, 3)]
    whole = Grid.of(16, tp=2, ep=4, etp="1").experts
    assert whole is not None
    assert whole.groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert whole.groups("edp")[0] == (0, 4, 8, 12)
    assert whole["tp"] == 1
    # Stages and shared samples: the neighbors of dp x cp, never over pp.
    staged = Grid.of(16, tp=2, cp=2, pp=2, ep=4).experts
    assert staged is not None
    assert staged.groups("ep") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert Grid.of(16, tp=2).experts is None


def test_experts_must_fit_the_ranks() -> None:
    with pytest.raises(UserError, match="--ep 16 --etp tp on 4 ranks: must divide the 4 ranks of dp x cp .*1, 2, 4"):
        Grid.of(4, ep=16)
    with pytest.raises(UserError, match="--ep 8 --etp 1 on 4 ranks: must divide the 4 ranks of tp x cp x dp"):
        Grid.of(4, tp=2, ep=8, etp="1")
