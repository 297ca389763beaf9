"""Experts and biases saved in one layout and loaded in another: bit-equal tensors and moments, equal next losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.jobs import make_config
from tests.parity.test_bias import BIASED
from tests.unit.checkpoint.jobs import load_and_save, train_and_save
from tests.unit.checkpoint.test_reshard import assert_same
from tests.workers import WorkerPool

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2-tp2": (4, {"ep": 2, "tp": 2}),
    "ep4-tp2-whole": (4, {"ep": 4, "tp": 2, "etp": "1"}),
    "ep2-pp2-zero3": (4, {"ep": 2, "pp": 2, "zero": 3, "zero_whole_below": 500}),
}


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    cfg = make_config(BIASED, {"ep": 4})
    return pool.run(4, train_and_save, cfg, 4, str(tmp_path_factory.mktemp("ep4")), 2)[0]


@pytest.mark.parametrize(
    "layout", ["ep2-tp2", *(pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS if name != "ep2-tp2")]
)
def test_there_and_back(pool: WorkerPool, saved: Any, tmp_path: Path, layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    cfg = make_config(BIASED, parallel)
    there = pool.run(world, load_and_save, cfg, world, saved["path"], str(tmp_path / "there"), 1)
    assert_same(saved["path"], there[0]["path"])
    np.testing.assert_allclose(there[0]["after"], saved["after"], rtol=1e-5)
    for rank in there:
        assert rank["read"] == rank["loaded"] == rank["needed"]
    cfg = make_config(BIASED, {"ep": 4})
    back = pool.run(4, load_and_save, cfg, 4, there[0]["path"], str(tmp_path / "back"), 1)
    assert_same(saved["path"], back[0]["path"])
    assert back[0]["after"] == saved["after"], "the same layout goes on bit for bit"
