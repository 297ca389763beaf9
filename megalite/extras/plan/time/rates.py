"""Rates that a device and its links reach: seconds of a matrix product, and of messages between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.core.base.errors import require
from megalite.core.base.hardware import Device
from megalite.core.parts.options.fp8_options import fp8_layers
from megalite.extras.plan.cluster import Cluster, Constants
from megalite.runtime.options.run import Config


@dataclass(frozen=True)
class Rates:
    """Rates that a device and its links reach at the precision of a run.

    Attributes:
        in_fp8: part of the blocks whose products are in FP8.
        cast: bytes of memory traffic per element that is quantized for a backward product, and for a forward one.
    """

    device: Device
    constants: Constants
    domain: int
    network_peak: float
    peak: float
    element: int
    in_fp8: float = 0.0
    cast: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, cfg: Config, cluster: Cluster) -> Rates:
        full = cfg.train.precision == "fp32"
        device, fp8 = cluster.device, "off" if cfg.train.fp8_emulate else cfg.train.fp8
        given, other = f"--fp8 {fp8} on {device.name}", "choose another cluster, or drop --fp8"
        require(fp8 == "off" or device.fp8 > 0, given, "this GPU has no FP8 products", other)
        # Read and written; what spans a row or a tensor is read for its maximum first. Norms and activations write
        # the codes of blocks themselves.
        blocks = fp8 in ("blockwise", "mxfp8")
        return cls(
            device,
            cluster.constants,
            cluster.domain,
            cluster.network,
            device.fp32 if full else device.peak,
            4 if full else 2,
            0.0 if fp8 == "off" else len(fp8_layers(cfg.model, cfg.train)) / cfg.model.num_layers,
            (3.0, 1.0) if blocks else (5.0, 5.0),
        )

    @property
    def memory(self) -> float:
        return self.device.hbm * self.constants.memory

    @property
    def nvlink(self) -> float:
        return self.device.nvlink * self.constants.nvlink

    @property
    def network(self) -> float:
        return self.network_peak * self.constants.network

    @property
    def latency(self) -> float:
        return self.constants.latency

    def products(self, tokens: int, n: int, k: int, batch: int = 1) -> tuple[float, float]:
        """Compute the seconds of the products of a block's matrix [n, k], forward and backward: some blocks' in FP8.

        There, the operands' casts are added, and the device is taken to reach the same fraction of its FP8 peak.
        """
        shapes = (tokens, n, k), (tokens, k, n), (n, k, tokens)
        ahead, *back = (self.gemm(*shape, batch) for shape in shapes)
        if not self.in_fp8:
            return ahead, sum(back)
        codes, *codes_back = (self.gemm(*shape, batch, fp8=True) for shape in shapes)
        backward, forward = (batch * tokens * traffic / self.memory for traffic in self.cast)
        codes, codes_sum = codes + k * forward, sum(codes_back) + (2 * n + k) * backward
        share = self.in_fp8
        return share * codes + (1 - share) * ahead, share * codes_sum + (1 - share) * sum(back)

    def gemm(self, m: int, n: int, k: int, batch: int = 1, fp8: bool = False) -> float:
        """Compute the seconds of a product (m, k) x (k, n), bound by its tiles or by memory traffic."""
        side = self.device.tile
        tiles = -(-m // side) * -(-n // side)
        waves = tiles * batch / self.device.units
        busy = waves if waves < 1 else waves / (waves + (1 - 1 / waves) / 2)
        busy *= m * n / (tiles * side * side) * k / (k + self.constants.gemm_depth)
        compute = 2 * m * n * k / (self.peak * (self.device.fp8 if fp8 else 1.0) * self.device.gemm * busy)
        operand = 1 if fp8 else self.element
        return batch * max(compute, (operand * (m * k + k * n) + self.element * m * n) / self.memory)

    def ring(self, size: float, ranks: int, inner: int, messages: int = 1) -> float:
        """Compute the seconds of reduce-scatters or all-gathers of `size` bytes in total over ranks `inner` apart.

        Ranks of one host share its network cards: a ring enters and leaves a host once.
        """
        return self.transfer(size * (ranks - 1) / ranks, ranks, inner, messages)

    def transfer(self, sent: float, ranks: int, inner: int, messages: int, exchange: bool = False) -> float:
        """Compute the seconds in which each rank sends `sent` bytes around a ring, or to all others in an exchange."""
        if ranks == 1:
            return 0.0
        near = min(ranks, max(1, self.domain // inner))
        rate = self.nvlink if near == ranks else min(self.nvlink, self.network * near)
        if exchange and near < ranks:  # each rank sends what leaves the host by its own card
            rate = min(rate, self.network * (ranks - 1) / (ranks - near))
        return sent / rate + messages * self.latency * (1 + 0.15 * math.log2(ranks))
