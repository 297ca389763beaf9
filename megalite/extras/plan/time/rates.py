"""Rates that a device and its links reach: seconds of a matrix product, and of messages between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.base.hardware import Device
from megalite.config.run import Config
from megalite.extras.plan.cluster import Cluster, Constants


@dataclass(frozen=True)
class Rates:
    """Rates that a device and its links reach at the precision of a run."""

    device: Device
    constants: Constants
    domain: int
    network_peak: float
    peak: float
    element: int

    @classmethod
    def of(cls, cfg: Config, cluster: Cluster) -> Rates:
        full = cfg.train.precision == "fp32"
        device = cluster.device
        return cls(
            device,
            cluster.constants,
            cluster.domain,
            cluster.network,
            device.fp32 if full else device.peak,
            4 if full else 2,
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

    def gemm(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """Compute the seconds of a product (m, k) x (k, n), bound by its tiles or by memory traffic."""
        side = self.device.tile
        tiles = -(-m // side) * -(-n // side)
        waves = tiles * batch / self.device.units
        busy = waves if waves < 1 else waves / (waves + (1 - 1 / waves) / 2)
        busy *= m * n / (tiles * side * side) * k / (k + self.constants.gemm_depth)
        compute = 2 * m * n * k / (self.peak * self.device.gemm * busy)
        return batch * max(compute, self.element * (m * k + k * n + m * n) / self.memory)

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
