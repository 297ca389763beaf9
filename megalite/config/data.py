"""Options of training and evaluation data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataConfig:
    """Training and evaluation data."""

    data: tuple[str, ...] = ()
    """PREFIX, or WEIGHT PREFIX pairs for a blend (PREFIX.bin and PREFIX.idx)."""
    valid_data: tuple[str, ...] = ()
    """Evaluation data, in the form of --data. Default: the second part of --split."""
    split: str = "99,1,0"
    """Proportions of documents for training, validation and test."""
    tokenizer: str | None = None
    """Tokenizer directory or file that the data was made with."""
    shuffle: bool = True
    """Shuffle samples by (seed, epoch)."""
    mock_data: bool = False
    """Train on synthetic sequences; requires no files."""
