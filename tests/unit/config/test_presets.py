"""Parameter counts of the presets against the published numbers."""

from __future__ import annotations

import pytest

from megalite.core.model.flops import flops_per_token
from megalite.core.model.parameters import active_parameters, param_map
from megalite.core.model.partition import block_costs, layer_split
from megalite.core.options.model import ModelConfig
from megalite.core.parts.families import FAMILIES, PRESETS
from megalite.runtime.options.cli import parse

# Published numbers of trained parameters, which the family files hold beside the shapes: safetensors metadata of the
# models' Hugging Face pages, Pythia's README table, and the model card of GPT-NeoX-20B. Brown et al. 2020, table 2.1,
# publish only a rounded number, "175.0B"; "tiny" is ours.
PUBLISHED = {name: preset.parameters for family in FAMILIES.values() for name, preset in family.presets.items()}
ACTIVE = {n: preset.active for family in FAMILIES.values() for n, preset in family.presets.items() if preset.active}
EXACT = {name: number for name, number in PUBLISHED.items() if isinstance(number, int)}
ROUNDED = {name: number for name, number in PUBLISHED.items() if isinstance(number, float)}
# Google publishes the counts of Gemma 3 with the vision model: 416,866,032, and a projection with a norm of 1,152.
WITH_VISION = {"gemma-3-4b": 4_300_079_472, "gemma-3-12b": 12_187_325_040, "gemma-3-27b": 27_432_406_640}


SPARSE = ["--num-layers", "6", "--hidden-size", "64", "--ffn-hidden-size", "256", "--num-experts", "8"]
SPARSE += ["--moe-ffn-size", "32", "--vocab-size", "512", "--seq-len", "64"]


def model(preset: str) -> ModelConfig:
    return parse(["--preset", preset]).config.model


def count(m: ModelConfig) -> int:
    return sum(spec.numel for spec in param_map(m).values() if spec.tied_to is None)


def test_presets_are_those_of_the_families() -> None:
    """A published model has its number; None is for a shape of our own."""
    assert set(PRESETS) == set(PUBLISHED)
    assert {"gpt2-124m", "llama-3-8b"} <= set(EXACT)


@pytest.mark.parametrize("preset", EXACT)
def test_published_count(preset: str) -> None:
    assert count(model(preset)) == EXACT[preset]


LOOKED_UP = ("embed_tokens.", "embed_positions.")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_token_meets_and_multiplies_the_same_parameters(preset: str) -> None:
    """FLOPs of products are 6 for each parameter of a matrix that a token meets, the embedding apart."""
    m = model(preset)
    assert active_parameters(m) == ACTIVE.get(preset, count(m))
    apart = sum(s.numel for s in param_map(m).values() if len(s.shape) == 1 or s.name.startswith(LOOKED_UP))
    of_experts = sum(s.numel for s in param_map(m).values() if ".experts." in s.name and not s.matrix)
    apart += of_experts * m.moe_topk // (m.num_experts or 1)
    tied = m.vocab * m.embedding_width if m.tie_embeddings else 0
    flops = flops_per_token(m)
    assert flops.matrices + flops.head == 6 * (active_parameters(m) - apart + tied)


@pytest.mark.parametrize(("preset", "counts"), [("qwen3-30b-a3b", [7, 7, 7, 7, 6, 6, 6, 2]), ("mixtral-8x7b", [4] * 8)])
def test_stages_by_active_work(preset: str, counts: list[int]) -> None:
    """By all its parameters, a layer of experts would outweigh the output layer by far."""
    m = model(preset)
    costs, head = block_costs(m)
    stages = layer_split(m, 8)
    assert [len(s) for s in stages] == counts
    work = [sum(costs[i] for i in s) + head * (s is stages[-1]) for s in stages]
    assert max(work) - min(work) <= max(costs)


def test_dense_layers_between_weigh_what_they_compute() -> None:
    m = parse([*SPARSE, "--moe-dense-layers", "0", "1"]).config.model
    h, dense, experts = 64, 3 * 64 * 256, 3 * 2 * 64 * 32 + 8 * 64
    attention = 4 * h * h + h * 64  # the products of a causal mask: half of 2 x 64 positions
    costs, _ = block_costs(m)
    assert costs == (1.0, 1.0, *[(attention + experts) / (attention + dense)] * 4)
    assert [len(s) for s in layer_split(m, 2)] == [2, 4]


@pytest.mark.parametrize("preset", ROUNDED)
def test_rounded_count(preset: str) -> None:
    assert count(model(preset)) == pytest.approx(ROUNDED[preset], rel=0.003)


@pytest.mark.parametrize("preset", WITH_VISION)
def test_text_part_of_gemma_3(preset: str) -> None:
    m = model(preset)
    assert count(m) + 416_866_032 + 1152 * m.hidden_size + 1152 == WITH_VISION[preset]
