"""The same tiny models built in Hugging Face transformers, with the same weights, trained by plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
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
from megalite.runtime.checkpoint.hf.start import load_hf
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.data import Rows
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.harness import on_ranks
from tests.unit.checkpoint.hf_models import read_all
from tests.workers import WorkerPool

transformers = pytest.importorskip("transformers")


def initial_weights(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """megalite's initial value of every global parameter, whole."""
    return {name: Shard(spec).initial(seed) for name, spec in param_map(model).items()}


def hf_llama(model: ModelConfig, weights: dict[str, torch.Tensor]) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.kv_heads,
        rms_norm_eps=model.norm_eps,
        max_position_embeddings=model.positions,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
    )
    hf = transformers.LlamaForCausalLM(config).float()
    q, kv = model.num_heads * model.head_size, model.kv_heads * model.head_size
    state = {
        "model.embed_tokens.weight": weights["embed_tokens.weight"],
        "model.norm.weight": weights["norm.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    for i in range(model.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        parts = weights[f"{ours}.self_attn.qkv_proj.weight"].split((q, kv, kv))
        for name, part in zip(("q_proj", "k_proj", "v_proj"), parts):
            state[f"{theirs}.self_attn.{name}.weight"] = part
        gate, up = weights[f"{ours}.mlp.gate_up_proj.weight"].chunk(2)
        state[f"{theirs}.mlp.gate_proj.weight"], state[f"{theirs}.mlp.up_proj.weight"] = gate, up
        for name in ("self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"):
            state[f"{theirs}.{name}.weight"] = weights[f"{ours}.{name}.weight"]
    hf.load_state_dict(state, strict=True)
    return hf


def hf_gpt2(model: ModelConfig, weights: dict[str, torch.Tensor]) -> Any:
    config = transformers.GPT2Config(
        vocab_size=model.vocab,
        n_positions=model.positions,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        layer_norm_epsilon=model.norm_eps,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    hf = transformers.GPT2LMHeadModel(config).float()
    names = {
        "ln_1": "input_layernorm",
        "attn.c_attn": "self_attn.qkv_proj",
        "attn.c_proj": "self_attn.o_proj",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    state = {
        "transformer.wte.weight": weights["embed_tokens.weight"],
        "transformer.wpe.weight": weights["embed_positions.weight"],
        "lm_head.weight": weights["embed_tokens.weight"],
        "transformer.ln_f.weight": weights["norm.weight"],
        "transformer.ln_f.bias": weights["norm.bias"],
    }
    for i in range(model.num_layers):
        for theirs, ours in names.items():
            weight = weights[f"layers.{i}.{ours}.weight"]
            # Conv1D holds [in, out].
            state[f"transformer.h.{i}.{theirs}.weight"] = weight.t() if weight.dim() == 2 else weight
            state[f"transformer.h.{i}.{theirs}.bias"] = weights[f"layers.{i}.{ours}.bias"]
    hf.load_state_dict(state, strict=True)
    return hf


def train_plainly(hf: Any, steps: int = jobs.STEPS, **inputs: Any) -> list[tuple[float, float]]:
    """Steps of torch.optim.AdamW on the whole batch at once: (loss, gradient norm before clipping)."""
    cfg = jobs.OPTIM
    # Biases of stacked experts are no matrices.
    decays = {name: p.dim() > 1 and not name.endswith("bias") for name, p in hf.named_parameters()}
    params = {kind: [p for name, p in hf.named_parameters() if decays[name] == kind] for kind in (True, False)}
    groups = [
        {"params": params[True], "weight_decay": cfg.weight_decay},
        {"params": params[False], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps)
    out = []
    for step, figures in jobs.plain_gradients(hf, cfg.clip_grad, steps, **inputs):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg, steps)
        optimizer.step()
        out.append(figures)
    return out


@pytest.fixture(scope="module")
def damped() -> Iterator[None]:
    """An epsilon of AdamW above roundings: a gradient near zero, as of a bias of keys, would be divided by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "OPTIM", replace(jobs.OPTIM, eps=1e-6))
        yield


STARTS = np.array([[0] * 5 + [5] * 4 + [9] * 7, [0] * 2 + [2] * 13 + [15]] * (jobs.BATCH // 2))
"""Where the documents of each sample start."""


def train_packed(rank: int, cfgs: Sequence[Config], world: int) -> list[list[tuple[float, float]]]:
    """By config: (loss, gradient norm) of three steps on samples of several documents."""
    from megalite.core.step import train_step

    out = []
    for cfg in cfgs:
        engine = jobs.start(rank, cfg, world)
        share = jobs.BATCH // engine.ctx.dp.size
        mine = slice(engine.ctx.dp.rank * share, (engine.ctx.dp.rank + 1) * share)
        figures = []
        for step, batch in enumerate(jobs.batches(), 1):
            result = train_step(engine, Rows(batch[mine, :-1], batch[mine, 1:], STARTS[mine]), step)
            figures.append((result.loss, result.grad_norm))
        out.append(figures)
    return out


Expected = tuple[Path, list[tuple[float, float]], dict[str, torch.Tensor]]
"""Folder of a model, and what transformers and torch make of it: figures of every step, last weights."""


def started_from(
    rank: int, cfgs: Sequence[Config], world: int, folder: str, roots: Sequence[str]
) -> list[list[tuple[float, float]]]:
    """By config: figures of every step of a run that starts from a folder; the last weights are saved."""
    out = []
    for cfg, root in zip(cfgs, roots, strict=True):
        engine, steps = jobs.start(rank, cfg, world), cfg.train.train_steps
        load_hf(folder, cfg.model, engine.optimizer.states(), engine.ctx)
        engine.optimizer.finish_load()
        out.append(jobs.run_steps(engine, steps))
        jobs.check_copies(engine)
        checkpointer = Checkpointer(root, engine.ctx)
        checkpointer.save(steps, engine.optimizer.states(), {"config": {"model": asdict(cfg.model)}})
        checkpointer.close()
    return out


def check_follows(pool: WorkerPool, expected: Expected, cfgs: Sequence[Config], world: int, tmp_path: Path) -> None:
    """Train from the model's folder in layouts, one after the other on the same ranks: the figures and last weights."""
    folder, steps, weights = expected
    roots = [tmp_path / str(i) for i in range(len(cfgs))]
    ranks = on_ranks(pool, world, started_from, cfgs, world, str(folder), [str(root) for root in roots])
    for i, (root, cfg) in enumerate(zip(roots, cfgs)):
        what = f"{folder.name} {cfg.parallel}"
        for rank in ranks:
            np.testing.assert_allclose(rank[i], steps, rtol=1e-5, err_msg=what)
        export_hf(root, root / "hf")
        ours = read_all(root / "hf")
        assert ours.keys() == weights.keys()
        for name, theirs in weights.items():
            assert (ours[name] - theirs).abs().max() <= 1e-5 * theirs.abs().max(), f"{what}: {name}"
