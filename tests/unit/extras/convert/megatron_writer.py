"""Checkpoints that megatron-core itself writes, on the CPU: `python megatron_writer.py FOLDER`, a process of its own.

megatron-core takes a CUDA device for granted; `OnCPU` and the patches below give it the CPU instead. What it writes
is what its own code writes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here once, not in the first update of every rank
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")
# Neither is needed; importing them takes seconds.
sys.modules["wandb"] = None  # type: ignore[assignment]
torch.compile = lambda f=None, **_: f if f is not None else (lambda g: g)  # type: ignore[assignment]
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
torch.cuda.synchronize = lambda *_: None

from megatron.core import dist_checkpointing as dc  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async as writer  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

SEQ, VOCAB, PADDED, STEPS, ITERATION = 16, 100, 128, 2, 7
# As pretrain_gpt.py saves them; those that follow are the flags of a script.
_ARGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
    "seq_length": SEQ,
    "max_position_embeddings": SEQ,
    "padded_vocab_size": PADDED,
    "consumed_train_samples": 56,
    "init_method_std": 0.02,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "rotary_base": 10000,
    "num_experts": None,
    "softmax_type": "vanilla",
    "add_qkv_bias": False,
    "bias_gelu_fusion": True,
}
_LLAMA = {
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "position_embedding_type": "rope",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "rotary_percent": 1.0,
}
_GPT = {
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-6,
    "position_embedding_type": "learned_absolute",
    "swiglu": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "group_query_attention": False,
    "num_query_groups": 1,
}
# Model: options, tp, pp, type, distributed optimizer, formats.
MODELS: dict[str, tuple[dict[str, Any], int, int, torch.dtype, bool, tuple[str, ...]]] = {
    "llama": (_LLAMA, 2, 2, torch.bfloat16, True, ("fully_reshardable", "dp_reshardable", "torch")),
    "qwen": (
        {**_LLAMA, "qk_layernorm": True, "add_qkv_bias": True, "rotary_percent": 0.5, "use_rope_scaling": True},
        *(1, 1, torch.float32, True, ("fully_reshardable", "torch")),
    ),
    "gpt": (_GPT, 1, 1, torch.float32, False, ("torch_dist", "torch")),
    "gpt16": (_GPT, 1, 2, torch.bfloat16, False, ("torch_dist", "torch")),
}


class OnCPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        out = func(*args, **kwargs)
        # The optimizer compares types by name.
        return out.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and isinstance(out, str) else out


def _write_in_process(transforms: Any, use_msc: bool, rank: int, buckets: Any, results: Any) -> None:
    """Write the buckets one by one, instead of in processes of their own."""
    out = {}
    for number, bucket in enumerate(buckets):
        one: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[Any] = queue.Queue()
        count.put(number)
        writer.FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, one, count, False)
        done, result = one.get()
        out[done] = result
    results.put(out)


def build(args: dict[str, Any], tp: int, pp: int, dtype: torch.dtype) -> Any:
    """This rank's part of the model."""
    llama = args["swiglu"]
    cfg = TransformerConfig(
        num_layers=args["num_layers"],
        hidden_size=args["hidden_size"],
        num_attention_heads=args["num_attention_heads"],
        num_query_groups=args["num_query_groups"] if args["group_query_attention"] else None,
        ffn_hidden_size=args["ffn_hidden_size"],
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        gated_linear_unit=llama,
        activation_func=torch.nn.functional.silu if llama else torch.nn.functional.gelu,
        bias_activation_fusion=not llama,
        normalization=args["normalization"],
        layernorm_epsilon=args["norm_epsilon"],
        add_bias_linear=args["add_bias_linear"],
        add_qkv_bias=args.get("add_qkv_bias", False),
        qk_layernorm=args.get("qk_layernorm", False),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=cfg.qk_layernorm, normalization=args["normalization"])
    model = GPTModel(
        cfg,
        spec,
        vocab_size=PADDED,
        max_sequence_length=SEQ,
        position_embedding_type=args["position_embedding_type"],
        rotary_percent=args.get("rotary_percent", 1.0),
        rope_scaling=args.get("use_rope_scaling", False),
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
    )
    return model.to(dtype)


