"""Build what trains a model from its config: stages, executor, optimizer. Nothing is global; everything is passed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from megalite.core import ops as kernels
from megalite.core.base.dtypes import DTYPES
from megalite.core.base.log import logger
from megalite.core.batch import Message
from megalite.core.engine import Engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.rendezvous import local_world_size
from megalite.core.model.dropout import MaskWords
from megalite.core.model.gpt import GPTStage
from megalite.core.model.layers import Layers
from megalite.core.model.parameters import buffer_map, param_map
from megalite.core.model.partition import stage_layers
from megalite.core.ops import Ops
from megalite.core.ops.cpu_memory import keep_freed_memory
from megalite.core.ops.sdpa import KERNELS, AttentionCase, flash_version, select, why_not
from megalite.core.optim.bucket import Bucket
from megalite.core.optim.loss_scale import LossScaler
from megalite.core.optim.make_buckets import make_buckets
from megalite.core.optim.optimizer import DistributedOptimizer
from megalite.core.optim.shares import Sharding
from megalite.core.optim.unit_weights import UnitWeights
from megalite.core.optim.weight_store import ShardedWeights
from megalite.core.options.recompute import MODES, Extent
from megalite.core.options.step import StepConfig
from megalite.core.parts.context import share_attention
from megalite.core.parts.memory.activations import ActivationOffload
from megalite.core.parts.memory.host_share import HostWeights
from megalite.core.parts.memory.offload import Offload, check_host_memory
from megalite.core.parts.memory.offload_memory import offloaded_bytes
from megalite.core.parts.options.context_parallel import LONG_ON_CPU, choose_comm, head_ranks
from megalite.core.parts.options.expert_options import choose_dispatch
from megalite.core.parts.options.fp8_options import fp8_layers
from megalite.core.parts.quant.fp8_products import select as select_fp8
from megalite.core.parts.quant.weight_codes import WeightCodes
from megalite.core.parts.schedules.choose import schedule_of
from megalite.core.pipeline.executor import Executor, Stage, forward_program
from megalite.core.pipeline.p2p import Channel
from megalite.core.pipeline.schedule import Placement
from megalite.core.sharding import Layout
from megalite.core.sharding.parameter import ShardedParameter
from megalite.core.sums import COUNTERS
from megalite.core.tensor_parallel.linear import ParallelLinear, WgradQueue
from megalite.core.tensor_parallel.products import Quantization

_C = TypeVar("_C", bound=StepConfig)


def build_engine(cfg: _C, ctx: ParallelContext) -> Engine[_C]:
    """Build the stages, executor and optimizer of this rank; parameters are not yet initialized."""
    dtype = DTYPES[cfg.train.precision]
    if ctx.device.type == "cpu":
        keep_freed_memory()
    ops = resolve_ops(cfg, ctx)
    logger.info(ops.describe())
    schedule = schedule_of(cfg, ctx.dp.size)
    if cfg.parallel.schedule == "auto" and ctx.pp.size > 1:
        logger.info(f"--schedule auto: {schedule.name}")
    if cfg.train.offload == "activations":
        layers = stage_layers(cfg)
        needed = offloaded_bytes(cfg, ctx.dp.size, schedule.name, layers, pinned=ctx.device.type != "cpu")
        remedy = "lower --micro-batch-size, or drop --offload"
        check_host_memory(needed[ctx.pp.rank], "--offload activations", remedy)
    t = cfg.train
    # A compiled graph does not see what is noted with a tensor.
    quant = select_fp8(t.fp8, fp8_layers(cfg.model, t), ctx.device, t.fp8_emulate, notes=not t.compile)
    stages = build_stages(cfg, ctx, schedule.placement, dtype, ops, quant)
    message = next(iter(stages.values())).message(cfg.model.seq_len // cfg.parallel.cp, cfg.train.micro_batch_size)
    executor = build_executor(stages, message, ctx)
    optimizer, unit_weights = _build_optimizer(cfg, ctx, stages, ops)
    if ctx.device.type == "cuda":
        # Parameters were made one by one before they moved into buckets.
        torch.cuda.empty_cache()
    fp16 = cfg.train.precision == "fp16"
    engine = Engine(
        cfg=cfg,
        ctx=ctx,
        stages=stages,
        executor=executor,
        schedule=schedule,
        eval_program=forward_program(schedule.programs[ctx.pp.rank]),
        optimizer=optimizer,
        scaler=LossScaler.of(cfg.optim, cfg.train.global_batch_size) if fp16 else LossScaler(),
        unit_weights=unit_weights,
    )
    made = (make(engine) for make in COUNTERS.values())
    engine.counters = [counter for counter in made if counter is not None]
    return engine


def build_executor(stages: Mapping[int, Stage], message: Message, ctx: ParallelContext) -> Executor:
    """Build what runs programs over this rank's stages, by global index; `message`: what they exchange."""
    activations, gradients = (Channel(axis, message, ctx.device) for axis in (ctx.pp, ctx.pp_grad))
    return Executor(stages, activations, gradients, ctx.ep.turns)


