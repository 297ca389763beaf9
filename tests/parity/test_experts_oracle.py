"""Families with experts against transformers' own models: five steps of AdamW, in one process and over ranks of ep."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint.hf.start import hf_model_config, load_hf
from megalite.checkpoint.save import Checkpointer
from megalite.config.run import Config
from megalite.extras.convert.hf import export_hf
from tests.parity import jobs
from tests.parity.test_oracle import train_plainly
from tests.rows import always_run
from tests.unit.checkpoint.hf_models import load_model, make_model
from tests.unit.checkpoint.test_hf import read_all
from tests.workers import WorkerPool

FAMILIES, STEPS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), 5
LATENT = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
# World -> layouts; every family in the first of each, one in the others.
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"ep": 2}],
    4: [{"ep": 2, "tp": 2}, {"ep": 4}, {"ep": 4, "tp": 2, "etp": "1", "zero": 3}],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of each family, and what transformers and torch make of it: figures of every step, last weights."""
    made: dict[str, tuple[Path, list[tuple[float, float]], dict[str, torch.Tensor]]] = {}

    def get(family: str) -> Any:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            make_model(family, folder)
            hf, closest = load_model(folder).train(), [np.inf]

            def note(router: Any, inputs: Any, output: Any) -> None:
                logits = output if isinstance(output, torch.Tensor) else output[0]
                best = logits.detach().topk(hf.config.num_experts_per_tok + 1, -1).values
                closest[0] = min(closest[0], (best[:, -2] - best[:, -1]).min().item())

            for name, module in hf.named_modules():
                if name.endswith("mlp.gate"):
                    module.register_forward_hook(note)
            steps = train_plainly(hf, STEPS)
            # Nearer ties could fall either way.
            assert 1e-5 < closest[0] < 1
            hf.save_pretrained(folder / "trained")
            made[family] = folder, steps, read_all(folder / "trained")
        return made[family]

    return get


def trained(rank: int, cfg: Config, world: int, folder: str, root: str) -> list[tuple[float, float]]:
    """Figures of every step of a run that starts from a folder; the last weights are saved."""
    engine = jobs.start(rank, cfg, world)
    load_hf(folder, cfg.model, engine.optimizer.states(), engine.ctx)
    engine.optimizer.finish_load()
    steps = jobs.run_steps(engine, STEPS)
    checkpointer = Checkpointer(root, engine.ctx)
    model = dataclasses.asdict(cfg.model)
    checkpointer.save(STEPS, engine.optimizer.states(), {"config": {"model": model}})
    checkpointer.close()
    return steps


def check(ranks: list[Any], expected: Any, saved: Path, what: str) -> None:
    steps, weights = expected
    for rank in ranks:
        np.testing.assert_allclose(rank, steps, rtol=1e-5, err_msg=what)
    export_hf(saved, saved / "hf")
    ours = read_all(saved / "hf")
    assert ours.keys() == weights.keys()
    for name, theirs in weights.items():
        assert (ours[name] - theirs).abs().max() <= 1e-5 * theirs.abs().max(), f"{what}: {name}"


def config(folder: Path, parallel: dict[str, Any]) -> Config:
    model = dataclasses.replace(hf_model_config(folder), seq_len=jobs.SEQ)
    return jobs.make_config(model, parallel, train_steps=STEPS)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_follows_transformers(models: Any, tmp_path: Path, family: str) -> None:
    folder, *expected = models(family)
    check([trained(0, config(folder, {}), 1, str(folder), str(tmp_path))], expected, tmp_path, family)


@pytest.mark.parametrize("family", always_run(FAMILIES, "mixtral", "qwen2_moe"))
@pytest.mark.parametrize("world", always_run(LAYOUTS, 4))
def test_every_layout_follows_transformers(
    pool: WorkerPool, models: Any, tmp_path: Path, world: int, family: str
) -> None:
    folder, *expected = models(family)
    for i, layout in enumerate(LAYOUTS[world][: None if family == "qwen2_moe" else 1]):
        root = tmp_path / str(i)
        ranks = pool.run(world, trained, config(folder, layout), world, str(folder), str(root))
        check(ranks, expected, root, f"{family} {layout}")
