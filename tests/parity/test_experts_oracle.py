"""Families with experts against transformers' own models: two steps of AdamW, in one process and over ranks of ep."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.runtime.checkpoint.hf.start import hf_model_config
from tests.parity import jobs
from tests.parity.oracle import Expected, check_follows, train_plainly
from tests.parity.oracle import damped as damped
from tests.rows import always_run
from tests.unit.checkpoint.hf_models import load_model, make_model, read_all
from tests.workers import WorkerPool

pytestmark = pytest.mark.usefixtures("damped")

FAMILIES, STEPS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), 2
TP: dict[str, Any] = {"ep": 2, "tp": 2, "sequence_parallel": False}
CP: dict[str, Any] = {"ep": 2, "cp": 2}
PP: dict[str, Any] = {"pp": 2, "schedule": "zb-h1"}
ETP: dict[str, Any] = {"ep": 4, "tp": 2, "etp": "1", "zero": 3}
# (family, ranks, layouts on them): one family in every layout of experts, the others in one.
EVERY: list[dict[str, Any]] = [{"ep": 2, "tp": 2}, {"ep": 4}, ETP]
PLAIN: list[tuple[str, int, list[dict[str, Any]]]] = [(family, 1, [{}]) for family in FAMILIES]
SPREAD = [
    ("mixtral", 4, [{"ep": 4, "zero": 2}]),
    *((family, 4, EVERY if family == "qwen2_moe" else EVERY[:1]) for family in FAMILIES[1:]),
]
# Families with latent attention, groups, or biases that move after every step; one in every layout.
BALANCED = [
    ("deepseek_v3", 4, [TP, CP, ETP]),
    ("deepseek_v3", 2, [PP]),
    ("deepseek_v2", 4, [TP]),
    ("deepseek_v2", 2, [PP]),
    ("deepseek_v2_lite", 4, [ETP]),
    ("glm4_moe", 4, [CP]),
    ("gpt_oss", 4, [CP, ETP]),
    ("llama4", 4, [TP]),
    ("llama4", 2, [PP]),
    ("qwen3_next", 4, [CP, ETP]),
    ("kimi_k2", 2, [PP]),
]
ROWS = [*PLAIN, *SPREAD, *BALANCED]
ALWAYS = [*PLAIN, *(row for row in BALANCED if row[:2] in (("deepseek_v3", 4), ("qwen3_next", 4)))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of each family, and what transformers and torch make of it: figures of every step, last weights."""
    made: dict[str, Expected] = {}

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


@pytest.mark.parametrize("row", always_run(ROWS, *ALWAYS), ids=lambda row: "-".join(map(str, row[:2])))
def test_experts_follow_transformers(pool: WorkerPool, models: Any, tmp_path: Path, row: Any) -> None:
    family, world, layouts = row
    expected = models(family)
    model = dataclasses.replace(hf_model_config(expected[0]), seq_len=jobs.SEQ)
    # The products of transformers, to the same roundings.
    cfgs = [jobs.make_config(model, layout, train_steps=STEPS, ops="grouped=torch") for layout in layouts]
    check_follows(pool, expected, cfgs, world, tmp_path)
