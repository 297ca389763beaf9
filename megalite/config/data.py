"""Options of training and evaluation data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalite.errors import require


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
    document_mask: bool = False
    """Stop attention at document ends, restart positions there, and ignore targets across an end."""
    loss_on: Literal["answers", "all", "last"] = "all"
    """Chat data: learn the answers marked in PREFIX.mask.bin, the last one of each conversation, or every token."""
    loss_per: Literal["token", "sample"] = "token"
    """Chat data: whether every learned token counts the same in the loss, or every conversation."""
    long_documents: Literal["cut", "drop"] = "cut"
    """Chat data: cut conversations of more than seq_len + 1 tokens to their beginning, or drop them."""

    @property
    def within_documents(self) -> bool:
        """Whether these options alone say that attention stays within documents; chat data implies it too."""
        return self.document_mask or self.loss_on != "all" or self.loss_per == "sample"

    def __post_init__(self) -> None:
        for flag, given in (
            ("--document-mask", self.document_mask),
            (f"--loss-on {self.loss_on}", self.loss_on != "all"),
            (f"--loss-per {self.loss_per}", self.loss_per != "token"),
        ):
            require(
                not (given and self.mock_data),
                f"{flag} with --mock-data",
                "synthetic sequences have neither documents nor answers",
                "give --data PREFIX, or drop it",
            )
        files = " ".join(
            f"{flag} {' '.join(words)}"
            for flag, words in (("--data", self.data), ("--valid-data", self.valid_data))
            if words
        )
        require(
            not (self.mock_data and files),
            f"--mock-data with {files}",
            "the files would not be read: a run has one source of samples",
            "drop one of the two",
        )
