"""Multi-token prediction: loss, gradient norm and every gradient are those of plain torch, in one process and in every
layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import megalite
from megalite.core.model.parameters import param_map
from megalite.core.options.model import ModelConfig
from megalite.core.options.train import TrainConfig
from megalite.core.sharding import Shard
from megalite.runtime.data import Rows
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.features import Feature
from tests.parity.harness import assert_same_gradients, fixed, one_process, ranks_of
from tests.parity.models import TWO_AHEAD as TWO
from tests.parity.models import dropped
from tests.parity.packed import Document, weighted, weighted_documents
from tests.workers import WorkerPool

FACTOR = TrainConfig.mtp_loss_scaling_factor
# Weights so large that every token feels what it sees.
ONE = jobs.llama(mtp_num_layers=1, init_std=0.1)
TIED = jobs.llama(mtp_num_layers=2, init_std=0.1, tie_embeddings=True)
SPARSE = jobs.llama(
    mtp_num_layers=1,
    init_std=0.1,
    num_experts=4,
    moe_ffn_size=24,
    moe_dense_layers=(0,),
    moe_aux_loss_coeff=0.02,
    moe_router_load_balancing_type="seq_aux_loss",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
LATENT = jobs.llama(
    mtp_num_layers=1,
    init_std=0.1,
    num_kv_heads=8,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
)
MUP = jobs.llama(mtp_num_layers=1, init_std=0.1, mup_base_width=16)

# ------------------------------------------------------------------------------------------------------ plain torch


def plain() -> list[list[Document]]:
    return [[(tokens, np.ones(jobs.SEQ))] for tokens in jobs.batches(1)[0]]


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate x [heads, tokens, size], halves together."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x.split(half, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def block(p: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """A Llama block over one document, x [tokens, 32]: 8 heads of 4, 4 of them for keys and values."""
    q, k, v = (rms(x, p[f"{name}.input_layernorm.weight"]) @ p[f"{name}.self_attn.qkv_proj.weight"].T).split(
        (32, 16, 16), dim=-1
    )
    q, k, v = (y.unflatten(-1, (-1, 4)).transpose(0, 1) for y in (q, k, v))
    k, v = rotated(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = rotated(q) @ k.mT / 2
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ p[f"{name}.self_attn.o_proj.weight"].T
    up = rms(x, p[f"{name}.post_attention_layernorm.weight"]) @ p[f"{name}.mlp.gate_up_proj.weight"].T
    gate, up = up.chunk(2, dim=-1)
    return x + (F.silu(gate) * up) @ p[f"{name}.mlp.down_proj.weight"].T


def by_hand(cfg: ModelConfig, samples: list[list[Document]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """([loss, loss of each module, gradient norm], gradients) of initial weights, one document at a time.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2, equations 21 to 25.
    """
    p = {name: Shard(spec).initial(1234).double().requires_grad_() for name, spec in param_map(cfg).items()}
    embedding, head = p["embed_tokens.weight"], p["embed_tokens.weight" if cfg.tie_embeddings else "lm_head.weight"]
    depth, layers = cfg.mtp_num_layers, cfg.num_layers
    sums, counts = torch.zeros(depth + 1, dtype=torch.float64), torch.zeros(depth + 1, dtype=torch.float64)
    for tokens, target_weights in (document for docs in samples for document in docs):
        t, w = torch.from_numpy(tokens), torch.from_numpy(target_weights)
        x = embedding[t[:-1]]
        for i in range(layers):
            x = block(p, f"layers.{i}", x)
        h = rms(x, p["norm.weight"])
        for k in range(depth + 1):
            if k:
                # The representation of token i, and the embedding of token i + k.
                name, e = f"layers.{layers + k - 1}", embedding[t[k:-1]]
                joined = (rms(e, p[f"{name}.enorm.weight"]), rms(h[: len(e)], p[f"{name}.hnorm.weight"]))
                x = block(p, name, torch.cat(joined, dim=-1) @ p[f"{name}.eh_proj.weight"].T)
                h = rms(x, p[f"{name}.norm.weight"])
            if len(h) == 0:
                break
            losses = F.cross_entropy(h @ head.T, t[k + 1 :], reduction="none")
            sums[k] = sums[k] + (losses * w[k:]).sum()
            counts[k] += w[k:].sum()
    means = sums / counts
    (means[0] + FACTOR * means[1:].mean()).backward()
    grads = {name: x.grad for name, x in p.items() if param_map(cfg)[name].tied_to is None and x.grad is not None}
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt().item()
    return [*means.tolist(), norm], grads


# ---------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("packs", [False, True], ids=["samples", "documents"])
@pytest.mark.parametrize("model", [ONE, TWO, TIED], ids=["one", "two", "tied"])
def test_one_process_is_plain_torch(model: ModelConfig, packs: bool) -> None:
    cfg = jobs.make_config(model)
    result = one_process(cfg, weighted if packs else fixed)
    by_torch, expected = by_hand(model, weighted_documents() if packs else plain())
    (loss, norm), (mean, *each) = result.steps[0], result.reported[0].values()
    further = each or [mean]
    np.testing.assert_allclose([loss, *further, norm], by_torch, rtol=1e-5)
    assert mean == pytest.approx(sum(further) / len(further))
    number = (1 - cfg.optim.beta1) * min(1.0, cfg.optim.clip_grad / (by_torch[-1] + 1e-6))
    gradients = {name: grad.numpy() * number for name, grad in expected.items()}
    assert_same_gradients([result.gradients], gradients, "by hand")


PACKED = {"data": weighted}


class TestMultiToken(Feature):
    strong = {
        ranks_of(4, tp=2, pp=2): [
            (TWO, 1, {"schedule": "zb-h1"}, PACKED),
            (TIED, 1, {}, PACKED | {"recompute": "full"}),
        ],
        ranks_of(4, cp=2, ep=2): [(SPARSE, 3, {}, {"recompute": "selective"})],
    }
    grid = {
        ranks_of(2): [
            (TWO, 0, {}, PACKED),
            (TWO, 2, {"zero_reduce": "step"}, PACKED | {"loss_chunk": 5}),
            (TIED, 3, {"zero_keep": "backward"}, PACKED | {"recompute": "selective"}),
            (TWO, 3, {"zero_keep": "step"}, PACKED | {"offload": "optimizer+params"}),
            (ONE, 1, {}, {"offload": "activations", "recompute": "full"}),
        ],
        ranks_of(2, tp=2): [
            (TIED, 1, {"sequence_parallel": False}, PACKED | {"recompute": "full", "loss_chunk": 5}),
            (LATENT, 1, {}, PACKED),
            (ONE, 1, {"overlap_tp_reduce": False, "tp_chunks": 2}, {}),
            (MUP, 1, {}, {}),
        ],
        ranks_of(2, pp=2): [
            (TWO, 1, {"schedule": "gpipe"}, PACKED),
            (TWO, 1, {"schedule": "naive"}, PACKED),
            (TWO, 1, {"schedule": "1f1b"}, PACKED | {"loss_chunk": 5}),
            (TIED, 1, {"schedule": "zb-v", "vp": 2}, PACKED | {"recompute": "selective"}),
            (TWO, 3, {"schedule": "zb-v", "vp": 2}, PACKED),
            (
                TWO,
                1,
                {"schedule": "interleaved", "vp": 2, "pipeline_layout": "0,3,1,0"},
                PACKED | {"recompute": "full"},
            ),
            (SPARSE, 1, {"schedule": "zb-h1"}, {}),
        ],
        ranks_of(4, pp=2): [(TIED, 3, {"schedule": "zb-h1"}, PACKED)],
        ranks_of(2, cp=2): [(LATENT, 1, {}, {}), (ONE, 1, {"cp_comm": "ring"}, PACKED)],
        ranks_of(4, cp=4): [(TWO, 3, {}, {"recompute": "full"})],
        ranks_of(4, ep=2, tp=2): [(SPARSE, 3, {}, {"recompute": "full"})],
        ranks_of(8, tp=2, pp=2, cp=2): [(TWO, 1, {"schedule": "interleaved", "vp": 2}, {})],
    }
    recomputed = {ranks_of(1): [(dropped(TWO), 1, {}, {})]}
    planted = {
        "no mask at the ends of documents": (ranks_of(1), (TWO, 1, {}, PACKED)),
        "tokens not moved": (ranks_of(1), (TWO, 1, {}, PACKED)),
        "targets moved too far": (ranks_of(1), (TWO, 1, {}, PACKED)),
        "divided by the number of main targets": (ranks_of(1), (TWO, 1, {}, PACKED)),
        "gradient of the embedding's copy lost": (ranks_of(2, pp=2), (TWO, 1, {}, PACKED)),
    }
    rounded = [(TWO, precision, [{"tp": 2, "pp": 2}, {"cp": 2, "zero": 3}]) for precision in ("bf16", "fp16")]
    compiled = [(ranks_of(1), (jobs.llama(1, mtp_num_layers=1, init_std=0.1), 1, {}, {}))]
    kinds_of_blocks = 2
    refused = [(jobs.llama, {"mtp_num_layers": 2, "seq_len": 2}, {}, "must be at least 0 and below 2")]

    @staticmethod
    def mistakes(rank: int, cfg: Config) -> dict[str, tuple[Any, str, Any]]:
        from megalite.core import build, step

        ahead, layout_of, weigh_parts = Rows.ahead, build.layout_of, step.weigh_parts

        def of_main_targets(engine: Any, rows: Rows) -> Any:
            router_weight, parts = weigh_parts(engine, rows)
            return router_weight, [part._replace(weight=torch.tensor(FACTOR / len(parts))) for part in parts]

        def too_far(rows: Rows, n: int) -> Rows:
            return replace(ahead(rows, n + 1), inputs=ahead(rows, n).inputs)

        def copies_apart(*args: Any) -> Any:
            return replace(layout_of(*args), tied=frozenset())

        return {
            "no mask at the ends of documents": (Rows, "ahead", lambda rows, n: ahead(replace(rows, starts=None), n)),
            "tokens not moved": (Rows, "ahead", lambda rows, n: replace(ahead(rows, n), inputs=rows.inputs)),
            "targets moved too far": (Rows, "ahead", too_far),
            "divided by the number of main targets": (step, "weigh_parts", of_main_targets),
            "gradient of the embedding's copy lost": (build, "layout_of", copies_apart),
        }


def with_muon(cfg: Config) -> Config:
    return replace(cfg, optim=replace(cfg.optim, optimizer="muon", muon_ns="fp32", lr=1e-3))


def three_steps(rank: int, cfgs: Sequence[Config], world: int) -> list[list[tuple[float, ...]]]:
    """By config: (loss, losses of further tokens, gradient norm) of three steps."""
    from megalite.core.step import train_step

    out = []
    for engine in jobs.engines(cfgs, world):
        size = jobs.BATCH // engine.ctx.dp.size
        mine = slice(engine.ctx.dp.rank * size, (engine.ctx.dp.rank + 1) * size)
        results = [train_step(engine, batch[mine], step) for step, batch in enumerate(jobs.batches(3), 1)]
        out.append([(result.loss, *result.figures["mtp"], result.grad_norm) for result in results])
        engine.optimizer.wait_weights()
    return out


@pytest.mark.full
def test_muon(pool: WorkerPool) -> None:
    """Whole matrices and norms of weights, where a copy of the embedding takes the update of the first."""
    for model in (replace(model, num_layers=2) for model in (TWO, TIED)):
        (want,) = three_steps(0, [with_muon(jobs.make_config(model))], 1)
        zb = {"tp": 2, "pp": 2, "schedule": "zb-h1"}
        pairs: list[list[dict[str, Any]]] = [[{"zero": 2}, {"zero": 1}], [{"tp": 2, "pp": 2}, zb]]
        for layouts in pairs:
            cfgs = [with_muon(jobs.make_config(model, layout)) for layout in layouts]
            for rank in pool.run(4, three_steps, cfgs, 4):
                for got, layout in zip(rank, layouts, strict=True):
                    np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=f"{layout}")


@pytest.mark.full
def test_compressed_gradients(pool: WorkerPool) -> None:
    """The first step's losses are those of whole gradients, and later ones are near."""
    names = ("none", "int8", "powersgd:16")
    cfgs = [jobs.make_config(TWO, {"pp": 2}, compress=name) for name in names]
    for want, *others in pool.run(4, three_steps, cfgs, 4):
        for got in others:
            np.testing.assert_allclose(got[0][:-1], want[0][:-1], rtol=1e-6)
            np.testing.assert_allclose(np.array(got)[:, :-1], np.array(want)[:, :-1], rtol=1e-3)


