"""Tokens on their way to experts and back, among the ranks that share the experts.

Every token goes to all its experts, however many that makes for one of them: nothing is dropped. Shapes: T tokens of
this rank, K experts of each, H features; R rows of this rank's experts. A rank of ep holds a block of neighboring
experts. All sorts are stable, and no kernel adds in a random order.

Two ways lead there (`DISPATCHES`, `--moe-dispatch`). A layer starts one, sends its tokens, and takes what arrives after
work that does not need it; gradients travel back over the same work (`collectives.Transfer`).

alltoall: rows are sorted by expert, so that those for a rank are neighbors, and exchanged; on arrival they lie source
after source, and are sorted by expert once more. A rank sends k x (N - 1) / N rows there and as many back, for x tokens
and N ranks, and a number for the weight of each. The outputs of a token are summed in the order of its choices: results
do not depend on the layout.

allgather: every rank gets all tokens, takes those for its experts, and what each makes of a token is summed over the
ranks. A rank sends x (N - 1) rows there and as many back: less where N is below k. Nothing is uneven, and no counts are
exchanged; memory is N times that of the tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.collectives import Splits, exchange_of, gather_of, scatter_of
from megalite.core.mesh.context import Axis
from megalite.core.ops import Ops
from megalite.core.ops.combine import Permute
from megalite.core.ops.grouped import Sizes

Sent: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Rows, and their weights."""


