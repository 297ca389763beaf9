"""Where experts live, what fits a model, and what `--moe-dispatch auto` chooses."""

from __future__ import annotations

from megalite.core.base.errors import require
from megalite.core.options.model import ModelConfig
from megalite.core.options.names import dashed
from megalite.core.options.parallel import ParallelConfig


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


def check_experts(m: ModelConfig, p: ParallelConfig) -> None:
    """Refuse layouts that do not fit the experts.

    Raises:
        UserError: there are none, or they do not divide.
    """
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