def resolve_ops(cfg: StepConfig, ctx: ParallelContext) -> Ops:
    """Choose a rank's ops, with the requested attention, which shares sequences over cp; log its kernels."""
    m, device = cfg.model, ctx.device
    ops = kernels.resolve(cfg.train.ops, device, DTYPES[cfg.train.precision])
    case = AttentionCase(
        device,
        DTYPES[cfg.train.precision],
        m.key_size,
        masked=any((m.window_of(i) or m.chunk_of(i) or m.seq_len) < m.seq_len for i in range(m.num_layers)),
        softcap=m.attention_softcap is not None,
        deterministic=cfg.train.deterministic,
    )
    name = cfg.train.attention
    attention = select(name, ops.attention, case)
    if device.type == "cuda":
        usable = [kernel for kernel in KERNELS if why_not(kernel, case) is None]
        order = ", ".join(usable)
        taken = f"{name} (torch takes one of {order})" if name == "auto" else name
        blocks = "sinks" if m.attention_sinks else "dropout" if m.attention_dropout else None
        how = taken if blocks is None else f"block by block, with {blocks}"
        logger.info(f"attention: {how}; FlashAttention is version {flash_version(case)}")
    comm, why = choose_comm(m, cfg.parallel, cfg.within_documents)
    if cfg.parallel.cp > 1 and cfg.parallel.cp_comm == "auto":
        logger.info(f"--cp-comm auto: {comm} ({why})")
    long = LONG_ON_CPU if device.type == "cpu" and m.seq_len >= LONG_ON_CPU else None
    shared = share_attention(
        comm,
        head_ranks(m, cfg.parallel),
        ctx,
        replace(ops, attention=attention),
        m.attention_sinks,
        dropout=m.attention_dropout > 0,
        recomputed=MODES[cfg.train.recompute].most > Extent.NOTHING,
        long=long,
    )
    # What communicates, or goes block by block, stays outside of compiled code.
    if cfg.train.compile and shared is not attention:
        shared = torch.compiler.disable(shared)
    return replace(ops, attention=shared)


def build_stages(
    cfg: StepConfig,
    ctx: ParallelContext,
    placement: Placement,
    dtype: torch.dtype,
    ops: Ops,
    quant: Quantization | None = None,
) -> dict[int, GPTStage]:
    """Build the stages of this rank; parameters are not yet initialized."""
    dispatch, why = choose_dispatch(cfg.model, cfg.parallel)
    if cfg.parallel.moe_dispatch == "auto" and ctx.ep.size > 1:
        logger.info(f"--moe-dispatch auto: {dispatch} ({why})")
    specs = {**param_map(cfg.model), **buffer_map(cfg.model)}
    words = MaskWords(cfg.train.seed, ctx.tp, cfg.sequence_parallel)
    split = stage_layers(cfg)
    layout = layout_of(cfg, ctx, placement)
    saving = ActivationOffload(ctx.device).one_pass if cfg.train.offload == "activations" else nullcontext
    stages: dict[int, GPTStage] = {}
    for index in placement.stages_of(ctx.pp.rank):
        layers = Layers(
            cfg=cfg.model,
            specs=specs,
            tp=ctx.tp,
            sequence_parallel=cfg.sequence_parallel,
            dtype=dtype,
            device=ctx.device,
            layout=layout,
            ops=ops,
            words=words,
            queue=WgradQueue(cfg.parallel.overlap_tp_reduce, one_behind=cfg.sequence_parallel),
            quant=quant,
            cp=ctx.axis("cp"),
            ep=ctx.ep,
            most_rows=cfg.parallel.moe_memory_factor,
            dispatch=dispatch,
            allocate=cfg.zero_stage(ctx.batch.size) < 3,
            tp_chunks=cfg.parallel.tp_chunks,
            recompute=MODES[cfg.train.recompute],
        )
        last = index == placement.num_stages - 1
        # An embedding that is used twice on one rank is one parameter.
        shared = (cfg.model.tie_embeddings or cfg.model.mtp_num_layers) and last and index > 0 and 0 in stages
        stages[index] = GPTStage(
            layers,
            split[index],
            first=index == 0,
            last=last,
            loss_chunk=cfg.train.loss_chunk,
            label_smoothing=cfg.train.label_smoothing,
            z_loss=cfg.train.z_loss,
            shared_embedding=stages[0].embed_tokens.weight if shared else None,
            compiled=cfg.train.compile,
            saving=saving,
        )
    return stages


