"""Any layout to any other: bit-equal tensors, equal next losses, and no byte read that was not needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.jobs import gpt2, llama, make_config
from tests.rows import always_run
from tests.unit.checkpoint.jobs import assert_same, layout, load_and_save, train_and_save, verified_share, whole_tensors
from tests.workers import WorkerPool

Layout = dict[str, int]
TP2_PP2: Layout = {"tp": 2, "pp": 2}
# (saved in, loaded in): every axis changes, grows and shrinks, alone and together; further ones are those of tied
# embeddings and of modules below, and the composer draws more.
PAIRS: list[tuple[Layout, Layout]] = [
    (TP2_PP2, {"pp": 4}),
    ({"dp": 4}, {"tp": 4}),
    ({"pp": 2, "vp": 2}, {"tp": 2, "dp": 2}),
    ({"tp": 2, "dp": 2, "zero": 0}, {"pp": 2, "dp": 2}),
]
MODELS = {"llama": llama(), "gpt2": gpt2(), "further": llama(mtp_num_layers=2)}


def name_of(options: Layout) -> str:
    return "".join(f"{k}{v}" for k, v in options.items()) or "one"


def config(model: str, options: Layout, **train: Any) -> tuple[Any, int]:
    parallel, world = layout(**options)
    return make_config(MODELS[model], parallel, **train), world


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two steps in a layout, saved, and the losses of the third; made once for each layout."""
    made: dict[str, dict[str, Any]] = {}

    def get(model: str, options: Layout) -> dict[str, Any]:
        key = f"{model}-{name_of(options)}"
        if key not in made:
            cfg, world = config(model, options)
            root = str(tmp_path_factory.mktemp(key))
            made[key] = pool.run(world, train_and_save, cfg, world, root, 2)[0]
        return made[key]

    return get


@pytest.mark.parametrize("pair", always_run(PAIRS, PAIRS[0]), ids=lambda pair: "-".join(map(name_of, pair)))
def test_there_and_back(pool: WorkerPool, saved: Any, tmp_path: Path, pair: tuple[Layout, Layout]) -> None:
    a, b = pair
    origin = saved("llama", a)
    cfg, world = config("llama", b)
    there = pool.run(world, load_and_save, cfg, world, origin["path"], str(tmp_path / "there"), 1)
    cfg, world = config("llama", a)
    back = pool.run(world, load_and_save, cfg, world, there[0]["path"], str(tmp_path / "back"), 1)
    assert_same(origin["path"], there[0]["path"])
    assert_same(origin["path"], back[0]["path"])
    assert back[0]["after"] == origin["after"], "the same layout goes on bit for bit"
    np.testing.assert_allclose(there[0]["after"], origin["after"], rtol=1e-5)
    for rank in there + back:
        assert rank["read"] == rank["loaded"] == rank["needed"]


@pytest.mark.parametrize("b", [{}, {"pp": 4}], ids=name_of)
def test_tied_embedding_is_stored_once(pool: WorkerPool, saved: Any, tmp_path: Path, b: Layout) -> None:
    origin = saved("gpt2", TP2_PP2)
    names = whole_tensors(Path(origin["path"])).keys()
    assert "master embed_tokens.weight" in names
    assert "master lm_head.weight" not in names
    cfg, world = config("gpt2", b)
    there = pool.run(world, load_and_save, cfg, world, origin["path"], str(tmp_path), 1)
    assert_same(origin["path"], there[0]["path"])
    np.testing.assert_allclose(there[0]["after"], origin["after"], rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("b", [{"pp": 2, "vp": 2, "dp": 2}, {"tp": 4}], ids=name_of)
def test_modules_that_predict_further_tokens_come_along(
    pool: WorkerPool, saved: Any, tmp_path: Path, b: Layout
) -> None:
    """With their moments; the embedding is stored once."""
    origin = saved("further", TP2_PP2)
    names = whole_tensors(Path(origin["path"])).keys()
    assert {"master layers.5.eh_proj.weight", "exp_avg layers.4.norm.weight"} <= names
    assert "master mtp_embed_tokens.weight" not in names
    cfg, world = config("further", b)
    there = pool.run(world, load_and_save, cfg, world, origin["path"], str(tmp_path), 1)
    assert_same(origin["path"], there[0]["path"])
    np.testing.assert_allclose(there[0]["after"], origin["after"], rtol=1e-5)


def test_precision_changes(pool: WorkerPool, saved: Any, tmp_path: Path) -> None:
    origin = saved("llama", {"dp": 4})
    cfg, world = config("llama", {"tp": 2}, precision="bf16")
    there = pool.run(world, load_and_save, cfg, world, origin["path"], str(tmp_path), 1)
    assert_same(origin["path"], there[0]["path"])
    np.testing.assert_allclose(there[0]["after"][0], origin["after"][0], rtol=2e-2)


def test_resume_is_bit_identical(pool: WorkerPool, saved: Any, tmp_path: Path) -> None:
    cfg, world = config("llama", TP2_PP2)
    straight = pool.run(world, train_and_save, cfg, world, str(tmp_path / "straight"), 2, 3)[0]
    resumed = pool.run(world, load_and_save, cfg, world, straight["path"], str(tmp_path / "again"), 3)[0]
    assert resumed["after"] == straight["after"]


def test_checking_is_shared(pool: WorkerPool, saved: Any) -> None:
    path = saved("llama", TP2_PP2)["path"]
    shares = pool.run(4, verified_share, 4, path)
    assert sum(shares) == sum(p.stat().st_size for p in Path(path).glob("*.safetensors"))
    assert all(share > 0 for share in shares)
