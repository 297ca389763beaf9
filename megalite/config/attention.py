"""The options of attention: what fits together."""

from __future__ import annotations

from typing import Any

from megalite.base.errors import require


def check_sinks(m: Any, t: Any) -> None:
    """Refuse what attention with sinks does not know: m and t are the options of model and training.

    Raises:
        UserError: an option is one of these.
    """
    if not m.attention_sinks:
        return
    for given, refused, why in (
        (f"--attention-dropout {m.attention_dropout}", m.attention_dropout > 0, "blocks of keys have no dropout"),
        (f"--attention {t.attention}", t.attention != "auto", "kernels that return a log-sum-exp are torch's choice"),
    ):
        require(not refused, f"{given} with --attention-sinks", why, "drop one of the two")
