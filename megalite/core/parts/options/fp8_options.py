"""What `--fp8` applies to, and the layouts that it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.core.base.errors import require
from megalite.core.options.part import PartRules
from megalite.core.options.recipe import RECIPES

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig
    from megalite.core.options.parallel import ParallelConfig
    from megalite.core.options.step import StepConfig
    from megalite.core.options.train import TrainConfig


def fp8_layers(m: ModelConfig, t: TrainConfig) -> range:
    """Return the blocks whose products are in FP8."""
    return range(t.fp8_keep_bf16, m.num_layers - t.fp8_keep_bf16) if t.fp8 != "off" else range(0)


def describe_fp8(m: ModelConfig, t: TrainConfig) -> str:
    """Return what is in FP8, and whether that is emulated; empty where nothing is."""
    layers, how = fp8_layers(m, t), ", EMULATED: codes multiplied in fp32, slower than bf16"
    where = f"products of layers {layers[0]} to {layers[-1]}" if layers else ""
    experts = ", experts one after the other" * any(m.is_moe(layer) for layer in layers)
    return f", FP8 {t.fp8} ({where}{experts}{how * t.fp8_emulate})" if layers else ""


class Fp8Rules(PartRules["ModelConfig", "StepConfig"]):
    """Products in FP8."""

    def check(self, cfg: StepConfig) -> None:
        m, p, t = cfg.model, cfg.parallel, cfg.train
        if t.fp8 == "off":
            given = "--fp8-emulate" if t.fp8_emulate else f"--fp8-keep-bf16 {t.fp8_keep_bf16}"
            require(
                not t.fp8_emulate and not t.fp8_keep_bf16,
                given,
                "has no effect without --fp8",
                "give --fp8, or drop it",
            )
            return
        given = f"--fp8 {t.fp8}"
        require(
            p.tp_chunks == 1, f"--tp-chunks {p.tp_chunks} with {given}", "codes are not cut into chunks", "drop one"
        )
        require(
            t.precision == "bf16" or (t.precision == "fp32" and t.fp8_emulate),
            f"{given} with --precision {t.precision}",
            "FP8 products take and return bf16" + (" (fp32 only emulated)" if t.precision == "fp32" else ""),
            "give --precision bf16",
        )
        require(
            len(fp8_layers(m, t)) > 0,
            f"--fp8-keep-bf16 {t.fp8_keep_bf16}",
            f"leaves none of {m.num_layers} layers in FP8",
            "lower it, or drop --fp8",
        )
        multiple = RECIPES[t.fp8].multiple
        why = (
            "a cut inside a block would make values depend on the layout"
            if multiple > 16
            else "as FP8 products require"
        )
        other = "change the sizes or --tp" + ", or use --fp8 rowwise" * (multiple > 16)
        cuts = {
            "hidden features (--hidden-size)": m.hidden_size,
            "queries of a rank": m.num_heads // p.tp * m.head_size,
            "keys of a rank": m.kv_heads // p.tp * m.head_size,
            **_inner_features(m, p),
            "tokens of a micro-batch": t.micro_batch_size * m.seq_len // p.cp,
        }
        for what, size in cuts.items():
            require(
                size % multiple == 0, f"{given} with {size} {what}", f"must be divisible by {multiple}: {why}", other
            )


def _inner_features(m: ModelConfig, p: ParallelConfig) -> dict[str, int]:
    """Return the inner widths of the feed-forward layers on a rank: dense, of experts, and of the shared one."""
    experts = [m.is_moe(layer) for layer in range(m.num_layers)]
    sizes = {} if all(experts) else {"inner features of a rank": m.ffn_size // p.tp}
    if any(experts):
        sizes["inner features of an expert on a rank"] = m.expert_ffn_size // (p.tp if p.etp == "tp" else 1)
    if m.moe_shared_ffn_size:
        sizes["inner features of the shared expert on a rank"] = m.moe_shared_ffn_size // p.tp
    return sizes


PART = Fp8Rules()
