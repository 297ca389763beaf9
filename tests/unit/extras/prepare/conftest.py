from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.extras.prepare.chats import control, save_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer of 256 bytes and ChatML's two control tokens, without a chat template."""
    config = {"eos_token": {"content": "<|im_end|>"}}
    return save_bytes(tmp_path / "tokenizer", config, control("<|im_start|>"), control("<|im_end|>"))
