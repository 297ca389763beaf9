"""Experts and biases saved in one layout and loaded in another: bit-equal tensors and moments, equal next losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.runtime.checkpoint.load import load_checkpoint
from megalite.runtime.checkpoint.manifest import read_manifest
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.options.run import Config
from tests.parity.jobs import make_config, run_steps, start
from tests.parity.models import BIASED
from tests.unit.checkpoint.jobs import assert_same, load_and_save, train_and_save
from tests.workers import WorkerPool

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
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
    cfg = make_config(BIASED, parallel, micro_batch_size=1)  # routers balance a micro-batch
    there = pool.run(world, load_and_save, cfg, world, saved["path"], str(tmp_path / "there"), 1)
    assert_same(saved["path"], there[0]["path"])
    np.testing.assert_allclose(there[0]["after"], saved["after"], rtol=1e-5)
    for rank in there:
        assert rank["read"] == rank["loaded"] == rank["needed"]
    cfg = make_config(BIASED, {"ep": 4})
    back = pool.run(4, load_and_save, cfg, 4, there[0]["path"], str(tmp_path / "back"), 1)
    assert_same(saved["path"], back[0]["path"])
    assert back[0]["after"] == saved["after"], "the same layout goes on bit for bit"


def weights_alone(rank: int, cfg: Config, world: int, root: str) -> tuple[dict[str, np.ndarray], str]:
    """Train two steps and save the weights alone; returns the biases."""
    engine = start(rank, cfg, world)
    run_steps(engine, 2)
    checkpointer = Checkpointer(root, engine.ctx)
    path = checkpointer.save_model(2, engine.optimizer.states(), {})
    checkpointer.close()
    return {state.name: state.flat.numpy().copy() for state in engine.optimizer.beside}, str(path)


def loaded(rank: int, cfg: Config, world: int, path: str) -> dict[str, np.ndarray]:
    """The biases of a checkpoint of weights alone."""
    engine = start(rank, cfg, world)
    load_checkpoint(path, engine.optimizer.states(), engine.ctx, moments=False)
    return {state.name: state.flat.numpy().copy() for state in engine.optimizer.beside}


def test_weights_alone_keep_biases_in_fp32(pool: WorkerPool, tmp_path: Path) -> None:
    cfg = make_config(BIASED, {"ep": 2})
    biases, path = pool.run(2, weights_alone, cfg, 2, str(tmp_path))[0]
    assert any((bias != np.float32(0)).any() for bias in biases.values())
    tensors = read_manifest(Path(path)).tensors["model"]
    assert {tensors[name].dtype for name in biases} == {"F32"}
    assert {tensor.dtype for name, tensor in tensors.items() if name not in biases} == {"BF16"}
    (here,) = pool.run(1, loaded, make_config(BIASED), 1, path)
    assert here.keys() == biases.keys()
    assert all(np.array_equal(here[name], biases[name]) for name in biases)
