"""The exchange of codes of shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.optim.codec import BucketParam, Codec


class ExchangeCodec(Codec):
    """Sends each rank the code of its share, and adds up what it receives.

    Args:
        params, numel, axis, device: see `Codec`.
        encode, add: see `Exchange`.
        keeps_rest: what the codes leave out waits as a residual.
    """

    def __init__(
        self,
        params: Sequence[BucketParam],
        numel: int,
        axis: Axis,
        device: torch.device,
        encode: Callable[[Tensor, int], tuple[Tensor, Tensor | None]],
        add: Callable[[Tensor, Tensor], None],
        *,
        keeps_rest: bool,
    ) -> None:
        super().__init__(params, numel, axis, device)
        self._encode, self._add = encode, add
        if keeps_rest:
            self.residual = torch.zeros(numel, device=device)

    def _send(self, x: Tensor) -> None:
        message, rest = self._encode(x.view(self.axis.size, -1), self.axis.rank)
        if self.residual is not None:
            assert rest is not None
            self._next = [(self.residual, rest.view(-1))]
        self._messages = torch.empty_like(message)
        self._begin(collectives.all_to_all(self._messages, message, self.axis))

    def _receive(self, out: Tensor) -> None:
        self._works[0].wait()
        total = torch.zeros(self._share, device=out.device)
        for message in self._messages:
            self._add(total, message)
        del self._messages
        if len(out) == self._share:
            out.copy_(total)
        else:
            # ZeRO-0: the sum is gathered uncompressed, so that it is rounded once and equal on all ranks.
            self._begin(collectives.all_gather(out, total, self.axis)).wait()
