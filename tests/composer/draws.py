"""A draw: a model, its data, the options of its training, and a layout, as options of the command line."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megalite.core.options.parallel import ParallelConfig
from megalite.runtime.options.fields import TYPES

# What the composer itself reads; every other key is an option of pretrain_gpt.py.
OWN_KEYS = ("dp", "data", "resume", "export")
LAYOUT_KEYS = ("dp", *(f.name for f in dataclasses.fields(ParallelConfig) if f.name != "device"))

Draw = dict[str, Any]
"""Options by name, with underscores. `dp` gives the number of ranks with the sizes of the other axes; `data` is mock,
files, blend, chats, or "own" with some of the words documents, masks, padding and weights; `resume` is another layout,
which continues from step 2; `export` writes the trained weights as a Hugging Face folder and reads them back."""

BASE: Draw = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": 97,
    "seq_len": 16,
    # Weights so large that every part is felt.
    "init_std": 0.1,
    "train_steps": 3,
    "global_batch_size": 4,
    "lr": 1e-3,
    "lr_decay": "constant",
    "muon_ns": "fp32",
    "save_every": 2,
    "device": "cpu",
    "eval_steps": 2,
    # One takes a process for each rank.
    "watchdog_timeout": 0,
}
EXPERTS: Draw = {"num_experts": 8, "moe_topk": 2, "moe_ffn_size": 24}
LATENTS: Draw = {"kv_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
# A large epsilon: where query and key are nearly orthogonal, a norm magnifies the roundings of values near 0.
DELTA_NETS: Draw = {
    "linear_attention_freq": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "norm_eps": 0.1,
}
TEMPERATURE: Draw = {"attention_temperature": 0.5, "attention_temperature_floor": 4}
# Sizes of tiny models of families whose own are large.
FAMILY_SIZES: dict[str, Draw] = {
    "deepseek_v2": {**EXPERTS, **LATENTS, "moe_shared_ffn_size": 16},
    "deepseek_v3": {**EXPERTS, **LATENTS, "moe_shared_ffn_size": 16, "q_lora_rank": 12},
    "gemma2": {"window": 5, "attention_softcap": 2.0, "logit_softcap": 1.5, "query_pre_attn_scalar": 6},
    "gemma3_text": {"window": 5, "window_pattern": 2, "rope_theta_local": 100.0},
    "glm4_moe": {**EXPERTS, "moe_shared_ffn_size": 16},
    "gpt_neo": {"window": 5},
    "gpt_oss": {**EXPERTS, "window": 5},
    "llama4_text": {
        **EXPERTS,
        "moe_topk": 1,
        "moe_shared_ffn_size": 16,
        "attention_chunk_size": 5,
        "no_rope_freq": 2,
        **TEMPERATURE,
    },
    "mixtral": EXPERTS,
    "olmoe": {**EXPERTS, "moe_topk": 3},
    "qwen2_moe": {**EXPERTS, "moe_shared_ffn_size": 16},
    "qwen3_moe": {**EXPERTS, "moe_topk": 3},
    "qwen3_next": {**EXPERTS, **DELTA_NETS, "moe_shared_ffn_size": 16, "rope_fraction": 0.5},
}
FAMILY_NAMES = (
    *("bloom", "deepseek_v2", "deepseek_v3", "gemma2", "gemma3_text", "glm4_moe", "gpt2", "gpt_neo", "gptj"),
    *(
        "gpt_neox",
        "gpt_oss",
        "llama4_text",
        "mistral",
        "mixtral",
        "olmo2",
        "olmoe",
        "opt",
        "phi3",
        "qwen2",
        "qwen2_moe",
    ),
    *("qwen3", "qwen3_moe", "qwen3_next"),
)
NOT_FURTHER = ("bloom", "gpt2", "gpt_neo", "opt")
"""Families whose embeddings are more than a lookup: no module predicts a further token."""
RATES = {"sgd": 0.05, "lars": 1.0, "lion": 1e-4, "muon": 5e-3}


def read(text: str) -> Draw:
    """Read a draw as it is printed."""
    draw = ast.literal_eval(text)
    assert isinstance(draw, dict), "a draw is a dict"
    unknown = [key for key in draw if key not in (*OWN_KEYS, *TYPES)]
    assert not unknown, f"no option is named {unknown[0]}"
    return draw


def ranks(draw: Draw) -> int:
    """Return the number of ranks of its layout."""
    n = 1
    for axis in ("dp", "tp", "pp", "cp"):
        n *= draw.get(axis, 1)
    return n


def has_experts(draw: Draw) -> bool:
    return "num_experts" in {**FAMILY_SIZES.get(draw.get("arch", ""), {}), **draw}


def alone(draw: Draw) -> Draw:
    """Return the same training in one process."""
    layout = (*LAYOUT_KEYS, "recompute", "offload")
    return {key: value for key, value in draw.items() if key not in (*layout, "resume", "export")}


def resumed(draw: Draw) -> Draw:
    """Return the training in the layout of `resume`."""
    return {**alone(draw), **draw["resume"]}


def words(draw: Draw, folder: str = "DATA") -> list[str]:
    """Return the words of its command line; token files are in `folder`."""
    options = {**BASE, **FAMILY_SIZES.get(draw.get("arch", ""), {}), **draw}
    out = _data_words(draw.get("data", "mock"), folder)
    for name, value in options.items():
        flag = name.replace("_", "-")
        if name in OWN_KEYS:
            continue
        if isinstance(value, bool):
            out.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            out += [f"--{flag}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return out


def _data_words(source: str, folder: str) -> list[str]:
    """Return the words that name a source of samples."""
    if source == "mock":
        return ["--mock-data"]
    files = {
        "files": [f"{folder}/books"],
        "blend": ["0.7", f"{folder}/books", "0.3", f"{folder}/web"],
        "chats": [f"{folder}/chats"],
    }
    return ["--split", "70,30,0", "--data", *files[source]] if source in files else []


def command(draw: Draw) -> str:
    """Return the command line that trains it."""
    return f"torchrun --nproc-per-node {ranks(draw)} pretrain_gpt.py {' '.join(words(draw))}"


def make(seed: int, number: int) -> Draw:
    """Return draw `number` of a seed, always the same."""
    return _Drawing(random.Random(f"{seed} {number}")).draw()


def wanted(seed: int, fits: Callable[[Draw], bool]) -> Iterator[Draw]:
    """Yield the draws of a seed that fit, without end."""
    return filter(fits, (make(seed, number) for number in itertools.count(1)))


class _Drawing:
    """One draw in the making."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.out = rng, Draw()

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def maybe(self, p: float, name: str, *values: Any) -> bool:
        """Set an option to one of some values with probability p; say whether it is set."""
        if name not in self.out and self.chance(p):
            self.out[name] = self.rng.choice(values)
            return True
        return False

    def draw(self) -> Draw:
        out = self.out
        out["seed"] = self.rng.randrange(1000)
        self.model()
        self.data()
        self.training()
        layout = self.layout()
        out.update(layout)
        self.memory(layout)
        if self.chance(0.4):
            out["resume"] = self.layout(others=(1, 2, 2, 4))
        if self.chance(0.4):
            out["export"] = True
        return out

    # The model

    def model(self) -> None:
        out, given = self.out, self.chance
        out["num_layers"], family = self.rng.choice((2, 2, 3, 4)), None
        if given(0.55):
            out["arch"] = self.rng.choice(FAMILY_NAMES)
            sizes, family = {**FAMILY_SIZES.get(out["arch"], {})}, out["arch"]
            parts = 0.06
        else:
            sizes, parts = {}, 0.2
        self.experts("num_experts" in sizes, parts)
        self.mixer("kv_lora_rank" in sizes, "linear_attention_freq" in sizes, parts)
        if not (family is None and self.maybe(parts / 2, "head_bias", True)) and family != "gptj":
            self.maybe(parts, "tie_embeddings", True)
        self.maybe(parts, "norm", "layernorm")
        if family != "gptj":
            self.maybe(parts / 2, "norm_position", "post", "both", "sum")
        self.maybe(parts / 2, "zero_centered_norm", True)
        self.maybe(parts / 2, "scale_embeddings", True)
        if out.get("norm_position") != "sum" and self.maybe(parts / 2, "parallel_residual", True):
            self.maybe(0.4, "norm_position", "shared")
        self.maybe(parts / 2, "logit_softcap", 1.5)
        self.maybe(parts / 2, "embedding_norm", True)
        self.maybe(parts / 2, "embedding_size", 24)
        self.maybe(parts, "activation", "gelu", "geglu", "gelu_tanh", "clamped_swiglu", "relu")
        for name in ("qkv_bias", "o_bias", "mlp_bias"):
            if name != "mlp_bias" or not self.biased():
                self.maybe(parts, name, True)
        if out.get("arch") not in NOT_FURTHER and out.get("position") != "learned" and not out.get("embedding_norm"):
            self.maybe(
                0.25 if out.get("arch") in ("deepseek_v3", "glm4_moe", "qwen3_next") else parts / 2,
                "mtp_num_layers",
                1,
                2,
            )
        if given(0.3):
            out["seq_len"] = 32

    def biased(self) -> bool:
        """Whether routers have a bias in their choice, which excludes one in their logits."""
        return self.out.get("moe_router_enable_expert_bias") or self.out.get("arch") in ("deepseek_v3", "glm4_moe")

    def experts(self, has: bool, parts: float) -> None:
        out, family = self.out, self.out.get("arch")
        if not has and not self.chance(parts):
            return
        if not has:
            out.update(EXPERTS)
            self.maybe(0.3, "moe_shared_ffn_size", 16)
            if "moe_shared_ffn_size" in out:
                self.maybe(0.4, "moe_shared_gate", True)
            if self.maybe(0.3, "moe_router_score_function", "sigmoid"):
                self.maybe(0.6, "moe_router_enable_expert_bias", True)
            self.maybe(0.2, "moe_apply_probs_on_input", True)
            self.maybe(0.3, "moe_renormalize", False)
            if self.chance(0.2):
                out.update({"moe_topk": 1, "moe_renormalize": False})
        if family in (None, "deepseek_v2", "deepseek_v3") and out.get("moe_topk", 2) == 2 and self.chance(0.4):
            out.update({"moe_router_num_groups": 4, "moe_router_group_topk": 2})
        if family not in ("mixtral", "gpt_oss", "olmoe"):
            self.maybe(0.3, "moe_dense_layers", [0], [out["num_layers"] - 1])
        self.maybe(0.2, "moe_router_topk_scaling_factor", 1.7)
        if self.maybe(0.6, "moe_aux_loss_coeff", 0.02):
            self.maybe(0.6, "moe_router_load_balancing_type", "aux_loss", "seq_aux_loss")
        self.maybe(0.3, "moe_z_loss_coeff", 0.001)

    def mixer(self, latents: bool, delta_nets: bool, parts: float) -> None:
        out, family = self.out, self.out.get("arch")
        if family is None and self.chance(0.15):
            latents = True
            out.update(LATENTS)
            self.maybe(0.5, "q_lora_rank", 12)
        elif family is None and self.chance(0.15):
            delta_nets = True
            out.update(DELTA_NETS)
        if latents:
            return
        self.maybe(0.5, "num_kv_heads", 2, 4)
        self.maybe(parts, "qk_norm", "head", "full", "l2")
        self.maybe(parts / 2, "attention_output_gate", True)
        if family != "bloom":
            self.maybe(parts / 2, "attention_softcap", 2.0)
        if family != "gemma2" and not delta_nets:
            self.maybe(parts, "attention_sinks", True)
        if family is None:
            self.lengths(parts)
            if not delta_nets and not out.get("rope_scaling"):
                self.maybe(parts / 2, "mup_base_width", 16)
        elif "window" in FAMILY_SIZES.get(family, {}):
            self.maybe(0.3, "window", 3, 9)

    def lengths(self, parts: float) -> None:
        """How far a token of a llama sees, and how it knows where."""
        out = self.out
        if self.maybe(parts, "window", 3, 5, 9):
            self.maybe(0.5, "window_pattern", 2)
        elif self.maybe(parts, "attention_chunk_size", 5, 7):
            self.maybe(0.5, "no_rope_freq", 2)
        if self.maybe(parts, "no_rope_freq", 2) or "no_rope_freq" in out:
            if self.chance(0.5):
                out.update(TEMPERATURE)
        elif (
            "qk_norm" not in out
            and "attention_chunk_size" not in out
            and self.maybe(parts / 2, "position", "learned", "alibi")
        ):
            return
        self.maybe(parts / 2, "rope_fraction", 0.5)
        if not self.maybe(parts / 2, "rope_linear_factor", 4.0):
            self.maybe(parts / 2, "rope_scaling", "{factor: 8.0, original_max_position_embeddings: 8}")
        if "window" in out:
            self.maybe(0.3, "rope_theta_local", 100.0)

    # The data

    def data(self) -> None:
        out = self.out
        out["data"] = self.rng.choice(("mock", "mock", "files", "files", "blend", "chats", "own", "own"))
        if out["data"] == "own":
            given = [word for word in ("documents", "masks", "padding", "weights") if self.chance(0.5)]
            out["data"] = " ".join(["own", *given])
        elif out["data"] == "chats":
            self.maybe(0.4, "loss_on", "answers", "all", "last")
            self.maybe(0.4, "loss_per", "sample")
            self.maybe(0.2, "long_documents", "drop")
        elif out["data"] != "mock":
            self.maybe(0.4, "document_mask", True)
        if not out["data"].startswith("own"):
            self.maybe(0.2, "eval_every", 3)

    # The options of training

    def training(self) -> None:
        out = self.out
        out["optimizer"] = self.rng.choice(
            ("adamw", "adamw", "adamw", "muon", "lamb", "lars", "lion", "ademamix", "sgd")
        )
        if "mup_base_width" in out and out["optimizer"] in ("lamb", "lars", "sgd"):
            out["optimizer"] = "adamw"
        if out["optimizer"] in RATES:
            out["lr"] = RATES[out["optimizer"]]
        if out["optimizer"] == "ademamix":
            self.maybe(0.5, "ademamix_warmup", 2)
        self.maybe(0.5, "global_batch_size", 8)
        self.maybe(0.5, "micro_batch_size", 2)
        self.maybe(0.15, "clip_grad", 0.0, 0.1, 10.0)
        if not self.maybe(0.12, "label_smoothing", 0.1):
            self.maybe(0.15, "loss_chunk", 5)
        self.maybe(0.15, "z_loss", 0.1)
        self.maybe(0.1, "weight_decay", 0.0, 1.0)
        if "mup_base_width" not in out:
            self.maybe(0.1, "decoupled_lr", 2 * out.get("lr", 1e-3))
        self.maybe(0.05, "start_weight_decay", 0.01)
        self.maybe(0.1, "warmup_steps", 2)
        if out.get("global_batch_size") == 8:
            self.maybe(0.1, "batch_size_schedule", "0:4 2:8")
        if self.chance(0.15):
            self.maybe(0.7, "hidden_dropout", 0.1)
            self.maybe(0.5, "attention_dropout", 0.1)

    def memory(self, layout: Draw) -> None:
        """Options that trade memory, which do not change a figure."""
        out = self.out
        self.maybe(0.4, "recompute", "selective", "full")
        if self.chance(0.2):
            kinds = ["optimizer", *["activations"] * (out.get("recompute") == "full")]
            out["offload"] = self.rng.choice([*kinds, *["optimizer+params"] * (layout.get("zero") == 3)])

    # The layout

    def layout(self, others: Iterable[int] = (2, 2, 4, 4, 4, 4, 3)) -> Draw:
        world, rng = self.rng.choice(tuple(others)), self.rng
        sizes = {"tp": 1, "pp": 1, "cp": 1, "dp": 1}
        for factor in {1: (), 2: (2,), 3: (3,), 4: (2, 2)}[world]:
            axes = ["pp", "dp"] if factor == 3 else ["tp", "tp", "pp", "cp", "dp"]
            sizes[rng.choice(axes)] *= factor
        if sizes["pp"] > self.out["num_layers"]:
            sizes.update({"dp": sizes["dp"] * 2, "pp": sizes["pp"] // 2} if world == 4 else {"pp": 1})
        if sizes["tp"] > self.out.get("num_kv_heads", 4):
            sizes.update({"dp": sizes["dp"] * 2, "tp": sizes["tp"] // 2})
        if self.out.get("micro_batch_size", 1) * sizes["dp"] > 4:
            sizes.update({"dp": sizes["dp"] // 2, "cp": sizes["cp"] * 2})
        inner = _Drawing(self.rng)
        inner.out = {axis: size for axis, size in sizes.items() if size > 1}
        inner.shards(sizes, self.out)
        inner.pipeline(sizes, self.out)
        inner.context(sizes, self.out)
        inner.experts_of_ranks(sizes, self.out)
        inner.zero(sizes)
        return inner.out

    def shards(self, sizes: Draw, model: Draw) -> None:
        if sizes["tp"] > 1:
            self.maybe(0.4, "sequence_parallel", False)
            if "sequence_parallel" not in self.out:
                self.maybe(0.15, "tp_chunks", 2)
            self.maybe(0.15, "overlap_tp_reduce", False)
        self.maybe(0.2, "vocab_divisible_by", 8)

    def pipeline(self, sizes: Draw, model: Draw) -> None:
        if sizes["pp"] == 1:
            return
        passes = model.get("global_batch_size", 4) // (model.get("micro_batch_size", 1) * sizes["dp"])
        if sizes["pp"] * 2 <= model["num_layers"] and self.maybe(0.4, "vp", 2):
            fits = passes % sizes["pp"] == 0 and "batch_size_schedule" not in model
            self.maybe(0.7, "schedule", "zb-v", "gpipe", *["interleaved"] * fits)
            if not fits:
                self.out.setdefault("schedule", "zb-v")
        else:
            self.maybe(0.6, "schedule", "naive", "gpipe", "1f1b", "1f1b-eager", "zb-h1")
        stages = sizes["pp"] * self.out.get("vp", 1)
        if self.chance(0.15):
            cuts = sorted(self.rng.randrange(model["num_layers"] + 1) for _ in range(stages - 1))
            counts = [b - a for a, b in zip([0, *cuts], [*cuts, model["num_layers"]])]
            self.out["pipeline_layout"] = ",".join(map(str, counts))

    def context(self, sizes: Draw, model: Draw) -> None:
        if sizes["cp"] == 1:
            return
        arch = model.get("arch", "")
        if "kv_lora_rank" in {**FAMILY_SIZES.get(arch, {}), **model}:
            self.maybe(0.3, "cp_comm", "gather")
            return
        heads, kv = 4 // sizes["tp"], model.get("num_kv_heads", 4) // sizes["tp"]
        exchange = heads % sizes["cp"] == 0 and (kv % sizes["cp"] == 0 or sizes["cp"] % kv == 0)
        self.maybe(0.8, "cp_comm", "gather", "ring", "a2a+gather", "a2a+ring", *["a2a"] * exchange)

    def experts_of_ranks(self, sizes: Draw, model: Draw) -> None:
        if not has_experts(model):
            return
        whole = sizes["tp"] > 1 and self.out.get("sequence_parallel", True) and self.maybe(0.3, "etp", "1")
        most = sizes["dp"] * sizes["cp"] * (sizes["tp"] if whole else 1)
        if most % 2 == 0:
            self.maybe(0.7, "ep", *(n for n in (2, 4) if most % n == 0))
        if "ep" in self.out:
            self.maybe(0.4, "moe_dispatch", "allgather", "auto")
            plain = (None, "1f1b", "1f1b-eager", "interleaved")
            if self.out.get("schedule") in plain and self.maybe(0.3, "moe_overlap", True):
                self.out.pop("schedule", None)  # there is one with pairs for each vp
        self.maybe(0.2, "moe_memory_factor", 1.0)

    def zero(self, sizes: Draw) -> None:
        stage = self.rng.choice((0, 1, 1, 2, 3))
        if stage != 1:
            self.out["zero"] = stage
        self.maybe(0.4, "bucket_size", 2000, 5000)
        self.maybe(0.15, "overlap_grad_reduce", False)
        self.maybe(0.15, "overlap_param_gather", False)
        if stage > 1:
            self.out["zero_whole_below"] = self.rng.choice((0, 500))
            self.maybe(0.25, "zero_reduce", "step")
            if sizes["dp"] * sizes["cp"] == 4:
                self.maybe(0.4, "zero_group", "2", "dp/2")
        if stage == 3:
            self.maybe(0.4, "zero_keep", "backward", "step")
            self.maybe(0.5, "debug_zero", True)
