"""What ranks that share samples cannot do is refused in one line; what `--cp-comm auto` chooses, and why."""

from __future__ import annotations

import pytest

from megalite.core.base.errors import UserError
from megalite.core.parts.options.context_parallel import choose_comm, head_ranks
from megalite.runtime.options.cli import parse
from megalite.runtime.options.run import Config

SIZES = "--vocab-size 90 --num-layers 2 --hidden-size 96"


def config(flags: str) -> Config:
    return parse([*SIZES.split(), *flags.split()]).config


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--cp 2 --cp-comm a2a --seq-len 64 --num-heads 6 --num-kv-heads 3", "6 query heads and 3 key heads"),
    ],
)
def test_bad_input(flags: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        config(flags)


@pytest.mark.parametrize(
    ("flags", "comm", "why"),
    [
        # Every query head has a key head of its own: tokens for heads from cp 3 on.
        ("--cp 4 --num-heads 8", "a2a", "cp 4 is more than 1"),
        ("--cp 2 --num-heads 8", "gather", "32 tokens on a rank are few"),
        ("--cp 4 --num-heads 8 --num-kv-heads 1", "gather", "are few"),
        ("--cp 2 --num-heads 8 --num-kv-heads 1 --seq-len 8192", "ring", "the 4096 tokens"),
        ("--cp 2 --num-heads 8 --num-kv-heads 1 --seq-len 8192 --document-mask", "gather", "documents"),
        ("--cp 2 --num-heads 8 --attention-dropout 0.1", "gather", "32 tokens on a rank are few"),
        ("--cp 4 --num-heads 8 --cp-comm ring", "ring", "as requested"),
    ],
)
def test_auto(flags: str, comm: str, why: str) -> None:
    cfg = config(f"--seq-len 64 {flags}")
    chosen, reason = choose_comm(cfg.model, cfg.parallel, cfg.data.within_documents)
    assert chosen == comm
    assert why in reason


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp", "ranks"), [(8, 8, 16, 8), (8, 2, 4, 4), (6, 3, 4, 1), (6, 6, 4, 2)]
)
def test_neighbors_that_exchange_heads(heads: int, kv_heads: int, cp: int, ranks: int) -> None:
    cfg = config(f"--seq-len 64 --num-heads {heads} --num-kv-heads {kv_heads} --cp {cp}")
    assert head_ranks(cfg.model, cfg.parallel) == ranks
