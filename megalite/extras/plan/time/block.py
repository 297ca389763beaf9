"""Time of one block, and of the output layer, for one micro-batch: computation and exposed communication."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import add

from megalite.core.model.kinds import FEED_FORWARDS, HEADS, MIXERS
from megalite.core.model.partition import block_work
from megalite.core.options.choices import BlockKind
from megalite.core.options.model import ModelConfig
from megalite.core.options.recompute import Extent
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.time.context import Context, waiting
from megalite.extras.plan.time.rates import Rates
from megalite.runtime.options.run import Config


@dataclass(frozen=True)
class Engine:
    """What the software fuses and overlaps.

    Attributes:
        fused: whether elementwise kernels are fused.
        flash: whether attention is one fused kernel.
        tp_waits, tp_hides: number of all-gathers and reduce-scatters over tp (an all-reduce is two) in a block's
            forward and backward pass: those that it waits for, and those that run beside a matrix product.
        overlap_pp: whether messages between pipeline ranks, and around a ring of cp, overlap with computation.
        overlap_dp, overlap_gather: whether gradients and weights over dp overlap with computation.
        grad_bytes: bytes per element of a gradient as it is reduced.
        saves_half: whether recomputation is chosen per op: half of the matrix products (torchtitan's `op` mode).
        accumulate: bytes per weight and micro-batch of a kernel that accumulates gradients (0: the product does).
        host: host time per block and forward pass, in seconds.
    """

    fused: bool = True
    flash: bool = True
    tp_waits: tuple[float, float] = (4, 2)
    tp_hides: tuple[float, float] = (0, 2)
    overlap_pp: bool = True
    overlap_dp: bool = True
    overlap_gather: bool = True
    grad_bytes: float = 4
    saves_half: bool = False
    accumulate: int = 0
    host: float = 0.0


def engine_of(cfg: Config) -> Engine:
    """Describe this project's software under the options of a run."""
    p, t = cfg.parallel, cfg.train
    beside = p.device != "cpu"  # gloo copies and adds on the cores that compute
    # Column-parallel layers reduce input gradients beside weight gradients. With sequence parallelism they gather their
    # inputs again beside the input gradient, and row-parallel layers theirs beside the weight gradient before it. A
    # schedule that moves weight gradients leaves all that input gradients need in the open, and gathers both operands
    # of weight gradients again beside those.
    gathers = 2 if cfg.sequence_parallel else 0
    back = (4, 2 * gathers) if p.schedule.startswith("zb") else (0, 4 + gathers)
    if not (p.overlap_tp_reduce and beside):
        back = (sum(back), 0)
    # Of a forward product in chunks, one chunk's collective is in the open.
    ahead = 4 / p.tp_chunks if beside else 4
    plain = 2 if "bf16" in (t.grad_dtype, t.grad_reduce_dtype) else 4
    return Engine(
        flash=cfg.model.attention_softcap is None,
        tp_waits=(ahead, back[0]),
        tp_hides=(4 - ahead, back[1]),
        overlap_pp=beside,
        overlap_dp=p.overlap_grad_reduce and beside,
        overlap_gather=p.overlap_param_gather and beside,
        grad_bytes=plain if t.compression is None else t.compression.element_bytes,
    )


@dataclass(frozen=True)
class Block:
    """Seconds of blocks (or the output layer) per micro-batch; `total` is `forward` and `backward`."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    host: float = 0.0
    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Block) -> Block:
        return Block(*map(add, vars(self).values(), vars(other).values()))

    def __rmul__(self, n: int) -> Block:
        return Block(*(n * a for a in vars(self).values()))


@dataclass(frozen=True)
class Workload:
    """What a rank computes of a micro-batch, and with what.

    Attributes:
        model: options of the model.
        samples: number of samples of a micro-batch.
        tp, context, sequence_parallel: how they are distributed.
        rates: rates of the device and its links.
        engine: what the software fuses and overlaps.
    """

    model: ModelConfig
    samples: int
    tp: int
    context: Context
    sequence_parallel: bool
    rates: Rates
    engine: Engine

    @classmethod
    def of(cls, cfg: Config, cluster: Cluster, engine: Engine | None = None) -> Workload:
        """Describe a micro-batch of a run; default engine: this project's."""
        return cls(
            cfg.model,
            cfg.train.micro_batch_size,
            cfg.parallel.tp,
            Context.of(cfg),
            cfg.sequence_parallel,
            Rates.of(cfg, cluster),
            engine or engine_of(cfg),
        )

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro-batch on this rank."""
        return self.samples * self.model.seq_len // self.context.ranks

    @property
    def over_tp(self) -> float:
        """Seconds of one all-gather or reduce-scatter of the residual stream over tp."""
        return self.rates.ring(self.rates.element * self.tokens * self.model.hidden_size, self.tp, 1)

    def tp_traffic(self, kind: BlockKind | None = None) -> tuple[float, float]:
        """Compute the seconds that a block waits for tensor-parallel messages, forward and backward.

        Args:
            kind: its kind, whose mixer may read what is narrower than the residual stream; None: as wide.
        """
        engine = self.engine
        exposed = 1 - self.rates.constants.overlap_tp
        width = self.model.hidden_size
        read, again = (width, width) if kind is None else MIXERS[kind.mixer].tp_widths(self.model)
        # The mixer gathers it, scatters its gradient and gathers it again; or it sums the gradient, in two messages.
        ahead, back = (read, read + again) if self.sequence_parallel else (width, 2 * read)
        out = []
        for waits, hides, wider in zip(engine.tp_waits, engine.tp_hides, (ahead - width, back - 2 * width)):
            out.append(self.over_tp * (waits + exposed * hides) * (1 + wider / width / max(1, waits + hides)))
        return out[0], out[1]


@lru_cache(maxsize=8192)
def block_time(load: Workload, kind: BlockKind, recomputed: Extent) -> Block:
    """Compute the time of one block of a kind, the mean over windows if it has any."""
    model = load.model
    rates = load.rates
    engine = load.engine
    gemm, gemm_back, in_core = _matrices(load, kind)
    core, core_back = _attention(load, kind)
    local = _elementwise(load, kind) * (1 if engine.fused else rates.constants.eager)
    traffic = load.tp_traffic(kind)
    compute = (core, core_back)
    shared, shared_back = waiting(model, kind, load.context, load.tp, load.tokens, compute, rates, engine.overlap_pp)
    forward = gemm + core + local + traffic[0] + shared
    again = {Extent.NOTHING: 0.0, Extent.CORE: core + in_core + shared, Extent.BLOCK: forward}[recomputed]
    again += in_core if load.context.ranks > 1 else 0.0
    if engine.saves_half:
        again = gemm / 2 + local
    added = engine.accumulate * block_work(model, kind).weights / load.tp / rates.memory if engine.accumulate else 0.0
    backward = gemm_back + core_back + 2 * local + added + traffic[1] + shared_back + again
    host = (engine.host + rates.constants.host) * (2 if recomputed is Extent.BLOCK else 1)
    return Block(
        gemm + gemm_back,
        core + core_back,
        3 * local + added,
        again,
        sum(traffic),
        shared + shared_back,
        0.0,
        host,
        forward + host,
        backward,
    )


def _matrices(load: Workload, kind: BlockKind) -> tuple[float, float, float]:
    """Compute the seconds of a block's matrix products: forward, backward, and of the core forward."""
    mixer = MIXERS[kind.mixer]
    feed_forward = FEED_FORWARDS[kind.feed_forward]
    rates = load.rates
    tp = load.tp
    core = mixer.core_matrices(load.model)
    forward = backward = in_core = 0.0
    for matrix in (*mixer.matrices(load.model), *feed_forward.matrices(load.model)):
        n, k = (size // (tp if ("tp", dim) in matrix.sharded_dims else 1) for dim, size in enumerate(matrix.shape))
        # What is whole on every rank works on its shard of the sequence, the core on the tokens of all ranks of cp.
        rows = load.tokens // (tp if load.sequence_parallel and not matrix.sharded_dims else 1)
        rows *= load.context.ranks if matrix in core else 1
        ahead, back = rates.products(rows, n, k)
        forward, backward = forward + ahead, backward + back
        in_core += ahead if matrix in core else 0.0
    return forward, backward, in_core


def _attention(load: Workload, kind: BlockKind) -> tuple[float, float]:
    """Compute the seconds of what a block computes between tokens, forward and backward."""
    model = load.model
    tp = load.tp
    cp = load.context.ranks
    rates = load.rates
    s, work = model.seq_len, block_work(model, kind)
    if plain := MIXERS[kind.mixer].plain_work(model, cp):
        forward = 2 * plain * load.samples * s / cp / tp / (rates.device.fp32 * rates.device.gemm)
        return forward, 3 * forward  # backward computes forward again
    # Kernels take values as wide as keys: narrower ones are filled up.
    filled = 2 * model.head_size / (model.head_size + model.value_size)
    if load.engine.flash or not work.attention:
        done = 2 * filled * work.causal_attention * s * load.samples / cp / tp
        forward = done / (rates.peak * rates.constants.attention)
        return forward, 2.5 * forward
    heads = load.samples * model.num_heads // tp
    products = rates.gemm(s // cp, s, model.head_size, heads) + rates.gemm(s // cp, model.head_size, s, heads)
    scores = s * s // cp * heads * (9 if model.attention_dropout else 4) / rates.memory
    return products + scores, 2 * (products + scores)


def _elementwise(load: Workload, kind: BlockKind) -> float:
    """Compute the seconds of a block's norms, residuals, dropout, rotation and activation, forward."""
    model = load.model
    residual = (22 if model.hidden_dropout else 18) * model.hidden_size / (load.tp if load.sequence_parallel else 1)
    inner = 2 * (MIXERS[kind.mixer].touched(model) + FEED_FORWARDS[kind.feed_forward].touched(model))
    return load.tokens * (residual + inner / load.tp) * load.rates.element / 2 / load.rates.memory


@lru_cache(maxsize=8192)
def head_time(load: Workload, rows: int) -> Block:
    """Compute the time of the output layer and the loss, with the projections of embeddings, if they have any.

    Args:
        rows: rows of the head's weight on this rank.
    """
    x = load.tokens
    h = load.model.embedding_width
    rates = load.rates
    # A head that is whole on every rank gathers rewards, and not its input.
    is_cut = any(spec.sharded_dims for spec in HEADS[load.model.head].specs(load.model))
    once = load.over_tp if is_cut else 0.0
    loss = 24 * x * rows / rates.memory * rates.element / 2
    gemm, back = rates.gemm(x, rows, h), rates.gemm(x, h, rows) + rates.gemm(rows, h, x)
    if load.model.embedding_size is not None:
        own = x // (load.tp if load.sequence_parallel else 1)
        for n, k in ((load.model.hidden_size, h), (h, load.model.hidden_size)):
            gemm, back = gemm + rates.gemm(own, n, k), back + rates.gemm(own, k, n) + rates.gemm(n, k, own)
    # The loss gathers three numbers per token. With sequence parallelism the input is gathered in both passes.
    gathers = 1 if load.sequence_parallel else 0
    traffic = gathers * once + rates.ring(12 * load.tp * x, load.tp, 1), 2 * once
    forward, backward = gemm + loss / 2 + traffic[0], back + loss / 2 + traffic[1]
    return Block(gemm=gemm + back, elementwise=loss, tp=sum(traffic), forward=forward, backward=backward)


def mtp_time(load: Workload) -> Block:
    """Compute the time of what a module that predicts further tokens adds to its block, but for the output layer."""
    h = load.model.hidden_size
    rates = load.rates
    rows = load.tokens // (load.tp if load.sequence_parallel else 1)
    forward, backward = rates.products(rows, h, 2 * h)
    local, traffic = 12 * h * rows * rates.element / 2 / rates.memory, embedding_time(load)
    return Block(
        gemm=forward + backward,
        elementwise=3 * local,
        tp=traffic,
        forward=forward + local + traffic / 2,
        backward=backward + 2 * local + traffic / 2,
    )


def embedding_time(load: Workload) -> float:
    """Compute the time of the embedding's traffic: an all-reduce, or a reduce-scatter and (backward) an all-gather."""
    return 2 * load.over_tp
