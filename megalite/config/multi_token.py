"""The options of modules that predict further tokens: what fits together."""

from __future__ import annotations

from typing import Any

from megalite.base.errors import require


def check_mtp(m: Any, t: Any) -> None:
    """Check these options; m and t are the options of model and training.

    Raises:
        UserError: they do not fit together.
    """
    require(
        m.mtp_num_layers == 0 or m.position == "rope",
        f"--mtp-num-layers {m.mtp_num_layers} with --position {m.position}",
        "embeddings of further tokens have no positions added to them",
        "use --position rope",
    )
    factor = "mtp_loss_scaling_factor"
    require(
        m.mtp_num_layers > 0 or getattr(t, factor) == getattr(type(t), factor),
        f"--mtp-loss-scaling-factor {t.mtp_loss_scaling_factor:g}",
        "no module predicts further tokens",
        "give --mtp-num-layers, or drop it",
    )
