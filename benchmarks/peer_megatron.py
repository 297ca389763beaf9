"""Megatron-Core in benchmarks/peers.py: its GPT model of local layers (no Transformer Engine), its tensor-parallel
layers and its pipeline schedules, on CPU over gloo.

The rest is that of every peer: megalite's initial weights, torch's fused AdamW, clipping by the global norm. By its
code, its own optimizer, wrapper for data parallelism and fused kernels require CUDA, and sequence parallelism requires
Transformer Engine or Apex; they were not tried. Two patches: buffers of collectives are made on the CPU instead of the
current CUDA device, and so is the schedules' count of tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peer_models import (
    CLIP,
    FFN,
    GLOBAL_BATCH,
    HEADS,
    HIDDEN,
    LAYERS,
    MICRO_BATCH,
    SEQ,
    VOCAB,
    Step,
    initial_weights,
    make_optimizer,
    model_config,
)
from torch import nn


def megatron_missing() -> str | None:
    """Return why Megatron-Core cannot be imported, None if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.models.gpt import GPTModel  # noqa: F401
            from megatron.core.pipeline_parallel import schedules  # noqa: F401
    except ImportError as error:
        return f"{error} (to include it: pip install --no-deps megatron-core==0.16.1)"
    return None


class _TorchOnCPU:
    """torch, whose zeros are on the CPU whatever is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: object, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **options)


def build_model(tp: int, pp: int) -> nn.Module:
    """This rank's stage, its groups made and its weights set."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    schedules.torch = _TorchOnCPU()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
    # Its tracker without states: nothing draws random numbers, as dropout is 0 and weights are given.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    cfg = model_config()
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        normalization="RMSNorm",
        layernorm_epsilon=cfg.norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=False,  # waits for CUDA
        use_cpu_initialization=True,
        perform_initialization=False,
        # Of CUDA, or of Transformer Engine and Apex.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        VOCAB,
        SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=int(cfg.rope_theta),
    )
    load(model, initial_weights(cfg), parallel_state.get_tensor_model_parallel_rank(), tp)
    return model


def load(model: nn.Module, weights: dict[str, torch.Tensor], rank: int, tp: int) -> None:
    """Set a stage's weights, in Megatron-Core's order: q, k and v by head, gate and up by rank."""

    def of(name: str, dim: int = 0) -> torch.Tensor:
        return weights[name].chunk(tp, dim)[rank]

    state: dict[str, torch.Tensor] = {}
    if model.pre_process:
        state["embedding.word_embeddings.weight"] = of("embed_tokens.weight")
    if model.post_process:
        state |= {"decoder.final_layernorm.weight": weights["norm.weight"], "output_layer.weight": of("lm_head.weight")}
    decoder: Any = model.decoder
    for i, layer in enumerate(decoder.layers):
        here, there = f"decoder.layers.{i}", f"layers.{layer.layer_number - 1}"
        fc1 = [of(f"{there}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        heads = [of(f"{there}.self_attn.{part}_proj.weight").unflatten(0, (HEADS // tp, -1)) for part in "qkv"]
        state |= {
            f"{here}.input_layernorm.weight": weights[f"{there}.input_layernorm.weight"],
            f"{here}.self_attention.linear_qkv.weight": torch.stack(heads, dim=1).flatten(0, 2),
            f"{here}.self_attention.linear_proj.weight": of(f"{there}.self_attn.o_proj.weight", 1),
            f"{here}.pre_mlp_layernorm.weight": weights[f"{there}.post_attention_layernorm.weight"],
            f"{here}.mlp.linear_fc1.weight": torch.cat(fc1),
            f"{here}.mlp.linear_fc2.weight": of(f"{there}.mlp.down_proj.weight", 1),
        }
    # Its modules have further entries, for formats that are not used here.
    for name, param in model.named_parameters():
        param.data.copy_(state.pop(name))
    assert not state, f"no parameters for {list(state)}"


def update(optimizer: torch.optim.Optimizer, first_of_tp: bool) -> None:
    """Clip by the global norm, where vectors, which every tp rank holds whole, count once; then one AdamW step."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    counted = [p.grad for p in params if first_of_tp or p.dim() == 2]
    square = nn.utils.get_total_norm(counted).square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(params, CLIP, square.sqrt())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def megatron_core(tp: int, pp: int, vp: int) -> Step:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    warnings.filterwarnings("ignore", module="megatron")
    model = build_model(tp, pp)
    optimizer = make_optimizer([model])
    forward_backward = get_forward_backward_func()
    first_of_tp = parallel_state.get_tensor_model_parallel_rank() == 0
    positions = torch.arange(SEQ).expand(MICRO_BATCH, -1)
    hidden = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = losses.mean()
        return loss, loss.detach().clone()

    def forward(parts: Iterator[torch.Tensor], model: nn.Module) -> tuple[torch.Tensor, Any]:
        tokens = next(parts)
        return model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:]), mean

    def step(batch: np.ndarray) -> float:
        losses = forward_backward(
            forward_step_func=forward,
            data_iterator=iter(torch.from_numpy(batch).split(MICRO_BATCH)),
            model=model,
            num_microbatches=GLOBAL_BATCH // MICRO_BATCH,
            seq_length=SEQ,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        total = torch.stack(losses).mean() if losses else torch.zeros(())
        if pp > 1:
            dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        update(optimizer, first_of_tp)
        return total.item()

    return step
