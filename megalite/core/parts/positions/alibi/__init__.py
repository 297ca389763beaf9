"""ALiBi: each head adds to its scores a slope times how far a key lies behind (Press et al. 2022, arXiv:2108.12409)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalite.core.base.errors import require
from megalite.core.options.choices import Position

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig


class Alibi(Position):
    """Columns beside those of a head: slopes in queries, positions in keys (see `columns`)."""

    about = "scores fall with the distance, each head with a slope of its own; BLOOM"
    columns = 8  # kernels take head sizes that 8 divides
    exact_length = 2**16  # up to which two digits of a position are exact in bf16

    def check_chosen(self, m: ModelConfig) -> None:
        for given, wrong, why, remedy in (
            (
                f"--attention-softcap {m.attention_softcap}",
                m.attention_softcap is not None,
                "would cap the bias",
                "change one of the two",
            ),
            (
                f"--seq-len {m.seq_len}",
                m.seq_len > self.exact_length,
                f"is longer than the {self.exact_length} positions that its bias is exact for",
                "change one of the two",
            ),
            (
                "--attention-sinks",
                m.attention_sinks,
                "scores have a bias that is right up to a constant, which a sink would see",
                "drop it",
            ),
        ):
            require(not wrong, f"{given} with --position {m.position}", why, remedy)

    def tables(self, cfg: ModelConfig, layer: int) -> Any:
        from megalite.core.parts.positions.alibi.columns import OfKeys

        return OfKeys(self.columns)

    def of_queries(self, cfg: ModelConfig, heads: slice, scale: float, dtype: Any, device: Any) -> Any:
        from megalite.core.parts.positions.alibi.columns import of_queries, slopes

        return of_queries(slopes(cfg.num_heads)[heads], scale, self.columns, dtype, device)


POSITION = Alibi()
