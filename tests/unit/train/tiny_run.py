"""A run of a tiny model, and samples of a user."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "seq_len": 8,
    "vocab_size": 31,
    "global_batch_size": 4,
    "device": "cpu",
    "train_steps": 3,
}


class Mine:
    """Samples of a user: tensors, lists and arrays."""

    def __len__(self) -> int:
        return 7

    def sample(self, i: int) -> Any:
        ids = [(3 * i + k) % 31 for k in range(9)]
        return (torch.tensor(ids), ids, np.array(ids, np.int16))[i % 3]
