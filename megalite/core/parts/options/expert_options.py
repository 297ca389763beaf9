"""The options of experts: what fits together, and what `--moe-dispatch auto` chooses."""

from __future__ import annotations

import dataclasses

from megalite.core.base.errors import in_range, require
from megalite.core.options.model import ModelConfig
from megalite.core.options.names import dashed
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.part import PartOptions
from megalite.core.options.step import StepConfig


def choose_dispatch(m: ModelConfig, p: ParallelConfig) -> tuple[str, str]:
    """Return the value of `--moe-dispatch` in effect, and why.

    For a token, a rank sends k (ep - 1) / ep rows to its experts, or ep - 1 to all ranks, and as many come back. Where
    both are equal, alltoall needs less memory. Whether experts are sharded over tp counts alike in both.
    """
    if p.moe_dispatch != "auto":
        return p.moe_dispatch, "as requested"
    exchanged, gathered = m.moe_topk * (p.ep - 1) / p.ep, p.ep - 1
    words = (
        f"a rank sends {exchanged:.3g} rows per token by alltoall, {gathered} by allgather, which keeps {p.ep} times "
    )
    words += "the outputs of experts"
    return "allgather" if gathered < exchanged else "alltoall", words


class ExpertOptions(PartOptions[ModelConfig, StepConfig]):
    """Mixtures of experts, their router, and where they live."""

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
        if m.num_experts is None:
            words = {"ep": 1, "etp": "tp", "moe_dispatch": "alltoall", "moe_memory_factor": 1.5}
            options = [f"--{dashed(n)} {getattr(p, n)}" for n, default in words.items() if getattr(p, n) != default]
            given = " ".join(options)
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


OPTIONS = ExpertOptions()
