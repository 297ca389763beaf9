"""Pass on what a recurrence carries where ranks share samples: each piece of neighboring tokens is worked on by itself,
from what all pieces before it leave behind.

A rank holds two pieces of each sample, one from the head and one from the tail (`batch.runs_of`). They lie side by
side, as samples do, [tokens of a piece, 2 B, ...]; those of all ranks are 2 c. No rank waits for the pieces before its
own, one after another, and the bytes of states grow neither with the length of samples nor with c; the W - 1 tokens
before a piece are gathered by all. Source of the idea: Martin and Cundy 2018, "Parallelizing Linear Recurrent Neural
Nets Over Sequence Length" (arXiv:1709.04057).

Shapes: s tokens of this rank, S of all, B samples, W tokens that a convolution sees, N heads with states [K, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.core.batch import by_rank, in_order
from megalite.core.mesh.collectives import exchange_rows, gather_sequence
from megalite.core.mesh.context import Axis


def split(x: Tensor) -> Tensor:
    """Lay the pieces of x [s, B, ...] side by side: [s / 2, 2 B, ...]."""
    return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2)


def join(x: Tensor) -> Tensor:
    """Undo `split`."""
    return x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1)


def starts_in(starts: Tensor, cp: Axis) -> Tensor:
    """Count where documents start, int64 [S, B], from each piece's first token: [s / 2, 2 B]; before it: below 0."""
    tokens = len(starts) // (2 * cp.size)
    first = torch.arange(len(starts), device=starts.device) // tokens * tokens
    return split(by_rank(starts - first[:, None], cp.size)[cp.rank])


def with_tokens_before(x: Tensor, starts: Tensor | None, width: int, cp: Axis) -> tuple[Tensor, Tensor | None]:
    """Put the last W - 1 tokens of the piece before in front of x [s / 2, 2 B, F], zeros in front of the first one.

    Returns:
        These, and where their documents start; the tokens in front do not tell theirs.
    """
    ahead = width - 1
    ends = _of_all(x[len(x) - ahead :].transpose(0, 1), cp)
    before = _own(torch.cat((torch.zeros_like(ends[:1]), ends[:-1])), cp).transpose(0, 1)
    if starts is not None:
        starts = torch.cat((starts.new_zeros(ahead, starts.shape[1]), starts + ahead))
    return torch.cat((before, x)), starts


def states_before(transitions: Tensor, cp: Axis) -> Tensor:
    """Compute the states [2 B, N, K, V] before this rank's pieces.

    Heads of samples are independent: each rank gets all pieces of its share of these rows, and returns their states.

    Args:
        transitions: what the pieces make of a state M: the two factors of T M + U, T | U [2 B, N, K, K + V].
    """
    by_row = transitions.unflatten(0, (2, -1)).movedim(0, 2)
    samples, heads, _, key_size, width = by_row.shape
    firsts = [i * samples * heads // cp.size for i in range(cp.size + 1)]
    shares = [stop - first for first, stop in zip(firsts, firsts[1:])]
    own = shares[cp.rank : cp.rank + 1] * cp.size
    ranks = exchange_rows(by_row.flatten(0, 1), cp, shares, own).unflatten(0, (cp.size, own[0]))
    ahead, behind = (x.unbind() for x in ranks.unbind(2))
    states = [transitions.new_zeros(own[0], key_size, width - key_size)]
    for piece in (*ahead, *behind[:0:-1]):
        passed, added = piece.split((key_size, width - key_size), -1)
        states.append(passed @ states[-1] + added)
    of_ranks = torch.cat([torch.stack((states[i], states[-1 - i]), 1) for i in range(cp.size)])
    before = exchange_rows(of_ranks, cp, own, shares)
    return before.unflatten(0, (samples, heads)).movedim(2, 0).flatten(0, 1)


def _of_all(x: Tensor, cp: Axis) -> Tensor:
    """Gather x [2 B, ...] of the pieces of all ranks, in the order of positions: [2 c, B, ...]."""
    by_ranks = gather_sequence(x.contiguous(), cp).unflatten(0, (cp.size, -1))
    return in_order(by_ranks).unflatten(0, (2 * cp.size, -1))


def _own(x: Tensor, cp: Axis) -> Tensor:
    """Take this rank's pieces of x [2 c, B, ...]: [2 B, ...]."""
    return torch.cat((x[cp.rank], x[len(x) - 1 - cp.rank]))
