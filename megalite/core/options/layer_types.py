"""Which layers have the attention window: by a pattern, or layer by layer as config.json of Hugging Face names them."""

from __future__ import annotations

from megalite.core.base.errors import require

FULL, SLIDING = "full_attention", "sliding_attention"


def read_layer_types(
    given: tuple[str, ...], pattern: int, window: int | None, num_layers: int
) -> tuple[tuple[str, ...], int]:
    """Return the types of all layers and the pattern; types that follow a pattern are written as that pattern.

    So each model has one description.

    Args:
        given: types of the first layers, repeated for the others; empty: `pattern` holds.
        pattern: every n-th layer sees everything; 0: none does.
        window: size of the window, if there is one.
        num_layers: number of layers.

    Raises:
        UserError: not one of the types, too many, or no window for them.
    """
    if not given:
        return (), pattern
    require(
        set(given) <= {FULL, SLIDING} and len(given) <= num_layers and (SLIDING not in given or window is not None),
        f"--layer-types {' '.join(given)[:80]}",
        f"must name at most {num_layers} layers, each {SLIDING} or {FULL}; {SLIDING} requires --window",
        "correct the list, or give --window",
    )
    types = (given * -(-num_layers // len(given)))[:num_layers]
    for period in (pattern, types.index(FULL) + 1 if FULL in types else 0):
        if types == tuple(FULL if period and (i + 1) % period == 0 else SLIDING for i in range(num_layers)):
            return (), period
    return types, 0