def test_a_line_has_the_loss_of_each_module(tmp_path: Path) -> None:
    for depth in (1, 2):
        sizes = {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "ffn_hidden_size": 48, "vocab_size": 64}
        cfg = megalite.configure(
            **sizes,
            mtp_num_layers=depth,
            seq_len=16,
            train_steps=1,
            mock_data=True,
            device="cpu",
            run_dir=str(tmp_path / str(depth)),
        )
        with megalite.start(cfg) as run:
            (record,) = megalite.steps(run)
        own = [record[name] for name in ("mtp_loss_1", "mtp_loss_2") if name in record]
        assert len(own) == (depth if depth > 1 else 0)
        assert depth == 1 or record["mtp_loss"] == pytest.approx(sum(own) / 2)


def test_scripts_give_the_factor_whatever_the_number_is() -> None:
    assert jobs.make_config(jobs.llama(), mtp_loss_scaling_factor=0.3).model.mtp_num_layers == 0


def test_modules_stay_in_bf16() -> None:
    from megalite.core.parts.quant.fp8_products import Fp8Products
    from megalite.core.tensor_parallel.linear import ParallelLinear

    engine = jobs.start(0, jobs.make_config(ONE, precision="bf16", fp8="tensorwise", fp8_emulate=True), 1)
    layers = {name: m for name, m in engine.stages[0].layers.named_modules() if isinstance(m, ParallelLinear)}
    assert {isinstance(m.products, Fp8Products) for name, m in layers.items() if name.startswith("3.")} == {True}
    assert {isinstance(m.products, Fp8Products) for name, m in layers.items() if name.startswith("4.")} == {False}
    assert "4.eh_proj" in layers
    assert all(np.isfinite(jobs.run_steps(engine, 1)[0]))
