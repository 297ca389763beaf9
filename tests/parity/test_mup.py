"""muP: plain torch with its table, the same in every layout, and activations that do not grow with the width."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.model.parameters import param_map
from megalite.core.options.lr import learning_rate
from megalite.core.options.model import ModelConfig
from megalite.core.sharding import Shard
from megalite.extras.convert.hf import export_hf
from megalite.extras.mup.command import by_layer
from megalite.extras.mup.coordinates import measure, slopes
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.data.samples import MockDataset
from megalite.runtime.options.cli import parse
from megalite.runtime.options.run import Config
from tests.parity import jobs, runs
from tests.parity.matrices import CUT, assert_same, products_in_fp32, trained
from tests.parity.oracle import hf_llama, initial_weights
from tests.unit.checkpoint.hf_models import load_model
from tests.workers import WorkerPool

M = 4  # width 32 over a base width of 8


def config(optimizer: str, model: Any, parallel: dict[str, Any] | None = None, **train: Any) -> Config:
    cfg = jobs.make_config(model, parallel, **train)
    return replace(cfg, optim=replace(cfg.optim, optimizer=optimizer, muon_ns="fp32", lr=3e-3))


def plain_steps(cfg: Config, hf: Any = None) -> list[tuple[float, float]]:
    """The table, on Hugging Face's Llama or another model.

    Logits / m; AdamW lr / m, wd m; Muon lr / sqrt(m), wd sqrt(m); eps / m.
    """
    o = cfg.optim
    hf = hf or hf_llama(cfg.model, initial_weights(cfg.model, cfg.train.seed))
    named = dict(hf.named_parameters())
    matrices = [p for name, p in named.items() if ".layers." in name and p.dim() > 1 and ".gate." not in name]
    ends = [p for p in named.values() if p.dim() == 2 and all(p is not m for m in matrices)]
    vectors = [p for p in named.values() if p.dim() == 1]
    by_lr: list[tuple[Any, float]] = []

    def group(params: list[Any], divisor: float, decay: float) -> dict[str, Any]:
        by_lr.append((made := {"params": params, "weight_decay": decay}, divisor))
        return made

    groups = [group(ends, 1, o.weight_decay), group(vectors, 1, 0.0)]
    width = math.sqrt(M) if o.optimizer == "muon" else M
    own = [group(matrices, width, o.weight_decay * width)]
    optimizers: list[Any] = [
        torch.optim.AdamW([*groups, *(own if o.optimizer == "adamw" else [])], betas=(o.beta1, o.beta2), eps=o.eps / M)
    ]
    if o.optimizer == "muon":
        optimizers.append(torch.optim.Muon(own, momentum=0.95, adjust_lr_fn="match_rms_adamw"))
    out = []
    for step, figures in jobs.plain_gradients(hf, o.clip_grad, divisor=M):
        out.append(figures)
        lr = learning_rate(step, o, jobs.STEPS)
        for made, divisor in by_lr:
            made["lr"] = lr / divisor
        for optimizer in optimizers:
            optimizer.step()
    return out


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_same_as_plain_torch_with_the_table(optimizer: str) -> None:
    cfg = config(optimizer, jobs.llama(mup_base_width=8))
    with products_in_fp32():
        expected = plain_steps(cfg)
    np.testing.assert_allclose(jobs.train(0, cfg, 1), expected, rtol=1e-5)
    assert not np.allclose(jobs.train(0, config(optimizer, jobs.llama()), 1), expected, rtol=1e-3)


def test_routers_are_read_out(tmp_path: Path) -> None:
    """Experts are matrices of a block; a router's logits are divided like those of the output layer."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": jobs.VOCAB}
    experts = {"num_experts": 4, "moe_topk": 2, "ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.0, "init_std": 0.2}
    model = ModelConfig.from_arch("mixtral", **sizes, **experts, seq_len=jobs.SEQ, mup_base_width=8)
    cfg = config("adamw", model)
    engine = jobs.start(0, cfg, 1)
    checkpointer = Checkpointer(str(tmp_path), engine.ctx)
    checkpointer.save(0, engine.optimizer.states(), {"config": {"model": dataclasses.asdict(model)}})
    checkpointer.close()
    export_hf(tmp_path, tmp_path / "hf")
    hf = load_model(tmp_path / "hf").train()
    # The export holds what training divides by the multiplier.
    readouts = [hf.lm_head, *(module for name, module in hf.named_modules() if name.endswith(".gate"))]
    assert len(readouts) == 3
    for module in readouts:
        module.weight.data *= M
    for router in readouts[1:]:
        router.register_forward_pre_hook(lambda _, inputs: (inputs[0] / M, *inputs[1:]))
    np.testing.assert_allclose(jobs.run_steps(engine, jobs.STEPS), plain_steps(cfg, hf), rtol=1e-5)


def test_initial_values_and_attention() -> None:
    model = jobs.llama(hidden_size=256, head_dim=32, mup_base_width=64, mup_base_head_dim=8)
    assert model.attention_scale == pytest.approx(math.sqrt(8) / 32)
    first, last = ("self_attn.qkv_proj", "mlp.gate_up_proj"), ("self_attn.o_proj", "mlp.down_proj")
    expected = {"embed_tokens": 0.02, "lm_head": 0.02}
    expected |= {f"layers.0.{name}": 0.02 / 2 for name in first}
    expected |= {f"layers.0.{name}": 0.02 / 2 / math.sqrt(8) for name in last}
    specs = param_map(model)
    for name, std in expected.items():
        assert Shard(specs[f"{name}.weight"]).initial(1).std().item() == pytest.approx(std, rel=0.05), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_at_the_base_width_nothing_changes(optimizer: str) -> None:
    same = [jobs.train(0, config(optimizer, jobs.llama(2, **mup)), 1, 3) for mup in ({}, {"mup_base_width": 32})]
    assert same[0] == same[1]


def experts(**options: Any) -> ModelConfig:
    return jobs.llama(init_std=0.2, num_experts=4, moe_topk=2, moe_ffn_size=24, **options)


ROWS: list[tuple[int, str, Any, dict[str, Any], dict[str, Any]]] = [
    (4, "muon", jobs.gpt2, {"tp": 2, "zero": 3, **CUT}, {}),
    (4, "adamw", jobs.llama, {"pp": 2, "zero": 2, **CUT}, {"loss_chunk": 5}),
    (8, "adamw", jobs.gpt2, {"tp": 2, "pp": 2, "schedule": "zb-v", "vp": 2}, {}),
    (8, "muon", jobs.llama, {"tp": 2, "pp": 2}, {"offload": "optimizer"}),
    (4, "muon", experts, {"ep": 2, "tp": 2, "zero": 3, **CUT}, {}),
    (4, "muon", experts, {"ep": 2, "tp": 2, "etp": "1"}, {}),
]


@pytest.mark.parametrize("row", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, len(ROWS)))])
def test_same_in_every_layout(pool: WorkerPool, row: int) -> None:
    world, optimizer, family, layout, train = ROWS[row]
    model = family(mup_base_width=8)
    ranks = pool.run(world, trained, [config(optimizer, model, layout, **train)], world)
    assert_same([rank[0] for rank in ranks], config(optimizer, model), f"row {row}")


