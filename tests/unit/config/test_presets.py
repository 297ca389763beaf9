"""Parameter counts of the presets against the published numbers, by two ways of counting."""

from __future__ import annotations

import pytest

from megalite.core.model.flops import flops_per_token
from megalite.core.model.parameters import active_parameters, param_map
from megalite.core.model.partition import block_costs, layer_split
from megalite.core.options.model import ModelConfig
from megalite.core.options.rope import RopeScaling
from megalite.core.parts.families import FAMILIES, PRESETS
from megalite.runtime.options.cli import parse

# Published numbers of trained parameters, which the family files hold beside the shapes: safetensors metadata of the
# models' Hugging Face pages, Pythia's README table, and the model card of GPT-NeoX-20B. Brown et al. 2020, table 2.1,
# publish only a rounded number, "175.0B"; "tiny" is ours.
PUBLISHED = {name: preset.parameters for family in FAMILIES.values() for name, preset in family.presets.items()}
ACTIVE = {n: preset.active for family in FAMILIES.values() for n, preset in family.presets.items() if preset.active}
EXACT = {name: number for name, number in PUBLISHED.items() if isinstance(number, int)}
ROUNDED = {name: number for name, number in PUBLISHED.items() if isinstance(number, float)}
# Families whose blocks `formula` knows; all others are counted against the published number alone.
COUNTED_TWICE = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "opt")


TIED = {"qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"}
TIED |= {"llama-3.2-1b", "llama-3.2-3b"}
# Google publishes the counts of Gemma 3 with the vision model: 416,866,032, and a projection with a norm of 1,152.
WITH_VISION = {"gemma-3-4b": 4_300_079_472, "gemma-3-12b": 12_187_325_040, "gemma-3-27b": 27_432_406_640}


SPARSE = ["--num-layers", "6", "--hidden-size", "64", "--ffn-hidden-size", "256", "--num-experts", "8"]
SPARSE += ["--moe-ffn-size", "32", "--vocab-size", "512", "--seq-len", "64"]


def formula(preset: str, m: ModelConfig) -> int:
    """Parameters from the sizes alone, one closed form per family; knows nothing of the options of `ModelConfig`."""
    arch = m.arch
    h, f, layers, vocab = m.hidden_size, m.ffn_hidden_size, m.num_layers, m.vocab_size
    assert f is not None
    assert vocab is not None
    q, kv = m.num_heads * m.head_size, m.kv_heads * m.head_size
    if arch in ("gpt2", "gpt_neox", "opt"):
        block = (h * 3 * h + 3 * h) + (h * h + h) + (h * f + f) + (f * h + h) + 2 * 2 * h
        positions = {"gpt2": 1024 * (m.seq_len // 1024), "opt": 2048 + 2, "gpt_neox": vocab}[arch]
        embeddings = (vocab + positions) * h
        if preset == "opt-350m":  # embeddings of 512, two projections, and no last norm
            return layers * block + vocab * 512 + positions * h + 2 * 512 * h
        return layers * block + embeddings + 2 * h
    block = h * (q + 2 * kv) + q * h + 3 * h * f + 2 * h
    block += {"qwen2": q + 2 * kv, "qwen3": 2 * m.head_size}.get(arch, 0)
    return layers * block + (1 if preset in TIED else 2) * vocab * h + h


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


# Counts of transformers' own models of the published shapes, made without memory; a token's with `num_experts_per_tok`.
@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("qwen1.5-moe-a2.7b", 14_315_784_192, 2_689_173_504),
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
        ("olmoe-1b-7b", 6_919_161_856, 1_282_017_280),
        ("deepseek-v2-lite", 15_706_484_224, 2_661_150_208),
        ("deepseek-v2", 235_741_434_880, 21_375_800_320),
        ("deepseek-v3", 671_026_404_352, 37_552_282_624),
        ("glm-4.5-air", 106_852_245_504, 13_424_123_904),
        ("glm-4.5", 352_797_814_784, 33_632_251_904),
        ("kimi-k2", 1_026_408_209_408, 32_861_477_888),
        ("gpt-oss-20b", 20_914_757_184, 4_187_440_704),
        ("llama-4-scout", 107_769_861_120, 17_172_894_720),
        ("llama-4-maverick", 400_711_848_960, 17_184_691_200),
        ("gpt-oss-120b", 116_829_156_672, 5_711_982_912),
        ("qwen3-next-80b-a3b", 79_674_391_296, 3_874_929_408),
    ],
)
def test_total_and_active(preset: str, total: int, active: int) -> None:
    m = model(preset)
    assert (count(m), active_parameters(m)) == (EXACT[preset], ACTIVE[preset]) == (total, active)


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


