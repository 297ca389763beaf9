"""Options of training and evaluation data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megalite.core.base.errors import in_range, require
from megalite.runtime.base.urls import cached_at, check_url, is_url


@dataclass(frozen=True)
class DataConfig:
    """Training and evaluation data."""

    data: tuple[str, ...] = ()
    """Training data: PREFIX (for PREFIX.bin and PREFIX.idx), or text or chats: FOLDER or FILE (.jsonl, .parquet),
    FOLDER:SPLIT; or WEIGHT and one of these in pairs for a blend. Text needs --tokenizer."""
    valid_data: tuple[str, ...] = ()
    """Evaluation data, in the same form as --data. Default: the second part of --split."""
    split: str = "99,1,0"
    """Proportions of documents for training, validation and test."""
    tokenizer: str | None = None
    """Directory or file of the tokenizer that the data was made with, or that text is tokenized with."""
    key: str = "text"
    """Text as data: JSON key or parquet column that holds it. Of chats, key of the messages; by default their usual
    keys are known."""
    chat_template: str | None = None
    """Chats as data: what writes them, as a name (chatml, llama3, qwen3, ...) or a jinja file. Default: the template in
    the tokenizer's folder."""
    skip_bad: bool = False
    """Text as data: skip records that are not text, up to 1 % of a piece, and warn; otherwise one ends the run."""
    data_lanes: int | None = None
    """Text as data: places that a batch is drawn from. Default: 64, fewer for little data."""
    shuffle_tokens: int | None = None
    """Text as data: tokens of a lane among which samples are shuffled, and that must be tokenized before the first of
    them is read. Default: 2^20, fewer for little data."""
    data_grows: bool = False
    """Text as data: files may be added while the run goes on, under names that sort after those of the others. A resume
    trains on what is there then: first the rest of the pass in progress, then the new files, then all of them."""
    shuffle: bool = True
    """Shuffle samples by seed and epoch."""
    mock_data: bool = False
    """Train on synthetic sequences; requires no files."""
    document_mask: bool = False
    """Stop attention at document boundaries, restart positions there, and ignore targets across them."""
    loss_on: Literal["answers", "all", "last"] | None = None
    """Chat data: tokens to train on: the answers, the last answer of each conversation, or all. Default: answers where
    they are marked, in PREFIX.mask.bin or by the template of chats as data."""
    loss_per: Literal["token", "sample"] = "token"
    """Chat data: give every trained token the same weight in the loss, or every conversation."""
    long_documents: Literal["cut", "drop"] = "cut"
    """Chat data: truncate conversations longer than seq_len + 1 tokens (cut), or drop them."""

    @property
    def within_documents(self) -> bool:
        """Whether these options alone keep attention within documents; chat data implies it too."""
        return self.document_mask or self.learns_part or self.loss_per == "sample"

    def local(self, cache_dir: str) -> DataConfig:
        """Return the same with local stand-ins in place of URLs."""
        data, valid_data, tokenizer = (
            tuple(str(cached_at(word, cache_dir)) if is_url(word) else word for word in words)
            for words in (self.data, self.valid_data, (self.tokenizer,) if self.tokenizer else ())
        )
        return replace(self, data=data, valid_data=valid_data, tokenizer=next(iter(tokenizer), None))

    @property
    def learns_part(self) -> bool:
        """Whether `--loss-on` asks for a part of the tokens."""
        return self.loss_on not in (None, "all")

    def __post_init__(self) -> None:
        for flag, words in (
            ("--data", self.data),
            ("--valid-data", self.valid_data),
            ("--tokenizer", (self.tokenizer or "",)),
        ):
            for word in words:
                check_url(flag, word)
        in_range(self, "data_lanes", 1, 1 << 16)
        in_range(self, "shuffle_tokens", 1, 1 << 32)
        require(
            self.shuffle or self.data_lanes in (None, 1),
            f"--no-shuffle with --data-lanes {self.data_lanes}",
            "in the order of the files there is one lane",
            "drop one of the two",
        )
        for flag, is_set in (
            ("--document-mask", self.document_mask),
            (f"--loss-on {self.loss_on}", self.learns_part),
            (f"--loss-per {self.loss_per}", self.loss_per != "token"),
        ):
            require(
                not (is_set and self.mock_data),
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