def layout_of(cfg: StepConfig, ctx: ParallelContext, placement: Placement) -> Layout:
    """Describe where parameters live, given this rank's place and the options."""
    embedding = "embed_tokens.weight"
    copies = [name for name, spec in param_map(cfg.model).items() if embedding in (name, spec.tied_to)]
    separate_ends = placement.rank_of(0) != placement.rank_of(placement.num_stages - 1)
    return Layout(
        ctx.grid,
        ctx.rank,
        multiple=cfg.parallel.vocab_divisible_by,
        batch=ctx.grid.batch,
        sequence=("tp",) if cfg.sequence_parallel else (),
        tied=frozenset(copies if copies[1:] and separate_ends else ()),
    )


def _build_optimizer(
    cfg: StepConfig, ctx: ParallelContext, stages: dict[int, GPTStage], ops: Ops
) -> tuple[DistributedOptimizer, UnitWeights]:
    p = cfg.parallel
    chains = [chain for stage in stages.values() for chain in stage.chains()]
    modules = [module for chain in chains for module in chain]
    units: list[list[ShardedParameter]] = []
    seen: set[int] = set()
    for module in modules:
        # A parameter with two uses on this rank belongs to the first.
        units.append([p for p in module.parameters() if isinstance(p, ShardedParameter) and id(p) not in seen])
        seen.update(map(id, units[-1]))
    buckets = make_buckets(
        units,
        ctx,
        sharded=sharding_of(cfg, ctx),
        bucket_size=p.bucket_elements(ctx.batch.size),
        grad_dtype=DTYPES[cfg.train.grad_dtype],
        reduce_dtype=DTYPES["bf16" if cfg.train.grad_dtype == "bf16" else cfg.train.grad_reduce_dtype],
        overlap=p.overlap_grad_reduce,
        compression=cfg.train.compression,
        sharded_weights=HostWeights if cfg.train.offload == "optimizer+params" else ShardedWeights,
        coded_weights=WeightCodes,
        whole_below=p.zero_whole_below,
        cfg=cfg.optim,
    )
    # Gradients shrink with the width under muP.
    options = replace(cfg.optim, eps=cfg.optim.eps / cfg.model.width_multiplier)
    optimizer = DistributedOptimizer(buckets, options, ctx, ops, p.overlap_param_gather, *_offload(cfg, ctx, buckets))
    optimizer.beside += [bias for stage in stages.values() for bias in stage.log.states.values()]
    # Not inside compiled blocks, whose graph a hook would break.
    linear = [m for unit in modules for m in unit.modules() if isinstance(m, ParallelLinear) and not cfg.train.compile]
    optimizer.wait_before(dict.fromkeys([*modules, *linear]))
    weights = UnitWeights(chains, buckets, keep=p.zero_keep, prefetch=p.overlap_param_gather, debug=p.debug_zero)
    return optimizer, weights


def _offload(cfg: StepConfig, ctx: ParallelContext, buckets: list[Bucket]) -> tuple[Offload | None, Ops | None]:
    """Return the host's optimizer state and the kernels that update it; None where the device holds and updates it."""
    if not cfg.train.offload.startswith("optimizer"):
        return None, None
    folder = Path(cfg.train.offload_dir) if cfg.train.offload_dir is not None else None
    offload = Offload(buckets, ctx.device, folder, cfg.optim)
    if ctx.device.type == "cpu":
        return offload, None
    host_ops = kernels.resolve(None, "cpu", DTYPES[cfg.train.precision])
    logger.info(f"on the host: {host_ops.describe()}")
    return offload, host_ops


def sharding_of(cfg: StepConfig, ctx: ParallelContext) -> Sharding:
    """Return what `--zero` shards over the ranks that see different tokens of a batch."""
    ranks = ctx.batch.size
    group = cfg.parallel.zero_group_size(ranks, local_world_size())
    sharding = Sharding.stage(cfg.zero_stage(ranks), group, cfg.parallel.zero_reduce == "microbatch")
    return replace(sharding, host=cfg.train.offload == "optimizer+params")