@pytest.mark.parametrize(
    ("optimizer", "widths"),
    [
        ("adamw", (64, 128, 256, 512)),
        pytest.param("muon", (64, 128, 256, 512), marks=pytest.mark.full),
    ],
)
def test_coordinates(optimizer: str, widths: tuple[int, ...]) -> None:
    """After four steps, the blocks' activations do not grow with the width; without muP they do."""
    with_mup, without = (
        slopes(by_layer({width: measure(width, optimizer, base) for width in widths})) for base in (64, None)
    )
    blocks = [name for name in with_mup if name.startswith("layers.")]
    assert len(blocks) == 6
    assert max(abs(with_mup[name]) for name in blocks) < 0.15, with_mup
    assert min(without[name] for name in blocks) > 0.7, without


def test_the_published_best_rate_stays() -> None:
    """Within a factor of 2 from width 64 to 512 with muP; without, it falls fourfold."""
    (path,) = (Path(__file__).parents[2] / "benchmarks" / "results").glob("mup_sweep_*.json")
    losses = json.loads(path.read_text())["losses"]
    best = {case: {int(w): best_of(row) for w, row in rows.items()} for case, rows in losses.items()}
    assert list(best["muP"]) == list(best["standard"]) == [64, 128, 256, 512]
    assert {abs(k - best["muP"][64]) <= 1 for k in best["muP"].values()} == {True}
    assert best["standard"][512] <= best["standard"][64] - 2


def best_of(row: dict[str, float]) -> int:
    """Exponent of the rate with the lowest loss."""
    return int(min(row, key=row.__getitem__).removeprefix("2^"))


def test_export_gives_the_same_logits(tmp_path: Path) -> None:
    """transformers computes W x where training computes W x / m."""
    transformers = pytest.importorskip("transformers")
    flags = "--num-layers 2 --hidden-size 32 --num-heads 4 --vocab-size 90 --seq-len 16 --global-batch-size 8 --lr 1e-2"
    arguments = [*flags.split(), "--mock-data", "--device", "cpu", "--mup-base-width", "8", "--train-steps", "2"]
    arguments += ["--eval-every", "2", "--eval-steps", "1", "--run-dir", str(tmp_path / "run")]
    runs.train(0, arguments, 1)
    export_hf(tmp_path / "run", tmp_path / "hf")
    cfg = parse(arguments).config
    assert cfg.model.width_multiplier == M
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").float()
    valid = MockDataset(90, 16, cfg.train.seed + 1)
    tokens = torch.stack([torch.from_numpy(valid.sample(i)) for i in range(8)])
    logits = hf(input_ids=tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (evaluated,) = [line["loss"] for line in map(json.loads, lines) if line.get("event") == "eval"]
    assert loss == pytest.approx(evaluated, rel=1e-5)
