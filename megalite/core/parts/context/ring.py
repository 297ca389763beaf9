"""Pass keys and values around a ring of ranks, each block under way while the one before it is attended to.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv:2310.01889). With heads and tails (see
`batch.runs_of`) every rank has half a block's work at every hop but the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megalite.core.batch import runs_of
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.parts.context.blocks import Case, Total


@dataclass(frozen=True)
class Ring:
    """Keys and values by c - 1 hops to the next rank, their gradients by c hops behind them; see `blocks.Exchange`."""

    cp: Axis

    def attend(self, case: Case, total: Total, q: Tensor, kv: Tensor) -> None:
        """Attend to one rank's keys after the other."""
        for hop in range(self.cp.size):
            following, work = self._pass_on(kv, hop)
            case.attend(total, q, kv, self._held(hop, len(kv)))
            work.wait()
            kv = following

    def gradients(self, case: Case, dq: Tensor, *saved: Tensor) -> Tensor:
        """Pass keys around again. The sum of a block's gradients follows it one hop behind, and ends where it began."""
        dout, q, kv, out, lse = saved
        total, arriving = None, None
        for hop in range(self.cp.size):
            following, work = self._pass_on(kv, hop)
            dkv = case.gradients(dq, dout, q, kv, out, lse, self._held(hop, len(kv)))
            if total is not None and arriving is not None:
                arriving.wait()
                dkv += total
            total, arriving = collectives.start_shift(dkv, self.cp)
            work.wait()
            kv = following
        assert total is not None
        assert arriving is not None
        arriving.wait()
        return total

    def _pass_on(self, kv: Tensor, hop: int) -> tuple[Tensor, collectives.Work]:
        """Start sending a block on; after the last hop nobody needs it."""
        return collectives.start_shift(kv, self.cp) if hop < self.cp.size - 1 else (kv, collectives.FinishedWork())

    def _held(self, hop: int, tokens: int) -> tuple[range, ...]:
        """Return the positions of the keys that are here after some hops."""
        size = self.cp.size
        return runs_of(tokens * size, size, (self.cp.rank - hop) % size)
