"""Gather the keys and values of all ranks, as Llama 3 does (arXiv:2407.21783, section 3.3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megalite.batch import by_rank, in_order
from megalite.context_parallel.blocks import Case, Total
from megalite.dist import collectives
from megalite.dist.context import Axis


@dataclass(frozen=True)
class Gather:
    """Keys and values by all-gather, their gradients by reduce-scatter; see `blocks.Exchange`."""

    cp: Axis

    def attend(self, case: Case, total: Total, q: Tensor, kv: Tensor) -> None:
        """Attend to the keys of all ranks at once."""
        keys = self._of_all(kv)
        case.attend(total, q, keys, (range(len(keys)),))

    def gradients(self, case: Case, dq: Tensor, *saved: Tensor) -> Tensor:
        """Gather again, and sum the gradients of this rank's keys over the ranks."""
        dout, q, kv, out, lse = saved
        keys = self._of_all(kv)
        dkv = case.gradients(dq, dout, q, keys, out, lse, (range(len(keys)),))
        mine, work = collectives.start_reduce_scatter(by_rank(dkv, self.cp.size).flatten(0, 1), self.cp)
        work.wait()
        return mine

    def _of_all(self, kv: Tensor) -> Tensor:
        by_ranks, work = collectives.start_all_gather(kv, self.cp)
        work.wait()
        return in_order(by_ranks.unflatten(0, (self.cp.size, -1)))
