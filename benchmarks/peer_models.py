"""The peers of benchmarks/peers.py: one tiny Llama in plain torch, Hugging Face transformers, DDP, DTensor and
torch.distributed.pipelining, as their own documentation and torchtitan put them together.

Every peer starts from megalite's initial weights, runs AdamW (fused) with gradients clipped at 1, and gives the loss of
the global batch. peer_sharded.py adds those that shard their states, peer_layouts.py lists who runs which layout.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from megalite.core.batch import Positions
from megalite.core.model.parameters import param_map
from megalite.core.model.partition import split_layers
from megalite.core.options.model import ModelConfig
from megalite.core.parts.positions.rope.tables import Rotary
from megalite.core.sharding import Shard as Cut
from megalite.runtime.options import cli

LAYERS, HIDDEN, HEADS, FFN, VOCAB, SEQ = 8, 256, 8, 704, 4096, 128
MICRO_BATCH, GLOBAL_BATCH = 2, 16
LR, WEIGHT_DECAY, BETAS, EPS, CLIP = 3e-4, 0.1, (0.9, 0.95), 1e-8, 1.0
SEED = 1234

MODEL_FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-heads {HEADS} --ffn-hidden-size {FFN} --vocab-size {VOCAB} "
    f"--seq-len {SEQ} --micro-batch-size {MICRO_BATCH} --global-batch-size {GLOBAL_BATCH} --lr {LR} "
    f"--lr-decay constant --seed {SEED} --weight-decay {WEIGHT_DECAY} --clip-grad {CLIP} --device cpu"
).split()

EXPERT_FLAGS = ["--arch", "mixtral", "--num-experts", "8", "--moe-topk", "2"]
# Configurations of transformers take it without declaring it.
SDPA: dict[str, Any] = {"attn_implementation": "sdpa"}

# A peer's step: this rank's share of the batch, tokens [samples, SEQ + 1] -> the loss of the global batch.
Step = Callable[[np.ndarray], float]


def model_config() -> ModelConfig:
    return cli.parse(MODEL_FLAGS).config.model


def initial_weights(cfg: ModelConfig) -> dict[str, torch.Tensor]:
    """megalite's initial value of every parameter under the names of the plain model, projections unpacked."""
    out = {}
    for name, spec in param_map(cfg).items():
        value = Cut(spec).initial(SEED)
        if name.endswith("qkv_proj.weight"):
            for part, piece in zip("qkv", value.chunk(3)):
                out[name.replace("qkv_proj", f"{part}_proj")] = piece
        elif name.endswith("gate_up_proj.weight") and value.dim() == 2:
            for part, piece in zip(("gate", "up"), value.chunk(2)):
                out[name.replace("gate_up_proj", f"{part}_proj")] = piece
        else:
            out[name] = value
    return out


# ------------------------------------------------------------------------------------------------------ plain torch


class PlainAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, seq = x.shape[:2]
        q, k, v = (
            p(x).view(batch, seq, -1, HIDDEN // HEADS).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PlainMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainBlock(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps), nn.RMSNorm(HIDDEN, eps)
        self.self_attn, self.mlp = PlainAttention(), PlainMLP()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLlama(nn.Module):
    """A Llama, or the part of one with the given layers: the embedding is in the first part, the head in the last."""

    def __init__(self, cfg: ModelConfig, weights: dict[str, torch.Tensor], layers: range = range(LAYERS)) -> None:
        super().__init__()
        if layers.start == 0:
            self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleDict({str(i): PlainBlock(cfg.norm_eps) for i in layers})
        if layers.stop == LAYERS:
            self.norm = nn.RMSNorm(HIDDEN, cfg.norm_eps)
            self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        rotary = Rotary(cfg.rotary_dim, cfg.rope_theta, cfg.rope_scaling)
        cos, sin = rotary(Positions.of_samples(SEQ), torch.device("cpu"))
        self.register_buffer("cos", torch.cat((cos, cos), -1), persistent=False)
        self.register_buffer("sin", torch.cat((sin, sin), -1), persistent=False)
        self.load_state_dict({name: weights[name] for name in self.state_dict()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embed_tokens"):
            x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        return self.lm_head(self.norm(x)) if hasattr(self, "lm_head") else x


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(modules: list[nn.Module]) -> torch.optim.Optimizer:
    params = [p for module in modules for p in module.parameters()]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=BETAS, eps=EPS, fused=True)


def update(optimizer: torch.optim.Optimizer, pipeline: dist.ProcessGroup | None = None) -> None:
    """Clip by the global norm (over the pipeline as well), then one AdamW step."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    # torch takes DTensors and tensors in one list neither for norms nor for clipping.
    kinds = [[p for p in params if isinstance(p, DTensor)], [p for p in params if not isinstance(p, DTensor)]]
    square = torch.zeros(())
    for kind in kinds:
        norm = nn.utils.get_total_norm([p.grad for p in kind])
        square += (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    if pipeline is not None:
        dist.all_reduce(square, group=pipeline)
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, CLIP, square.sqrt())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def accumulating(
    model: nn.Module,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    context: Any = nullcontext,
    gather_once: bool = False,
) -> Step:
    """A step that adds up the gradients of the micro-batches; with `gather_once` FSDP2 gathers for the first only."""
    optimizer = make_optimizer([model])

    def step(batch: np.ndarray) -> float:
        tokens = torch.from_numpy(batch)
        parts = tokens.split(MICRO_BATCH)
        total = torch.zeros(())
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            quiet = isinstance(model, DistributedDataParallel) and not last
            if isinstance(model, FSDPModule):
                model.set_reshard_after_backward(last or not gather_once)
            with model.no_sync() if quiet else nullcontext(), context():  # type: ignore[operator]
                loss = cross_entropy(logits_of(part[:, :-1]), part[:, 1:]) / len(parts)
                loss.backward()
            loss = loss.detach()
            total += loss.full_tensor() if isinstance(loss, DTensor) else loss
        if isinstance(model, (DistributedDataParallel, FSDPModule)):
            total = mean_over_ranks(total)
        update(optimizer)
        return total.item()

    return step


def plain_torch(tp: int, pp: int, vp: int) -> Step:
    cfg = model_config()
    model: nn.Module = PlainLlama(cfg, initial_weights(cfg))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    return accumulating(model, model)


def hf_transformers(tp: int, pp: int, vp: int) -> Step:
    import transformers

    cfg = model_config()
    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            rms_norm_eps=cfg.norm_eps,
            max_position_embeddings=SEQ,
            tie_word_embeddings=False,
            use_cache=False,
            **SDPA,
            rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
        )
    )
    model.load_state_dict({n if n.startswith("lm_head") else f"model.{n}": w for n, w in initial_weights(cfg).items()})
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    return accumulating(model, lambda tokens: model(input_ids=tokens).logits)


def hf_mixtral(tp: int, pp: int, vp: int) -> Step:
    import transformers

    cfg = cli.parse([*MODEL_FLAGS, *EXPERT_FLAGS]).config.model
    assert cfg.num_experts is not None
    model: nn.Module = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            num_local_experts=cfg.num_experts,
            num_experts_per_tok=cfg.moe_topk,
            rms_norm_eps=cfg.norm_eps,
            max_position_embeddings=SEQ,
            tie_word_embeddings=False,
            use_cache=False,
            **SDPA,
            rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
        )
    )
    stacks = {f"{leaf}.weight": leaf for leaf in ("experts.gate_up_proj", "experts.down_proj")}
    weights = {}
    for name, value in initial_weights(cfg).items():
        for ours, theirs in {**stacks, "router": "gate"}.items():
            name = name.replace(ours, theirs)
        weights[name if name.startswith("lm_head") else f"model.{name}"] = value
    model.load_state_dict(weights)
    return accumulating(model, lambda tokens: model(input_ids=tokens).logits)


# ---------------------------------------------------------------------------------------- DTensor and torch pipelines


def shard_plainly(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism over DTensor, activations replicated between layers."""
    plan: dict[str, Any] = {}
    layers: Any = model.layers
    for i in layers:
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"layers.{i}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"layers.{i}.{name}"] = RowwiseParallel()
    if hasattr(model, "embed_tokens"):
        plan["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if hasattr(model, "lm_head"):
        plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(model, mesh, plan)


def shard_sequence(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The same with sequence parallelism between layers (torchtitan's plan for Llama)."""
    plan: dict[str, Any] = {}
    layers: Any = model.layers
    for i in layers:
        layer = f"layers.{i}"
        plan[f"{layer}.input_layernorm"] = plan[f"{layer}.post_attention_layernorm"] = SequenceParallel()
        plan[f"{layer}.self_attn"] = PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        )
        plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{layer}.{name}"] = RowwiseParallel(output_layouts=Shard(1))
    if hasattr(model, "embed_tokens"):
        plan["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if hasattr(model, "lm_head"):
        plan["norm"] = SequenceParallel()
        plan["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(model, mesh, plan)


Sharder = Callable[[nn.Module, DeviceMesh], nn.Module]


def dtensor(sharder: Sharder) -> Callable[[int, int, int], Step]:
    def make(tp: int, pp: int, vp: int) -> Step:
        cfg = model_config()
        model = sharder(PlainLlama(cfg, initial_weights(cfg)), init_device_mesh("cpu", (tp,)))
        return accumulating(model, model, loss_parallel)

    return make


def torch_pipeline(schedule_name: str, sharder: Sharder | None = None) -> Callable[[int, int, int], Step]:
    def make(tp: int, pp: int, vp: int) -> Step:
        cfg = model_config()
        mesh = init_device_mesh("cpu", (pp, tp), mesh_dim_names=("pp", "tp"))
        group, rank = mesh.get_group("pp"), mesh.get_local_rank("pp")
        count = pp * vp
        v_shape = "ZBV" in schedule_name
        mine = [c * pp + (pp - 1 - rank if v_shape and c % 2 else rank) for c in range(vp)]
        weights, ranges = initial_weights(cfg), split_layers([1.0] * LAYERS, count)
        stages = []
        for index in mine:
            part: nn.Module = PlainLlama(cfg, weights, ranges[index])
            if sharder is not None:
                part = sharder(part, mesh["tp"])
            stages.append(PipelineStage(part, index, count, torch.device("cpu"), group=group))
        kind = getattr(schedules, schedule_name)
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        schedule = kind(stages if several else stages[0], GLOBAL_BATCH // MICRO_BATCH, loss_fn=cross_entropy)
        optimizer = make_optimizer([stage.submod for stage in stages])
        first, last = 0 in mine, count - 1 in mine

        def step(batch: np.ndarray) -> float:
            tokens = torch.from_numpy(batch)
            losses: list[torch.Tensor] = []
            with loss_parallel() if sharder is not None else nullcontext():
                schedule.step(
                    *([tokens[:, :-1]] if first else []),
                    target=tokens[:, 1:] if last else None,
                    losses=losses if last else None,
                )
            total = torch.zeros(())
            if last:
                values = [x.full_tensor() if isinstance(x, DTensor) else x for x in losses]
                total = torch.stack([v.detach() for v in values]).mean()
            dist.all_reduce(total, group=group)
            update(optimizer, group)
            return total.item()

        return step

    return make
