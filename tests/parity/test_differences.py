"""Snapshots as differences of runs in any layout, and the tools on them: what whole snapshots of the same run give."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from megalite.extras.command import find_main
from megalite.runtime.checkpoint.manifest import read_manifest
from tests.parity import runs
from tests.unit.checkpoint.differences import assert_same
from tests.workers import WorkerPool

LAYOUTS = {
    "pp2-zero0": (4, ["--pp", "2", "--zero", "0"]),
    "tp2-zero1": (4, ["--tp", "2", "--zero", "1"]),
    "pp2-vp2-zero2": (4, ["--pp", "2", "--vp", "2", "--zero", "2"]),
    "zero3": (4, ["--zero", "3", "--zero-whole-below", "500"]),
}


Train = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def train(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Run of a layout whose snapshots are differences, or whole ones."""

    @cache
    def run_of(layout: str, delta: int) -> Path:
        world, words = LAYOUTS[layout]
        run = tmp_path_factory.mktemp(layout) / f"delta{delta}"
        saves = ["--save-model-every", "1", "--save-model-delta", str(delta), "--train-steps", "3", "--eval-steps", "0"]
        words = [*words, *saves, "--micro-batch-size", "2", "--run-dir", str(run)]
        pool.run(world, runs.train, [*runs.MODEL, *words], world)
        return run

    return run_of


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bits_of_whole_snapshots(train: Train, layout: str) -> None:
    whole, delta = (train(layout, k) / "checkpoints" for k in (0, 3))
    for step in (1, 2, 3):
        name = f"model_{step:08d}"
        assert (read_manifest(delta / name).base is not None) == (step > 1)
        assert_same(delta / name, whole / name)


def test_tools_on_a_difference(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    (tmp_path / "text.txt").write_text("ABCABCABC")
    for k in (0, 3):
        run = train("pp2-vp2-zero2", k)
        path, model = str(run / "checkpoints" / "model_00000002"), ["--device", "cpu", "--tokenizer", "bytes"]
        find_main("evaluate")([path, *model, "--text", str(tmp_path / "text.txt")])
        find_main("generate")([path, *model, "--prompt", "AB", "--max-new-tokens", "5", "--seed", "3"])
        said.append(re.sub(r"\S*delta\d\S*", "", capsys.readouterr().out))
        find_main("convert")(["export", "--checkpoint", path, "--out", str(run / "hf")])
        find_main("inspect")([path, "--verify", "--tensors"])
        assert ("difference of model_00000001" in capsys.readouterr().out) == bool(k)
    assert said[0] == said[1]
    exports = [(train("pp2-vp2-zero2", k) / "hf" / "model.safetensors").read_bytes() for k in (0, 3)]
    assert exports[0] == exports[1]
