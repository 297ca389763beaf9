"""From a config to the objects that train: stages, executor, optimizer. Nothing is global, everything is passed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megalite import ops as kernels
from megalite.config.run import Config
from megalite.dist.context import ParallelContext
from megalite.dist.seeding import RngStreams
from megalite.log import logger
from megalite.model.gpt import GPTStage
from megalite.model.layers import Layers
from megalite.model.parameters import param_map
from megalite.model.partition import layer_split
from megalite.ops import Ops
from megalite.ops.cpu_memory import keep_freed_memory
from megalite.optim.bucket import make_buckets
from megalite.optim.loss_scale import LossScaler
from megalite.optim.optimizer import DistributedOptimizer
from megalite.pipeline.choose import schedule_of
from megalite.pipeline.executor import Executor, forward_program
from megalite.pipeline.p2p import Channel
from megalite.pipeline.schedule import Placement, Program
from megalite.sharding import ShardedParameter
from megalite.tensor_parallel.linear import WgradQueue

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Engine:
    """What one rank needs to run training steps.

    Attributes:
        cfg, ctx: the run's config (vocabulary resolved) and this rank's axes.
        stages: this rank's pipeline stages by global index.
        executor: runs programs over the stages.
        train_program, eval_program: this rank's operations of one step, and its forward half.
        optimizer, scaler: optimizer and loss scale.
    """

    cfg: Config
    ctx: ParallelContext
    stages: dict[int, GPTStage]
    executor: Executor
    train_program: Program
    eval_program: Program
    optimizer: DistributedOptimizer
    scaler: LossScaler

    @property
    def num_microbatches(self) -> int:
        return self.cfg.num_microbatches(self.ctx.dp.size)


def build_engine(cfg: Config, ctx: ParallelContext) -> Engine:
    """Build stages, executor and optimizer of this rank; parameters are not initialised yet."""
    dtype = DTYPES[cfg.train.precision]
    if ctx.device.type == "cpu":
        keep_freed_memory()
    ops = kernels.resolve(cfg.train.ops, ctx.device, dtype)
    logger.info(ops.describe())
    schedule = schedule_of(cfg, ctx.dp.size)
    if cfg.parallel.schedule == "auto" and ctx.pp.size > 1:
        logger.info(f"--schedule auto: {schedule.name}")
    stages = build_stages(cfg, ctx, schedule.placement, dtype, ops)
    message = next(iter(stages.values())).message(cfg.train.micro_batch_size)
    executor = Executor(stages, *(Channel(axis, message, ctx.device) for axis in (ctx.pp, ctx.pp_grad)))
    optimizer = _build_optimizer(cfg, ctx, stages, schedule.placement, ops)
    fp16 = cfg.train.precision == "fp16"
    fixed = cfg.optim.loss_scale
    scale = (fixed or cfg.optim.initial_loss_scale) if fp16 else 1.0
    program = schedule.programs[ctx.pp.rank]
    return Engine(
        cfg=cfg,
        ctx=ctx,
        stages=stages,
        executor=executor,
        train_program=program,
        eval_program=forward_program(program),
        optimizer=optimizer,
        scaler=LossScaler(scale, fp16 and fixed is None, cfg.optim.loss_scale_window),
    )


def build_stages(
    cfg: Config, ctx: ParallelContext, placement: Placement, dtype: torch.dtype, ops: Ops
) -> dict[int, GPTStage]:
    """This rank's stages, parameters not initialised."""
    specs = param_map(cfg.model)
    rng = RngStreams.for_rank(cfg.train.seed, ctx.tp.rank)
    split = layer_split(cfg.model, placement.num_stages)
    stages: dict[int, GPTStage] = {}
    for index in placement.stages_of(ctx.pp.rank):
        layers = Layers(
            cfg=cfg.model,
            specs=specs,
            tp=ctx.tp,
            sequence_parallel=cfg.sequence_parallel,
            dtype=dtype,
            device=ctx.device,
            vocab_multiple=cfg.parallel.vocab_divisible_by,
            ops=ops,
            rng=rng,
            queue=WgradQueue(cfg.parallel.overlap_tp_reduce),
        )
        last = index == placement.num_stages - 1
        # A tied embedding whose two uses live on one rank is one parameter.
        here = cfg.model.tie_embeddings and last and index > 0 and 0 in stages
        stages[index] = GPTStage(
            layers,
            split[index],
            first=index == 0,
            last=last,
            recompute=cfg.train.recompute,
            loss_chunk=cfg.train.loss_chunk,
            label_smoothing=cfg.train.label_smoothing,
            shared_embedding=stages[0].embed_tokens.weight if here else None,
            compiled=cfg.train.compile,
        )
    return stages


def _build_optimizer(
    cfg: Config, ctx: ParallelContext, stages: dict[int, GPTStage], placement: Placement, ops: Ops
) -> DistributedOptimizer:
    # Modules of several stages may share a parameter; a list of modules yields it once.
    params = list(nn.ModuleList(stages.values()).parameters())
    assert all(isinstance(p, ShardedParameter) for p in params)
    split = placement.rank_of(0) != placement.rank_of(placement.num_stages - 1)
    tied = frozenset({"embed_tokens.weight", "lm_head.weight"} if cfg.model.tie_embeddings and split else ())
    buckets = make_buckets(
        params,  # type: ignore[arg-type]
        ctx,
        tied=tied,
        sequence_parallel=cfg.sequence_parallel,
        zero=cfg.parallel.zero == 1,
        bucket_size=cfg.parallel.bucket_size,
        reduce_dtype=DTYPES[cfg.train.grad_reduce_dtype],
        overlap=cfg.parallel.overlap_grad_reduce,
    )
    optimizer = DistributedOptimizer(buckets, cfg.optim, ctx, ops, cfg.parallel.overlap_param_gather)
    optimizer.wait_before(module for stage in stages.values() for module in stage.units())
    return optimizer
