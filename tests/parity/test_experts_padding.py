"""Routers count the tokens that are not padding, whatever the targets weigh: transformers with its attention mask, and
one process in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.options.model import ModelConfig
from megalite.runtime.checkpoint.hf.start import hf_model_config, load_hf
from megalite.runtime.data import Rows
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.features import Feature
from tests.parity.harness import biases_of, boxes_of, one_process, put_together, ranks_of, scaled
from tests.parity.models import BIASED, MIXTRAL, QWEN
from tests.unit.checkpoint.hf_models import make_model

transformers = pytest.importorskip("transformers")

COEFF, SEQ, BATCH, VOCAB = 0.02, 64, 8, 90
ROUTER = "layers.0.mlp.router.weight"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Mixtral of one layer: the balance losses of two layers would be another thing in transformers."""
    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.2}
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=SEQ, pad_token_id=None, **sizes, **experts
    )
    model = transformers.MixtralForCausalLM._from_config(config, attn_implementation="eager")
    model.save_pretrained(folder)
    return folder, model


def conversations(lengths: Sequence[int], length: int = SEQ) -> np.ndarray:
    """Samples [n, length] of so many tokens, and -1."""
    tokens = (np.random.default_rng(6).random((len(lengths), length)) ** 3 * VOCAB).astype(np.int64)
    return np.where(np.arange(length) < np.array(lengths)[:, None], tokens, -1)


def rows_of(tokens: np.ndarray, every: int = 1, per_sample: bool = False) -> Rows:
    """Samples whose last token has nothing to predict; of the targets one in `every` is learned."""
    rows = Rows.of(np.append(tokens, np.full((len(tokens), 1), -1), 1))
    targets = np.where(np.arange(tokens.shape[1]) % every == 0, rows.targets, -1)
    weights = np.ones(targets.shape, np.float32) / (targets >= 0).sum(1, keepdims=True) if per_sample else None
    return replace(rows, targets=targets, weights=weights)


def router_gradients(folder: Path, rows: Rows, **coeffs: Any) -> tuple[np.ndarray, Any]:
    """The gradient of the router, with some coefficients minus without; figures of the first."""
    from megalite.core.step import train_step

    out, figures = [], []
    model = replace(hf_model_config(folder), seq_len=SEQ, moe_router_load_balancing_type="aux_loss")
    for options in (coeffs, dict.fromkeys(coeffs, 0.0)):
        cfg = jobs.make_config(replace(model, **options), micro_batch_size=BATCH)
        cfg = replace(cfg, optim=replace(cfg.optim, clip_grad=0.0))
        engine = jobs.start(0, cfg, 1)
        load_hf(folder, cfg.model, engine.optimizer.states(), engine.ctx)
        engine.optimizer.finish_load()
        figures.append(train_step(engine, rows, 1).figures["routing"])
        out.append(put_together([boxes_of(engine)])[ROUTER] / (1 - cfg.optim.beta1))
    return out[0] - out[1], figures[0]


