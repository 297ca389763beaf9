"""How the gated delta rule is computed: its reference, and plans of memory and time, read it here."""

CHUNK = 64
"""Tokens of a chunk."""
_SUMS = 0.75 * (CHUNK + 1)
"""Columns that are multiplied with ones for sums of decays: with one gradient, where other products have two."""
LIMIT = 1 << 30
"""Bytes that a slice of the heads may take in backward; one key head is always computed as a whole."""


def work_bytes(tokens: int, per_key: int, key_size: int, value_size: int) -> int:
    """Compute the bytes that backward takes for one key head with `per_key` value heads, fp32 products.

    It is fitted to what was counted at sizes of 32 to 128 (bf16: to 7 %; fp32 takes up to 10 % more).

    Args:
        tokens: those of all samples.
    """
    return tokens * (per_key * (1590 + 42 * key_size + 24 * value_size) + 12 * key_size)


def heads_at_once(heads: int, tokens: int, per_key: int, key_size: int, value_size: int) -> int:
    """Return how many of `heads` key heads make a slice; arguments as for `work_bytes`."""
    return max(1, min(heads, LIMIT // work_bytes(tokens, per_key, key_size, value_size)))


def products_work(key_size: int, value_size: int) -> float:
    """Count the multiply-adds of a token and value head in forward: products in fp32, half of the triangular system."""
    within = 2 * key_size + (key_size + value_size) / 2 + value_size + _SUMS
    return CHUNK * within + 3 * key_size * value_size


def transition_work(key_size: int, value_size: int) -> float:
    """Count the same for what tokens make of a state, T M + U."""
    return CHUNK * (key_size + (key_size + value_size) / 2 + _SUMS) + 2 * key_size * (key_size + value_size)
