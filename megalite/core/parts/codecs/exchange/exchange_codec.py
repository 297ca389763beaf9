"""What the codecs share that exchange codes of shares."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from megalite.core.mesh import collectives
from megalite.core.optim.codec import Codec


class ExchangeCodec(Codec):
    """Codec in which each rank receives everyone's code of its share, and sums them in fp32 in rank order."""

    def _send_rows(self, message: Tensor) -> None:
        """Start sending row i of `message` to rank i."""
        self._message = torch.empty_like(message)
        self._begin(collectives.all_to_all(self._message, message, self.axis))

    def _receive(self, out: Tensor) -> None:
        self._works[0].wait()
        total = torch.zeros(self._share, device=out.device)
        for row in self._message:
            self._add(total, row)
        del self._message
        if len(out) == self._share:
            out.copy_(total)
        else:
            # ZeRO-0: the sum is gathered uncompressed, so that it is rounded once and equal on all ranks.
            self._begin(collectives.all_gather(out, total, self.axis)).wait()

    @abstractmethod
    def _add(self, total: Tensor, row: Tensor) -> None:
        """Add the code received from one rank to `total`, the sum of this rank's share."""
