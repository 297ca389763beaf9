"""The check before a save: copies are equal.

Copies are weights over dp, those that are not sharded and biases of routers over tp, and the two ends of a tied
embedding. A flipped bit in one copy, or copies that drift apart, do not show in the loss; a save would make them
permanent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megalite.core.mesh.collectives import all_gather, gather_digests, gather_texts
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.runtime.checkpoint.save import SaveError

Copies = Sequence[tuple[Axis, Sequence[tuple[str, torch.Tensor]]]]
"""(axis, names and weights that all its ranks hold copies of) pairs."""


@torch.no_grad()
def check_replicas(copies: Copies, ctx: ParallelContext) -> None:
    """Compare what this rank holds with its copies on other ranks; every rank calls it.

    A copy's fingerprint is the sum of its elements' bits as integers: any one flipped bit changes it. Before them ranks
    exchange a digest of the names, in the order in which the fingerprints will come.

    Raises:
        SaveError: copies differ, naming the parameter and the ranks; or ranks list other parameters, and nothing can be
            compared. Raised on every rank.
    """
    # All comparisons run on every rank, whatever the first finds: they are collectives.
    differences = [_difference(weights, axis, ctx) for axis, weights in copies]
    problem = next(filter(None, differences), "")
    if problems := [text for text in gather_texts(problem, ctx.world, ctx.device) if text]:
        raise SaveError(f"nothing saved: {problems[0]}")


def _difference(weights: Sequence[tuple[str, torch.Tensor]], axis: Axis, ctx: ParallelContext) -> str:
    """Describe the first difference over an axis; return "" when there is none."""
    lists = gather_digests(["\n".join(name for name, _ in weights)], axis, ctx.device)
    if others := [rank for rank, names in zip(axis.ranks, lists) if names != lists[0]]:
        return (
            f"rank {others[0]} lists other parameters than rank {axis.ranks[0]} as copies ({axis.name}), so that these "
            "cannot be compared; no weight need be wrong: this is an error of the program, please report it"
        )
    bits = {4: torch.int32, 2: torch.int16}
    # Offloaded shares are in host memory.
    sums = torch.stack([x.view(bits[x.element_size()]).sum(dtype=torch.int64).to(ctx.device) for _, x in weights])
    remedy = "resume from the last checkpoint, on other hardware if it recurs"
    gathered = torch.empty(axis.size * len(sums), dtype=torch.int64, device=ctx.device)
    all_gather(gathered, sums, axis).wait()
    for column, (name, _) in zip(gathered.view(axis.size, -1).cpu().t(), weights):
        if (column != column[0]).any():
            values, counts = column.unique(return_counts=True)
            if int(counts.max()) <= axis.size // 2:
                ranks = ", ".join(map(str, axis.ranks))
                what = f"the copies of {name} on ranks {ranks} differ ({axis.name}); which is wrong cannot be known"
                return f"{what}; {remedy}"
            # The value of the majority counts as the right one.
            majority = values[counts.argmax()]
            bad = [axis.ranks[i] for i in range(axis.size) if column[i] != majority]
            others = [rank for rank in axis.ranks if rank not in bad]
            return f"{name} of rank {bad} differs from its copies on rank {others} ({axis.name}); {remedy}"
    return ""