@pytest.mark.parametrize("preset", [p for p in PRESETS if PRESETS[p]["arch"] in COUNTED_TWICE])
def test_two_ways_of_counting_agree(preset: str) -> None:
    m = model(preset)
    assert count(m) == formula(preset, m)


@pytest.mark.parametrize("preset", WITH_VISION)
def test_text_part_of_gemma_3(preset: str) -> None:
    m = model(preset)
    assert count(m) + 416_866_032 + 1152 * m.hidden_size + 1152 == WITH_VISION[preset]


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        # Values that the count does not see, from the models' config.json.
        ("gpt2-124m", {"norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "positions": 1024}),
        ("gpt-neox-20b", {"rotary_dim": 24, "activation": "gelu_tanh", "parallel_residual": True, "norm_eps": 1e-5}),
        ("opt-350m", {"norm_position": "sum", "last_norm": False, "embedding_width": 512, "ffn_size": 4096}),
        ("opt-1.3b", {"position_offset": 2, "activation": "relu", "norm_eps": 1e-5, "positions": 2048}),
        ("bloom-7b1", {"position": "alibi", "key_size": 136, "activation": "gelu_tanh", "embedding_norm": True}),
        ("gpt-neo-2.7b", {"attention_scale": 1.0, "window": 256, "qkv_bias": False, "o_bias": True}),
        ("gpt-j-6b", {"rotary_dim": 64, "norm_position": "shared", "qkv_bias": False, "head_bias": True}),
        ("pythia-160m", {"rotary_dim": 16, "activation": "gelu", "parallel_residual": True}),
        ("llama-2-7b", {"rope_theta": 10000.0, "norm_eps": 1e-5, "kv_heads": 32, "rope_scaling": None}),
        ("llama-3-8b", {"rope_theta": 500000.0, "norm_eps": 1e-5, "kv_heads": 8, "rope_scaling": None}),
        ("mistral-7b", {"rope_theta": 10000.0, "norm_eps": 1e-5, "kv_heads": 8}),
        ("qwen2.5-7b", {"rope_theta": 1e6, "norm_eps": 1e-6, "qkv_bias": True, "o_bias": False}),
        (
            "gemma-2-9b",
            {"rope_theta": 10000.0, "window": 4096, "window_pattern": 2, "attention_softcap": 50.0}
            | {"logit_softcap": 30.0, "query_pre_attn_scalar": 256, "norm_eps": 1e-6, "activation": "geglu_tanh"},
        ),
        (
            "gemma-3-1b",
            {"rope_theta": 1e6, "rope_theta_local": 1e4, "window": 512, "window_pattern": 6, "qk_norm": "head"}
            | {
                "attention_softcap": None,
                "logit_softcap": None,
                "query_pre_attn_scalar": 256,
                "scale_embeddings": True,
            },
        ),
        (
            "gemma-3-27b",
            {"rope_theta": 1e6, "rope_theta_local": 1e4, "rope_linear_factor": 8.0, "window": 1024}
            | {"query_pre_attn_scalar": 168, "head_size": 128, "positions": 131072},
        ),
        ("qwen3-8b", {"rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": "head", "qkv_bias": False}),
        *(
            (
                name,
                {"positions": 262144, "qk_norm": qk_norm, "no_rope_freq": 4, "attention_chunk_size": 8192}
                | {"rope_scaling": RopeScaling(factor=16.0, high_freq_factor=1.0) if name.endswith("scout") else None},
            )
            for name, qk_norm in (("llama-4-scout", "l2"), ("llama-4-maverick", "none"))
        ),
        (
            "qwen3-next-80b-a3b",
            {"positions": 262144, "rope_theta": 1e7, "rope_fraction": 0.25, "linear_attention_freq": 4},
        ),
    ],
)
def test_values_that_the_count_does_not_see(preset: str, expected: dict[str, object]) -> None:
    m = model(preset)
    assert {name: getattr(m, name) for name in expected} == expected


@pytest.mark.parametrize(("preset", "factor"), [("llama-3.1-8b", 8.0), ("llama-3.1-405b", 8.0), ("llama-3.2-3b", 32.0)])
def test_llama3_rope_scaling(preset: str, factor: float) -> None:
    scaling = model(preset).rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == (factor, 1.0, 4.0)
    assert scaling.original_max_position_embeddings == 8192
    assert model(preset).positions == 131072
