"""What must be right before anything is measured, for benchmarks/gpu_rows.py: steps and kernels against a CPU's.

Every model trains three steps on a CPU in fp32 and on the device in fp32 and bf16: loss and gradient norm are compared.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_steps import MICROBATCHES
from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.ops import resolve
from megalite.core.step import train_step
from megalite.runtime.options import cli
from tests.ops_contract import cases, check_case, poisoned_memory

_STEPS = 3
# Largest relative errors of the loss and of the gradient norm. Measured on a CPU in bf16: 2.1e-4 and 6.5e-3.
_LIMITS = {"fp32": (1e-5, 1e-4), "low": (1e-3, 2e-2)}
_SIZES = (
    "--num-layers 4 --hidden-size 256 --num-heads 4 --ffn-hidden-size 384 --vocab-size 512 --seq-len 128 --lr 3e-4 "
    f"--mock-data --micro-batch-size 2 --global-batch-size {2 * MICROBATCHES}"
)
_GROUPED = "--num-kv-heads 2"
_EXPERTS = "--num-experts 8 --moe-topk 2 --moe-ffn-size 128"
_LATENTS = "--kv-lora-rank 64 --qk-nope-head-dim 32 --qk-rope-head-dim 16 --v-head-dim 32 --q-lora-rank 64"
_WINDOW = "--window 40 --head-dim 64"
_FP8 = f"{_GROUPED} --precision bf16 --fp8"

# name -> further flags; FP8 is emulated on the CPU.
MODELS = {
    "llama": _GROUPED,
    "gpt2": "--arch gpt2",
    "gpt2 with dropout": "--arch gpt2 --hidden-dropout 0.1 --attention-dropout 0.1",
    "gpt-neox": "--arch gpt_neox",
    "qwen3": f"--arch qwen3 {_GROUPED}",
    "olmo2": f"--arch olmo2 {_GROUPED}",
    "gemma2": f"--arch gemma2 {_GROUPED} {_WINDOW} --query-pre-attn-scalar 64",
    "gemma3": f"--arch gemma3_text {_GROUPED} {_WINDOW} --window-pattern 3 --query-pre-attn-scalar 64",
    "mixtral": f"--arch mixtral {_GROUPED} {_EXPERTS} --seed 7",
    "qwen3-moe": f"--arch qwen3_moe {_GROUPED} {_EXPERTS}",
    "glm4-moe": f"--arch glm4_moe {_GROUPED} {_EXPERTS} --qk-norm head --mtp-num-layers 1",
    "gpt-oss": f"--arch gpt_oss {_GROUPED} {_WINDOW} {_EXPERTS}",
    "llama4": f"--arch llama4_text {_GROUPED} --num-experts 8 --moe-topk 1 --moe-ffn-size 128"
    " --attention-chunk-size 40 --no-rope-freq 3",
    "deepseek-v2": f"--arch deepseek_v2 {_LATENTS} {_EXPERTS}",
    "deepseek-v3": f"--arch deepseek_v3 {_LATENTS} {_EXPERTS} --mtp-num-layers 1",
    "qwen3-next": f"--arch qwen3_next {_GROUPED} {_EXPERTS} --linear-attention-freq 2 --head-dim 64"
    " --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 64 --linear-value-head-dim 64",
    "recompute, offload": f"{_GROUPED} --recompute full --offload optimizer",
    "activations offloaded": f"{_GROUPED} --recompute full --offload activations",
    "selective, chunks of the loss": f"{_GROUPED} --recompute selective --loss-chunk 64",
    "muon": f"{_GROUPED} --optimizer muon",
    "lamb": f"{_GROUPED} --optimizer lamb",
    "adamw in bf16": f"{_GROUPED} --precision bf16 --moments-dtype bf16 --master-dtype bf16",
    "fp16": f"{_GROUPED} --precision fp16",
    "fp8 blockwise": f"{_FP8} blockwise",
    "fp8 tensorwise": f"{_FP8} tensorwise",
    "fp8 rowwise": f"{_FP8} rowwise",
    "fp8 blockwise, experts": f"{_FP8} blockwise --arch mixtral {_EXPERTS}",
}


def train(flags: str, device: torch.device) -> np.ndarray:
    """Return (loss, gradient norm) of every step."""
    cfg = cli.parse(f"{_SIZES} {flags}".split()).config
    if device.type == "cpu" and "--fp8" in flags:
        cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, fp8_emulate=True))
    engine = build_engine(cfg, ParallelContext.single(device))
    engine.optimizer.init_parameters(cfg.train.seed)
    seen = []
    for step in range(1, _STEPS + 1):
        shape = cfg.train.global_batch_size, cfg.model.seq_len + 1
        # Skewed, so that there is something to learn.
        tokens = (np.random.default_rng(step).random(shape) ** 3 * cfg.model.vocab).astype(np.int64)
        status = train_step(engine, tokens, step)
        seen.append((status.loss, status.grad_norm))
    return np.array(seen)


def check_model(name: str, device: torch.device) -> dict[str, Any]:
    """Return the largest relative errors of losses and gradient norms against a CPU.

    Raises:
        AssertionError: one is over its limit.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    flags = MODELS[name]
    low = next((p for p in ("bf16", "fp16") if f"--precision {p}" in flags), None)
    want = train(flags, torch.device("cpu"))
    found, limits = dict[str, float](), dict[str, float]()
    for precision in (low,) if low else ("fp32", "bf16"):
        got = train(f"{flags} --precision {precision}", device)
        for i, figure in enumerate(("loss", "grad_norm")):
            found[f"{precision}_{figure}"] = float(np.abs(got[:, i] / want[:, i] - 1).max())
            limits[f"{precision}_{figure}"] = _LIMITS["fp32" if precision == "fp32" else "low"][i]
    assert all(error <= limits[key] for key, error in found.items()), f"over the limit: {found}"
    return found


def check_kernels(spec: str, dtype: torch.dtype, part: int, parts: int, device: torch.device) -> dict[str, Any]:
    """Check every `parts`-th case of the contract of kernels from number `part` on, against float64.

    Raises:
        AssertionError: a case fails; all that do are named.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    if device.type == "cpu":
        spec, parts = "torch", 100  # interpreted kernels would take minutes
    ops, failed, mine = resolve(spec, device, dtype), [], cases()[part::parts]
    with poisoned_memory():
        for case in mine:
            try:
                result = check_case(case, ops, device, dtype)
            except Exception as e:
                if device.type == "cuda":
                    torch.cuda.synchronize()  # if this fails too, so do all other cases of this process
                failed.append(f"{case.name}: {type(e).__name__}: {str(e).splitlines()[0][:150] if str(e) else ''}")
            else:
                if not result.ok:
                    failed.append(f"{case.name}: error {result.error:.2g} {result.fault}")
    assert not failed, "; ".join(failed)
    return {"cases": len(mine)}
