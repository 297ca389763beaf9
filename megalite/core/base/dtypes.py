"""Number types by name: one table for options, one for safetensors; Hugging Face uses torch's own names."""

from __future__ import annotations

import torch

# --precision, --grad-reduce-dtype, --dtype.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What safetensors files and manifests call them.
STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def torch_name(dtype: torch.dtype) -> str:
    """Name a type as torch and Hugging Face's config.json do: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def stored_name(dtype: torch.dtype) -> str:
    """Name a type as safetensors does: "BF16"."""
    return next(name for name, other in STORED.items() if other == dtype)
