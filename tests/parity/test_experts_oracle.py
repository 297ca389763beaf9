"""Families with experts against transformers' own models: five steps of AdamW, in one process and over ranks of ep."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.extras.convert.hf import export_hf
from megalite.runtime.checkpoint.hf.start import hf_model_config, load_hf
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.oracle import damped as damped
from tests.parity.oracle import train_plainly
from tests.rows import always_run
from tests.unit.checkpoint.hf_models import load_model, make_model, read_all
from tests.workers import WorkerPool

pytestmark = pytest.mark.usefixtures("damped")

FAMILIES, STEPS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), 3
TP: tuple[int, dict[str, Any]] = (4, {"ep": 2, "tp": 2, "sequence_parallel": False})
CP: tuple[int, dict[str, Any]] = (4, {"ep": 2, "cp": 2})
PP: tuple[int, dict[str, Any]] = (2, {"pp": 2, "schedule": "zb-h1"})
ETP: tuple[int, dict[str, Any]] = (4, {"ep": 4, "tp": 2, "etp": "1", "zero": 3})
# Families with latent attention, groups, or biases that move after every step; one in every layout.
BALANCED = {
    "deepseek_v3": [TP, CP, PP, ETP],
    "deepseek_v2": [TP, PP],
    "deepseek_v2_lite": [ETP],
    "glm4_moe": [CP],
    "gpt_oss": [CP, ETP],
    "llama4": [TP, PP],
    "qwen3_next": [CP, ETP],
    "kimi_k2": [PP],
}
ROWS = [(family, *layout) for family, layouts in BALANCED.items() for layout in layouts]
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
            hf = load_model(folder).train()
            gates = [module for name, module in hf.named_modules() if name.endswith((".gate", ".router"))]
            closest, counts = [np.inf], dict.fromkeys(gates)

            def note(router: Any, inputs: Any, output: Any) -> None:
                # Llama 4 returns the scores of the chosen experts first.
                logits = output if isinstance(output, torch.Tensor) else output[hf.config.model_type == "llama4_text"]
                closest[0] = min(closest[0], smallest_gap(router, logits.detach(), hf.config.num_experts_per_tok))
                if hasattr(router, "e_score_correction_bias"):
                    counts[router] = output[2].flatten().bincount(minlength=logits.shape[1])

            def move(*_: Any) -> None:
                """Move the biases by the counts of the step before, at megalite's default rate."""
                for router, count in counts.items():
                    if count is not None:
                        router.e_score_correction_bias += 1e-3 * (count.double().mean() - count).sign().float()

            for gate in gates:
                gate.register_forward_hook(note)
            hf.register_forward_pre_hook(move)
            steps = train_plainly(hf, STEPS)
            move()
            # Nearer ties could fall either way.
            assert 1e-5 < closest[0] < 1
            hf.save_pretrained(folder / "trained")
            made[family] = folder, steps, read_all(folder / "trained")
        return made[family]

    return get


def smallest_gap(router: Any, logits: torch.Tensor, k: int) -> float:
    """How near the choice of an expert, or of a group, was to another one."""

    def gap(values: torch.Tensor, k: int) -> float:
        best = values.topk(k + 1, -1).values
        return (best[..., -2] - best[..., -1]).min().item()

    groups, bias = getattr(router, "num_group", None) or 1, getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        logits = logits.sigmoid() + bias
    if groups == 1:
        return gap(logits, k)
    scores = (logits.softmax(-1) if bias is None else logits).unflatten(-1, (groups, -1))
    of_groups = scores.amax(-1) if bias is None else scores.topk(2).values.sum(-1)
    closed = torch.ones_like(of_groups, dtype=torch.bool)
    closed.scatter_(1, of_groups.topk(router.topk_group).indices, False)
    return min(gap(of_groups, router.topk_group), gap(scores.masked_fill(closed.unsqueeze(-1), -1).flatten(1), k))


def trained(rank: int, cfg: Config, world: int, folder: str, root: str) -> list[tuple[float, float]]:
    """Figures of every step of a run that starts from a folder; the last weights are saved."""
    engine = jobs.start(rank, cfg, world)
    load_hf(folder, cfg.model, engine.optimizer.states(), engine.ctx)
    engine.optimizer.finish_load()
    steps = jobs.run_steps(engine, STEPS)
    jobs.check_copies(engine)
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
    # The products of transformers, to the same roundings.
    return jobs.make_config(model, parallel, train_steps=STEPS, ops="grouped=torch")


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_follows_transformers(models: Any, tmp_path: Path, family: str) -> None:
    folder, *expected = models(family)
    check([trained(0, config(folder, {}), 1, str(folder), str(tmp_path))], expected, tmp_path, family)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_follows_transformers(
    pool: WorkerPool, models: Any, tmp_path: Path, world: int, family: str
) -> None:
    folder, *expected = models(family)
    for i, layout in enumerate(LAYOUTS[world][: None if family == "qwen2_moe" else 1]):
        root = tmp_path / str(i)
        ranks = pool.run(world, trained, config(folder, layout), world, str(folder), str(root))
        check(ranks, expected, root, f"{family} {layout}")


@pytest.mark.parametrize("row", always_run(ROWS, ("deepseek_v3", *TP), ("qwen3_next", *CP)), ids=str)
def test_latents_and_biases_follow_transformers(pool: WorkerPool, models: Any, tmp_path: Path, row: Any) -> None:
    family, world, layout = row
    folder, *expected = models(family)
    ranks = pool.run(world, trained, config(folder, layout), world, str(folder), str(tmp_path))
    check(ranks, expected, tmp_path, f"{family} {layout}")


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen2_moe"])
def test_ep_4_follows_transformers(pool: WorkerPool, models: Any, tmp_path: Path, family: str) -> None:
    folder, *expected = models(family)
    cfg = config(folder, {"ep": 4, "zero": 2})
    check(pool.run(4, trained, cfg, 4, str(folder), str(tmp_path)), expected, tmp_path, family)