def write(rank: int, out: Path, name: str) -> None:
    """Make the model, update it twice with random gradients, and save it in every format, as pretrain_gpt.py does."""
    options, tp, pp, dtype, sharded, formats = MODELS[name]
    dist.init_process_group("gloo", init_method=f"file://{out}/{name}.rendezvous", rank=rank, world_size=tp * pp)
    ps.initialize_model_parallel(tp, pp)
    torch.manual_seed(ps.get_tensor_model_parallel_rank() + 10 * ps.get_pipeline_model_parallel_rank())
    args = {**_ARGS, **options, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    model = build(args, tp, pp, dtype)
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=sharded), model
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        weight_decay=0.1,
        clip_grad=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=sharded,
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    # Tied copies and replicas get the same gradients, as in training.
    for _ in range(STEPS):
        for parameter in wrapped.parameters():
            shared = getattr(parameter, "shared_embedding", False) or not getattr(
                parameter, "tensor_model_parallel", False
            )
            generator = torch.Generator().manual_seed(parameter.numel() + (0 if shared else rank))
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    for kind in formats:
        folder = out / f"{name}_{kind}"
        state = {"args": argparse.Namespace(**args, params_dtype=dtype), "checkpoint_version": 3.0}
        _save(folder, kind, {**state, "iteration": ITERATION}, model, optimizer, sharded, name == "qwen")
        (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
        if kind in ("fully_reshardable", "torch_dist"):
            plain = dc.load_plain_tensors(str(folder / f"iter_{ITERATION:07d}"))
            if rank == 0:
                torch.save({k: v for k, v in plain.items() if torch.is_tensor(v)}, out / f"{name}.pt")
    if tp * pp == 1:
        ids = torch.arange(2 * SEQ).view(2, SEQ) * 37 % VOCAB
        causal = torch.ones(1, 1, SEQ, SEQ).triu(1).bool()
        with torch.no_grad():
            logits = model.eval()(ids, torch.arange(SEQ).expand(2, -1), causal)
        torch.save({"ids": ids, "logits": logits}, out / f"{name}_logits.pt")


def _save(
    folder: Path, kind: str, state: dict[str, Any], model: Any, optimizer: Any, sharded: bool, by_layer: bool
) -> None:
    iteration = folder / f"iter_{ITERATION:07d}"
    if kind == "torch":
        tp, pp = ps.get_tensor_model_parallel_rank(), ps.get_pipeline_model_parallel_rank()
        last = f"_{pp:03d}" if ps.get_pipeline_model_parallel_world_size() > 1 else ""
        mine = iteration / f"mp_rank_{tp:02d}{last}"
        mine.mkdir(parents=True)
        state |= {"model": model.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
        torch.save(state, mine / "model_optim_rng.pt")
        if sharded:
            optimizer.save_parameter_state(str(mine / "distrib_optim.pt"))
    else:
        meta = {
            "distrib_optim_sharding_type": kind,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            # Layers under names of their own, or stacked.
            "non_homogeneous_layers": by_layer,
        }
        state["model"] = model.sharded_state_dict(metadata=meta)
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=meta)
        iteration.mkdir(parents=True, exist_ok=True)
        dc.save(state, str(iteration), content_metadata=meta)
    dist.barrier()


def main(out: Path) -> None:
    """Write everything: one process per rank, all at once."""
    writer._results_queue = queue.Queue()
    writer._process_memory = lambda: 0
    # Dropout is off, so that its random numbers matter to nobody.
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    writer.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_in_process)
    children = []
    for name, (_, tp, pp, *_) in MODELS.items():
        for rank in range(tp * pp):
            child = os.fork()
            if child:
                children.append(child)
                continue
            try:
                with OnCPU():
                    write(rank, out, name)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