class Dispatch(ABC):
    """The way of the tokens of one micro-batch, under way from the start on.

    Args:
        ids_TK: experts of each token, int64 from 0 to `num_experts` - 1.
        num_experts: number of experts of the layer.
        ep: axis of the ranks that hold them.
        ops: the kernels in use.
        known: the `known` of an earlier dispatch of the same tokens; None: the host waits for it.

    Attributes:
        ops: as given.
        k: number of experts of each token.
        slots: number of tokens times k.
        order, inverse: slots [.. K] whose expert is here, by expert, and the row of each slot, after `arrive`.
        sizes: rows of each of this rank's experts, after `arrive`. Where the host need not know them, it does not wait.
        known: numbers of rows that the host has waited for, after `arrive`.
    """

    ops: Ops
    k: int
    slots: int
    order: torch.Tensor
    inverse: torch.Tensor
    sizes: Sequence[int]
    known: list[list[int]] | None

    @abstractmethod
    def __init__(
        self, ids_TK: torch.Tensor, num_experts: int, ep: Axis, ops: Ops, known: list[list[int]] | None = None
    ) -> None: ...

    def send(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, weigh: bool) -> None:
        """Start bringing tokens to their experts, with their weights, fp32; `weigh`: each times its own."""
        self._under_way: list[Sent] = [self._send(x_TH, weights_TK, weigh)]

    def arrive(self) -> Sent:
        """Wait for what `send` has started: rows [R, H] of this rank's experts, expert after expert, and the weights of
        the rows [R], None where they are weighed.
        """
        # Nothing else refers to what has arrived, which is copied in the order of the experts.
        return self._arrive(*self._under_way.pop())

    @abstractmethod
    def _send(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, weigh: bool) -> Sent: ...

    @abstractmethod
    def _arrive(self, rows: torch.Tensor, weights: torch.Tensor | None) -> Sent: ...

    @abstractmethod
    def bring_back(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Return the sum of the experts' outputs for every token, [T, H]."""


class AllToAll(Dispatch):
    """Sort and exchange.

    order, inverse: the sort by expert, int64 [T K], and the way back. own: slots of this rank for each expert. arrived,
    returned: the sort on arrival, int64 [R], and the way back; None where one rank holds all experts. sent, received:
    rows to and from each rank of ep.
    """

    def __init__(
        self, ids_TK: torch.Tensor, num_experts: int, ep: Axis, ops: Ops, known: list[list[int]] | None = None
    ) -> None:
        self.known = known
        ids = ids_TK.flatten()
        self.ep = ep
        self.ops = ops
        self.k, self.slots = ids_TK.shape[1], ids_TK.numel()
        self.local = num_experts // ep.size
        self.own = count(ids, num_experts)
        self.arriving = torch.empty_like(self.own)
        if ep.size > 1:
            collectives.all_to_all(self.arriving.view(ep.size, -1), self.own.view(ep.size, -1), ep).wait()
            self.counts = start_host_counts(self.own, self.arriving) if known is None else lambda: known
        self.order = _order(ids, num_experts)
        self.inverse = _inverse(self.order)
        self.arrived: torch.Tensor | None = None
        self.returned: torch.Tensor | None = None
        self.sent, self.received = Splits(), Splits()

    def _wait(self) -> None:
        """Wait for the counts, and order what will arrive."""
        if self.ep.size == 1:
            own = self.own  # a function of `self` would be a cycle, which keeps the order until a collection
            self.sizes = Sizes(own, lambda: start_host_counts(own)()[0])
            return
        self.known = self.counts()
        leaving, from_ranks = ([own[i : i + self.local] for i in range(0, len(own), self.local)] for own in self.known)
        experts = torch.arange(len(self.arriving), device=self.arriving.device) % self.local
        rows = sum(map(sum, from_ranks))
        arrived = _order(experts.repeat_interleave(self.arriving, output_size=rows), self.local)
        self.arrived, self.returned = arrived, _inverse(arrived)
        sizes = [sum(each) for each in zip(*from_ranks)]
        self.sizes = Sizes(self.arriving.view(self.ep.size, -1).sum(0), lambda: sizes)
        self.sent, self.received = [sum(each) for each in leaving], [sum(each) for each in from_ranks]

    def _send(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, weigh: bool) -> Sent:
        """Sort by expert, and start the exchange."""
        weights = None if weigh else Permute.apply(weights_TK.view(-1, 1), self.order, self.inverse)
        rows = self.ops.spread_rows(x_TH, self.order, self.inverse, self.k, weights_TK if weigh else None)
        # The numbers of rows have come to the host while the device sorts.
        self._wait()
        self.of_weights = exchange_of(self.ep, self.sent, self.received, in_turns=False)
        self.of_rows = exchange_of(self.ep, self.sent, self.received)
        # Few bytes, sent first: there when the rows are.
        weights = None if weights is None else self.of_weights.start(weights)
        return self.of_rows.start(rows), weights

    def _arrive(self, rows: torch.Tensor, weights: torch.Tensor | None) -> Sent:
        """Wait, and sort by expert."""
        rows = self._sorted(self.of_rows.wait(rows))
        return rows, None if weights is None else self._sorted(self.of_weights.wait(weights)).squeeze(1)

    def _sorted(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.arrived is None else Permute.apply(rows, self.arrived, self.returned)

    def bring_back(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Go the same way back; sum in the order of the choices."""
        if self.arrived is not None:
            rows_RH = Permute.apply(rows_RH, self.returned, self.arrived)
        back = exchange_of(self.ep, self.received, self.sent)
        return self.ops.combine_rows(back.wait(back.start(rows_RH)), self.order, self.inverse, self.k)


class AllGather(Dispatch):
    """Gather all tokens of ep, work on those for this rank's experts, sum over the ranks.

    order: slots (of N T K) whose expert is here, by expert, int64 [R]. inverse: the row of each slot, R where there is
    none, int64 [N T K].
    """

    def __init__(
        self, ids_TK: torch.Tensor, num_experts: int, ep: Axis, ops: Ops, known: list[list[int]] | None = None
    ) -> None:
        self.known = known
        all_ids, gathering = collectives.start_all_gather(ids_TK, ep)
        gathering.wait()
        self.ep = ep
        self.ops = ops
        self.k, self.slots = ids_TK.shape[1], ids_TK.numel()
        self.local = num_experts // ep.size
        own = all_ids.flatten() - ep.rank * self.local
        own = own.where((own >= 0) & (own < self.local), self.local)  # experts elsewhere come last
        sources = torch.arange(len(own), device=own.device) // ids_TK.numel()
        kinds = self.local + 1
        self.arriving = count(sources * kinds + own, ep.size * kinds).view(ep.size, kinds)[:, :-1].flatten()
        self.counts = start_host_counts(self.arriving) if known is None else lambda: known
        self.order = _order(own, kinds)
        self.inverse = _inverse(self.order)

    def _wait(self) -> None:
        """Wait for the counts, and leave out what other ranks work on."""
        self.known = self.counts()
        (arriving,) = self.known
        sizes = [sum(arriving[i :: self.local]) for i in range(self.local)]
        self.sizes = Sizes(self.arriving.view(self.ep.size, -1).sum(0), lambda: sizes)
        rows = sum(sizes)
        self.order, self.inverse = self.order[:rows], self.inverse.clamp(max=rows)

    def _send(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, weigh: bool) -> Sent:
        """Start gathering."""
        self.of_weights, self.of_tokens, self.weigh = gather_of(self.ep, in_turns=False), gather_of(self.ep), weigh
        weights = self.of_weights.start(weights_TK)
        return self.of_tokens.start(x_TH), weights

    def _arrive(self, rows: torch.Tensor, weights: torch.Tensor | None) -> Sent:
        """Wait, also for the counts, and take the rows of this rank's experts."""
        self._wait()
        x_TH = self.of_tokens.wait(rows)
        assert weights is not None
        weights_TK = self.of_weights.wait(weights)
        rows = self.ops.spread_rows(x_TH, self.order, self.inverse, self.k, weights_TK if self.weigh else None)
        if self.weigh:
            return rows, None
        return rows, Permute.apply(weights_TK.view(-1, 1), self.order, self.inverse).squeeze(1)

    def bring_back(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Sum what there is of each token, and that over the ranks."""
        y_TH = self.ops.combine_rows(rows_RH, self.order, self.inverse, self.k)
        back = scatter_of(self.ep)
        return back.wait(back.start(y_TH))


DISPATCHES: dict[str, type[Dispatch]] = {"alltoall": AllToAll, "allgather": AllGather}


def count(ids: torch.Tensor, num: int) -> torch.Tensor:
    """Count how often each of 0 to num - 1 occurs in `ids` (flat), int64 [num]; the host does not wait."""
    return torch.zeros(num, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))


def start_host_counts(*counts: torch.Tensor) -> Callable[[], list[list[int]]]:
    """Start bringing numbers of rows to the host, which the sizes of messages and products need.

    Returns:
        The function that waits for them: the one wait of a layer.
    """
    numbers = torch.stack(counts)
    if not numbers.is_cuda:
        return numbers.tolist
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[list[int]]:
        copied.synchronize()
        return host.tolist()  # type: ignore[no-any-return]

    return wait


def _order(ids: torch.Tensor, num: int) -> torch.Tensor:
    """Sort numbers below `num` stably; int64. A GPU sorts 8 bits at a time, so that few of them are few passes."""
    return ids.to(torch.uint8 if num <= 256 else torch.int32).argsort(stable=True)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
