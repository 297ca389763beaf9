"""The options of experts: which they are, what fits together, and what `--moe-dispatch auto` chooses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megalite.core.base.errors import in_range, require
from megalite.core.options.names import dashed
from megalite.core.options.parallel import SCHEDULES
from megalite.core.options.part import PartRules, missing
from megalite.core.options.shape import ModelShape

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig
    from megalite.core.options.parallel import ParallelConfig
    from megalite.core.options.step import StepConfig

BALANCING = (
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_load_balancing_type",
    "moe_router_bias_update_rate",
)
"""Options of a run that do not change the meaning of the weights."""


def choose_dispatch(m: ModelConfig, p: ParallelConfig) -> tuple[str, str]:
    """Return the value of `--moe-dispatch` in effect, and why.

    For a token, a rank sends k (ep - 1) / ep rows to its experts, or ep - 1 to all ranks, and as many come back. Where
    both are equal, allgather sorts nothing on arrival: a layer of Qwen3-30B-A3B at ep 8, forward and backward, is
    estimated at 6.0 ms of kernels and 1.4 ms of exposed messages on H100s, with alltoall at 6.8 and 2.0 (`megalite
    estimate`; not measured). Whether experts are sharded over tp counts alike in both.
    """
    if p.moe_dispatch != "auto":
        return p.moe_dispatch, "as requested"
    exchanged, gathered = m.moe_topk * (p.ep - 1) / p.ep, p.ep - 1
    words = f"a rank sends {exchanged:.3g} rows per token by alltoall, {gathered} by allgather"
    return "allgather" if 1 < p.ep <= m.moe_topk else "alltoall", words


@dataclass(frozen=True, eq=False, repr=False)
class ExpertOptions(ModelShape):
    """Experts, their router, and its losses."""

    num_experts: int | None = None
    """Number of experts of each MoE layer. Default: none, every layer is dense."""
    moe_topk: int = 2
    """Number of experts that each token is sent to."""
    moe_ffn_size: int | None = None
    """Inner width of an expert. Default: --ffn-hidden-size."""
    moe_renormalize: bool = True
    """Divide the routing weights of a token by their sum (Mixtral), instead of using the scores as they are."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Score of an expert: its share of a softmax, or a sigmoid of its own logit (DeepSeek-V3)."""
    moe_router_topk_scaling_factor: float = 1.0
    """Multiply the routing weights by this, last of all (DeepSeek-V3: 2.5)."""
    moe_router_num_groups: int = 1
    """Number of groups of neighboring experts, of which a token uses only the best (DeepSeek-V3: 8); 1: no groups."""
    moe_router_group_topk: int = 1
    """Number of groups that a token may use (DeepSeek-V3: 4)."""
    moe_router_enable_expert_bias: bool = False
    """Choose experts by score + bias, and move the bias after every step against the load: balance without a loss
    (DeepSeek-V3). Saved with the weights, in fp32."""
    moe_router_bias_update_rate: float = 1e-3
    """Size of that move; 0 leaves the bias as it is."""
    moe_apply_probs_on_input: bool = False
    """Multiply the input of an expert by the routing weight, instead of its output (Llama 4)."""
    moe_shared_ffn_size: int = 0
    """Inner width of the shared expert, which sees every token; 0: none."""
    moe_shared_gate: bool = False
    """Multiply the output of the shared expert by a sigmoid gate (Qwen2-MoE)."""
    moe_dense_layers: tuple[int, ...] = ()
    """Layers, from 0, that have a dense MLP instead of experts."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the load-balancing loss in the gradients (0.01 is usual); `loss` in the metrics is without it."""
    moe_z_loss_coeff: float = 0.0
    """Weight of the squared log-sum-exp of the router's logits in the gradients (ST-MoE; 1e-3 is usual)."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "aux_loss"
    """Whether that balances the tokens of each micro-batch, and so depends on its size, or of each sequence (seq)."""

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.num_experts is not None and self.like(layer) not in self.moe_dense_layers

    @property
    def expert_ffn_size(self) -> int:
        assert self.moe_ffn_size is not None
        return self.moe_ffn_size


class ExpertRules(PartRules["ModelConfig", "StepConfig"]):
    """Mixtures of experts, their router, and where they live."""

    options, after = ExpertOptions, "attention_dropout"

    def derived(self, m: ModelConfig) -> dict[str, int | None]:
        return missing(m, {"moe_ffn_size": m.ffn_hidden_size}) if m.num_experts is not None else {}

    def check_model(self, m: ModelConfig) -> None:
        in_range(m, "num_experts", 2, 2**16)
        in_range(m, "moe_topk", 1, 2**16)
        in_range(m, "moe_ffn_size", 1, 2**24)
        in_range(m, "moe_shared_ffn_size", 0, 2**24)
        in_range(m, "moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate", 0, 100)
        in_range(m, "moe_router_topk_scaling_factor", 0, 1000, above=True)
        in_range(m, "moe_router_num_groups moe_router_group_topk", 1, 2**16)
        if m.num_experts is None:
            given = [f for f in dataclasses.fields(m) if f.name.startswith("moe_") and getattr(m, f.name) != f.default]
            words = " ".join(f"--{dashed(f.name)} {getattr(m, f.name)}" for f in given)
            require(not given, words, "applies to models with experts", "give --num-experts, or drop it")
            return
        require(
            m.moe_topk <= m.num_experts,
            f"--moe-topk {m.moe_topk}",
            f"is more than the {m.num_experts} experts of --num-experts",
            "lower it",
        )
        _check_choice(m, m.num_experts)
        require(
            m.moe_topk > 1 or not m.moe_renormalize,
            "--moe-topk 1",
            "renormalized, its weight is always 1, which gives the router no gradient",
            "give --no-moe-renormalize",
        )
        require(
            m.moe_router_load_balancing_type != "none" or m.moe_aux_loss_coeff == 0,
            f"--moe-router-load-balancing-type none with --moe-aux-loss-coeff {m.moe_aux_loss_coeff:g}",
            "there is no balance loss to weigh",
            "drop one of the two",
        )
        require(
            not (m.mlp_bias and m.moe_router_enable_expert_bias),
            "--mlp-bias with --moe-router-enable-expert-bias",
            "a router has one bias: in its logits, or in its choice",
            "drop one of the two",
        )
        layers, dense = range(m.num_layers), m.moe_dense_layers
        require(
            len(set(dense)) == len(dense) < m.num_layers and all(layer in layers for layer in dense),
            f"--moe-dense-layers {' '.join(map(str, dense))}",
            f"must be some, not all, of the layers 0 to {m.num_layers - 1}, each once",
            "correct the list",
        )

    def check(self, cfg: StepConfig) -> None:
        m, p = cfg.model, cfg.parallel
        _check_overlap(cfg)
        if m.num_experts is None:
            words = {"ep": 1, "etp": "tp", "moe_dispatch": "alltoall", "moe_memory_factor": 1.5}
            options = [f"--{dashed(n)} {getattr(p, n)}" for n, default in words.items() if getattr(p, n) != default]
            given = " ".join([*options, *["--moe-overlap"] * p.moe_overlap])
            require(not given, given, "needs a model with experts", "give --num-experts, or drop it")
            return
        require(
            m.num_experts % p.ep == 0,
            f"--num-experts {m.num_experts}",
            f"must be divisible by --ep {p.ep}",
            "change one of the two",
        )
        sharded = p.sequence_parallel and p.tp > 1
        require(
            p.etp == "tp" or p.tp == 1 or sharded,
            f"--etp 1 with --tp {p.tp} --no-sequence-parallel",
            "whole experts need the tokens divided over tp",
            "drop --no-sequence-parallel, or give --etp tp",
        )
        for flag, width, cut in (
            ("--moe-ffn-size", m.expert_ffn_size, p.etp == "tp"),
            ("--moe-shared-ffn-size", m.moe_shared_ffn_size, True),
        ):
            require(
                width % p.tp == 0 or not cut,
                f"{flag} {width}",
                f"must be divisible by --tp {p.tp}",
                "change one of the two" + ", or give --etp 1" * (flag == "--moe-ffn-size"),
            )


def _check_overlap(cfg: StepConfig) -> None:
    """Check what `--moe-overlap` runs with."""
    p = cfg.parallel
    pairs = [name for name, schedule in SCHEDULES.items() if schedule.pairs]
    rule = "runs micro-batches in pairs, of which one computes while the other exchanges tokens of experts"
    given = f"--schedule {p.schedule}"
    require(p.moe_overlap or p.schedule not in pairs, given, rule, "give --moe-overlap, or another schedule")
    if not p.moe_overlap or cfg.model.num_experts is None:
        return
    require(p.ep > 1, "--moe-overlap with --ep 1", "there is no exchange to hide", "raise --ep, or drop it")
    rule = f"runs no forward pass beside a backward pass, as {' and '.join(pairs)} do"
    given = f"--moe-overlap with --schedule {p.schedule}"
    require(p.schedule in ("auto", *pairs), given, rule, "drop --schedule, or --moe-overlap")


def _check_choice(m: ModelConfig, num_experts: int) -> None:
    """Check groups of experts, the bias of the choice, and the gate of the shared expert."""
    require(
        m.moe_shared_ffn_size > 0 or not m.moe_shared_gate,
        "--moe-shared-gate",
        "needs a shared expert",
        "give --moe-shared-ffn-size, or drop it",
    )
    groups, best = m.moe_router_num_groups, m.moe_router_group_topk
    least = 2 if m.moe_router_score_function == "sigmoid" and groups > 1 else 1
    require(
        num_experts % groups == 0 and num_experts >= least * groups,
        f"--moe-router-num-groups {groups}",
        f"must divide the {num_experts} experts into groups of {least} or more",
        "change it",
    )
    require(
        best <= groups and best * (num_experts // groups) >= m.moe_topk,
        f"--moe-router-group-topk {best}",
        f"must be groups of {num_experts // groups} experts, at most {groups}, that hold the {m.moe_topk} of a token",
        "change it",
    )
    rate = "moe_router_bias_update_rate"
    require(
        m.moe_router_score_function == "sigmoid" or not m.moe_router_enable_expert_bias,
        "--moe-router-enable-expert-bias",
        "is added to sigmoids: a softmax has shares of one whole",
        "give --moe-router-score-function sigmoid",
    )
    require(
        m.moe_router_enable_expert_bias or getattr(m, rate) == type(m).__dataclass_fields__[rate].default,
        f"--moe-router-bias-update-rate {m.moe_router_bias_update_rate:g}",
        "there is no bias to move",
        "give --moe-router-enable-expert-bias, or drop it",
    )


PART = ExpertRules()