def of_transformers(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Of the router its gradient by the balance loss and by the z-loss, each times COEFF; both losses."""
    ids, mask = torch.from_numpy(tokens).clamp(min=0), torch.from_numpy(tokens >= 0)
    out = model(ids, attention_mask=mask.long(), output_router_logits=True)
    z = out.router_logits[0].logsumexp(-1)[mask.flatten()].square().mean()
    gate = model.model.layers[0].mlp.gate.weight
    balance, of_z = (torch.autograd.grad(COEFF * loss, gate, retain_graph=True)[0] for loss in (out.aux_loss, z))
    return balance.numpy(), of_z.numpy(), out.aux_loss.item(), z.item()


# Tokens of each sample, one in how many is learned, whether each sample weighs 1. Behind each, how far off the gradient
# is where it is divided by the weight of the targets and padding counts: ratio, and cosine.
CASES: dict[str, tuple[Sequence[int], int, bool]] = {
    "all learned": ([64] * 8, 1, False),  # 1.016, 1.000
    "1 in 8 learned": ([64] * 8, 8, False),  # 8.0, 1.000
    "per sample": ([64] * 8, 1, True),  # 64.0, 1.000
    "1 in 8 learned, per sample": ([64] * 8, 8, True),  # 64.0, 1.000
    "half padding": ([32] * 8, 1, False),  # 7.1, 0.877
    "mostly padding": ([16] * 8, 1, False),  # 23.7, 0.787
    "padding, 1 in 8 learned, per sample": ([64, 32, 16, 40, 9, 64, 23, 50], 8, True),  # 182, 0.835
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_the_balance_is_that_of_transformers(mixtral: tuple[Path, Any], case: str) -> None:
    lengths, every, per_sample = CASES[case]
    folder, model = mixtral
    tokens = conversations(lengths)
    rows = rows_of(tokens, every, per_sample)
    balance, of_z, aux_loss, z_loss = of_transformers(model, tokens)
    got, figures = router_gradients(folder, rows, moe_aux_loss_coeff=2 * COEFF)
    np.testing.assert_allclose(got, balance, rtol=1e-3, atol=1e-4 * np.abs(balance).max())
    assert figures.tokens.sum() == 2 * sum(lengths)
    assert figures.record()["aux_loss"] == pytest.approx(aux_loss / 2, rel=1e-5)
    assert figures.record()["z_loss"] == pytest.approx(z_loss, rel=1e-5)
    got, _ = router_gradients(folder, rows, moe_z_loss_coeff=COEFF)
    np.testing.assert_allclose(got, of_z, rtol=1e-3, atol=1e-4 * np.abs(of_z).max())


def test_biases_move_by_the_tokens_that_are_not_padding(tmp_path: Path) -> None:
    """DeepSeek-V3's, by the choices of transformers' routers; with padding some move the other way."""
    from megalite.core.step import train_step

    hf = make_model("deepseek_v3", tmp_path)
    tokens = conversations([9, 3, 4, 2, 2, 1, 6, 3], jobs.SEQ)
    chosen: list[torch.Tensor] = []
    for gate in (module for name, module in hf.named_modules() if name.endswith(".gate")):
        # Choices that depend on the token.
        gate.weight.data *= 5
        gate.e_score_correction_bias.zero_()
        gate.register_forward_hook(lambda *args: chosen.append(args[-1][2]))
    hf.save_pretrained(tmp_path)
    hf(torch.from_numpy(tokens).clamp(min=0), attention_mask=torch.from_numpy(tokens >= 0).long())
    mask = torch.from_numpy(tokens >= 0).flatten()
    counts, with_padding = ([ids[of].flatten().bincount(minlength=8) for ids in chosen] for of in (mask, mask | True))
    moves, others = (
        torch.stack([(count.double().mean() - count).sign() for count in held]) for held in (counts, with_padding)
    )
    assert (moves != others).sum() >= 3

    model = replace(hf_model_config(tmp_path), seq_len=jobs.SEQ)
    engine = jobs.start(0, jobs.make_config(model, micro_batch_size=2), 1)
    load_hf(tmp_path, model, engine.optimizer.states(), engine.ctx)
    engine.optimizer.finish_load()
    before = biases_of(engine)
    figures = train_step(engine, rows_of(tokens), 1).figures["routing"]
    assert figures is not None
    assert torch.equal(figures.tokens, torch.stack(counts).double())
    got = np.stack([bias - before[name] for name, bias in biases_of(engine).items()])
    np.testing.assert_allclose(got, model.moe_router_bias_update_rate * moves.numpy(), atol=1e-7)


# ---------------------------------------------------------------------------------------------------------- layouts

# The module of further tokens has a router of its own.
FURTHER = replace(BIASED, mtp_num_layers=1)
# Tokens of the documents of each sample: full, with padding, or nothing else.
LENGTHS = ((16,), (5, 9), (), (7,), (3, 4, 2), (1,), (12, 4), (6,))


def padded(step: int = 1) -> Rows:
    """Documents behind each other and padding, some targets not learned, the others with weights of their own."""
    rng, shape = np.random.default_rng(3 + step), (jobs.BATCH, jobs.SEQ)
    inputs, starts = rng.integers(0, jobs.VOCAB, shape), np.zeros(shape, np.int64)
    weights = rng.choice([0.0, 0.01, 0.5], shape).astype(np.float32)
    padding = np.arange(jobs.SEQ) >= np.array([[sum(lengths)] for lengths in LENGTHS])
    for i, lengths in enumerate(LENGTHS):
        for at in np.cumsum([0, *lengths])[: len(lengths) + 1]:
            starts[i, at:] = at
    targets = np.where(padding | (weights == 0), -1, rng.integers(0, jobs.VOCAB, shape))
    return Rows(np.where(padding, 0, inputs), targets, starts, weights, padding)


PADDED = {"data": padded}


class TestPadding(Feature):
    strong = {
        ranks_of(4, ep=2, tp=2): [
            (MIXTRAL, 1, {}, PADDED | {"recompute": "full"}),
            (BIASED, 3, {"sequence_parallel": False}, PADDED),
        ],
        ranks_of(4, ep=2, pp=2): [(FURTHER, 1, {"schedule": "zb-v", "vp": 2}, PADDED)],
        ranks_of(4, ep=4, cp=2): [(QWEN, 1, {}, PADDED)],
    }
    grid = {
        ranks_of(2): [(MIXTRAL, 0, {}, PADDED | {"loss_chunk": 5})],
        # A rank has padding alone.
        ranks_of(8, ep=4): [(BIASED, 3, {}, PADDED | {"recompute": "selective"})],
        ranks_of(4, ep=4, tp=2, etp="1"): [(FURTHER, 3, {}, PADDED | {"recompute": "full"})],
        ranks_of(4, cp=4): [(FURTHER, 1, {"cp_comm": "ring"}, PADDED)],
        ranks_of(8, ep=2, tp=2, pp=2): [(FURTHER, 1, {"schedule": "interleaved", "vp": 2}, PADDED)],
        ranks_of(8, ep=2, cp=2, tp=2): [(FURTHER, 1, {}, PADDED)],
    }
    planted = {
        "weights of the first shard": (ranks_of(2, tp=2), (MIXTRAL, 1, {}, PADDED)),
        "means over a rank's tokens": (ranks_of(2), (MIXTRAL, 1, {}, PADDED)),
    }

    @staticmethod
    def mistakes(rank: int, cfg: Config) -> dict[str, tuple[Any, str, Any]]:
        from megalite.core import step
        from megalite.core.parts.ffn.experts.routing import Router

        init = Router.__init__

        def first_shard(self: Router, *args: Any) -> None:
            init(self, *args)
            self.shard = 0

        def of_this_rank(engine: Any, rows: Rows) -> Any:
            return torch.tensor(rows.total_weight() / rows.num_tokens()), []

        return {
            "weights of the first shard": (Router, "__init__", first_shard),
            "means over a rank's tokens": (step, "weigh_parts", of_this_rank),
        }


def test_modules_count_what_lies_in_the_document() -> None:
    """Places of 16, 5 + 9, 7, 3 + 4 + 2, 1, 12 + 4 and 6 tokens; one further on, each document has one less."""
    tokens, *_ = one_process(scaled(jobs.make_config(FURTHER)), padded).tokens
    assert tokens.sum(1).tolist() == [3 * 69] * (len(tokens) - 1) + [3 * (69 - 11)]


@pytest.mark.parametrize("model", [MIXTRAL, FURTHER], ids=["mixtral", "further"])
def test_passes_without_a_token_add_nothing(model: ModelConfig) -> None:
    """Gradients of 0, and no NaN: with padding alone, and with tokens of which none is learned."""
    from megalite.core.step import forward_backward, train_step

    engine = jobs.start(0, jobs.make_config(model), 1)
    rows = padded()
    nothing = replace(rows, targets=np.full_like(rows.targets, -1))
    for batch in (nothing, replace(nothing, padding=np.ones_like(rows.padding))):
        forward_backward(engine, batch, 1, 0.0)
        assert engine.optimizer.finish_grads().item() == 0.0
        result = train_step(engine, batch, 1)
        assert result.skipped
