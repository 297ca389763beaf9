"""Time of one block, and of the output layer, for one micro-batch: computation and exposed communication."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from functools import lru_cache

from megalite.base.hardware import Device
from megalite.config.model import ModelConfig
from megalite.config.run import Config
from megalite.extras.plan.cluster import Cluster, Constants
from megalite.families.parts import BlockKind
from megalite.model.ffn import FEED_FORWARDS
from megalite.model.mixers import MIXERS
from megalite.model.partition import block_work


@dataclass(frozen=True)
class Engine:
    """What the software fuses and overlaps.

    Attributes:
        fused: whether elementwise kernels are fused.
        flash: whether attention is one fused kernel.
        tp_waits, tp_hides: number of all-gathers and reduce-scatters over tp (an all-reduce is two) in a block's
            forward and backward pass: those that it waits for, and those that run beside a matrix product.
        overlap_pp: whether messages between pipeline ranks overlap with computation.
        overlap_dp, overlap_gather: whether gradients and weights over dp overlap with computation.
        grad_bytes: bytes per element of a gradient as it is reduced.
        saves_half: whether recomputation is chosen per op: half of the matrix products (torchtitan's `op` mode).
        accumulate: bytes per weight and micro-batch of a kernel that accumulates gradients (0: the product does).
        host: host time per block and forward pass, in seconds.
    """

    fused: bool = True
    flash: bool = True
    tp_waits: tuple[int, int] = (4, 2)
    tp_hides: tuple[int, int] = (0, 2)
    overlap_pp: bool = True
    overlap_dp: bool = True
    overlap_gather: bool = True
    grad_bytes: int = 4
    saves_half: bool = False
    accumulate: int = 0
    host: float = 0.0


def engine_of(cfg: Config) -> Engine:
    """Describe this project's software under the options of a run."""
    p, t = cfg.parallel, cfg.train
    beside = p.device != "cpu"  # gloo copies and adds on the cores that compute
    # Column-parallel layers reduce input gradients beside their weight gradients. With sequence parallelism they gather
    # their inputs again beside the input gradient, and row-parallel layers wait for their gradient.
    back = (2, 4) if cfg.sequence_parallel else (0, 4)
    if not (p.overlap_tp_reduce and beside):
        back = (sum(back), 0)
    return Engine(
        flash=cfg.model.attention_softcap is None,
        tp_waits=(4, back[0]),
        tp_hides=(0, back[1]),
        overlap_pp=beside,
        overlap_dp=p.overlap_grad_reduce and beside,
        overlap_gather=p.overlap_param_gather and beside,
        grad_bytes=1 if t.compress != "none" else 2 if "bf16" in (t.grad_dtype, t.grad_reduce_dtype) else 4,
    )


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
        if ranks == 1:
            return 0.0
        near = min(ranks, max(1, self.domain // inner))
        rate = self.nvlink if near == ranks else min(self.nvlink, self.network * near)
        return size * (ranks - 1) / ranks / rate + messages * self.latency * (1 + 0.15 * math.log2(ranks))


@dataclass(frozen=True)
class Block:
    """Seconds of blocks (or the output layer) per micro-batch; `total` is `forward` and `backward`."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    tp: float = 0.0
    host: float = 0.0
    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Block) -> Block:
        return Block(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def __rmul__(self, n: int) -> Block:
        return Block(*(n * a for a in astuple(self)))


@lru_cache(maxsize=8192)
def block_time(
    model: ModelConfig,
    kind: BlockKind,
    samples: int,
    tp: int,
    cp: int,
    sequence_parallel: bool,
    recompute: str,
    rates: Rates,
    engine: Engine,
) -> Block:
    """Compute the time of one block of a kind, the mean over windows if it has any."""
    x = samples * model.seq_len // cp
    gemm, gemm_back = _matrices(model, kind, x, tp, rates)
    core, core_back = _attention(model, kind, samples, cp, tp, rates, engine)
    local = _elementwise(model, kind, x, tp, sequence_parallel, rates) * (1 if engine.fused else rates.constants.eager)
    once, exposed = rates.ring(rates.element * x * model.hidden_size, tp, 1), 1 - rates.constants.overlap_tp
    traffic = [once * (waits + exposed * hides) for waits, hides in zip(engine.tp_waits, engine.tp_hides)]
    forward = gemm + core + local + traffic[0]
    again = {"none": 0.0, "selective": core, "full": forward}[recompute]
    if engine.saves_half:
        again = gemm / 2 + local
    added = engine.accumulate * block_work(model, kind).weights / tp / rates.memory if engine.accumulate else 0.0
    backward = gemm_back + core_back + 2 * local + added + traffic[1] + again
    host = (engine.host + rates.constants.host) * (2 if recompute == "full" else 1)
    return Block(
        gemm + gemm_back, core + core_back, 3 * local + added, again, sum(traffic), host, forward + host, backward
    )


def _matrices(model: ModelConfig, kind: BlockKind, x: int, tp: int, rates: Rates) -> tuple[float, float]:
    """Compute the seconds of a block's matrix products, forward and backward."""
    matrices = [*MIXERS[kind.mixer].matrices(model), *FEED_FORWARDS[kind.feed_forward].matrices(model)]
    shapes = [
        [size // (tp if ("tp", dim) in m.sharded_dims else 1) for dim, size in enumerate(m.shape)] for m in matrices
    ]
    forward = sum(rates.gemm(x, n, k) for n, k in shapes)
    return forward, sum(rates.gemm(x, k, n) + rates.gemm(n, k, x) for n, k in shapes)


def _attention(
    model: ModelConfig, kind: BlockKind, samples: int, cp: int, tp: int, rates: Rates, engine: Engine
) -> tuple[float, float]:
    """Seconds of what a block computes between tokens, forward and backward."""
    s, work = model.seq_len, block_work(model, kind)
    if engine.flash or not work.attention:
        forward = 2 * work.causal_attention * s * samples / cp / tp / (rates.peak * rates.constants.attention)
        return forward, 2.5 * forward
    heads = samples * model.num_heads // tp
    products = rates.gemm(s // cp, s, model.head_size, heads) + rates.gemm(s // cp, model.head_size, s, heads)
    scores = s * s // cp * heads * (9 if model.attention_dropout else 4) / rates.memory
    return products + scores, 2 * (products + scores)


def _elementwise(model: ModelConfig, kind: BlockKind, x: int, tp: int, sequence_parallel: bool, rates: Rates) -> float:
    """Compute the seconds of a block's norms, residuals, dropout, rotation and activation, forward."""
    residual = (22 if model.hidden_dropout else 18) * model.hidden_size / (tp if sequence_parallel else 1)
    inner = 2 * (MIXERS[kind.mixer].touched(model) + FEED_FORWARDS[kind.feed_forward].touched(model))
    return x * (residual + inner / tp) * rates.element / 2 / rates.memory


@lru_cache(maxsize=8192)
def head_time(
    model: ModelConfig, samples: int, rows: int, tp: int, cp: int, sequence_parallel: bool, rates: Rates, engine: Engine
) -> Block:
    """Compute the time of the output layer and the loss.

    Args:
        rows: rows of the vocabulary on this rank.
    """
    x, h = samples * model.seq_len // cp, model.hidden_size
    loss = 24 * x * rows / rates.memory * rates.element / 2
    gemm, back = rates.gemm(x, rows, h), rates.gemm(x, h, rows) + rates.gemm(rows, h, x)
    # The loss gathers three numbers per token. With sequence parallelism the input is gathered in both passes.
    once, gathers = rates.ring(rates.element * x * h, tp, 1), 1 if sequence_parallel else 0
    traffic = gathers * once + rates.ring(12 * tp * x, tp, 1), (gathers + 1 + (not sequence_parallel)) * once
    forward, backward = gemm + loss / 2 + traffic[0], back + loss / 2 + traffic[1]
    return Block(gemm=gemm + back, elementwise=loss, tp=sum(traffic), forward=forward, backward=backward)


def embedding_time(model: ModelConfig, samples: int, tp: int, cp: int, rates: Rates) -> float:
    """Compute the time of the embedding's traffic: an all-reduce, or a reduce-scatter and (backward) an all-gather."""
    return 2 * rates.ring(rates.element * samples * model.seq_len // cp * model.hidden_size, tp, 1)
