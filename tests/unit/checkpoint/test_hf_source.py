"""Parts of tensors of a Hugging Face folder: those that were asked for, and no byte of another."""

from __future__ import annotations

import os
from itertools import product, starmap
from pathlib import Path

import pytest
import torch

from megalite.runtime.checkpoint.hf.source import HFSource
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint
from tests.unit.checkpoint.hf_models import CASES, make_model


@pytest.mark.parametrize("case", CASES)
def test_parts_are_parts_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    make_model(case, tmp_path)
    source = HFSource(tmp_path)
    read = [0]

    preadv = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(fd, buffers, offset)
        read[0] += count // 4
        return count

    monkeypatch.setattr(os, "preadv", counting)
    for spec, where in source.tensors():
        whole = source.full(spec, where)
        # What lies between alternating rows is read with them.
        most = max(step for part in source.parts(spec, where) for _, step, _ in part.runs)
        assert spec.numel <= read[0] <= most * spec.numel
        rows = [(a, b) for a in range(0, spec.shape[0], 7) for b in (a + 1, min(a + 17, spec.shape[0]))]
        inner = [[(0, n), (3, 11)] for n in spec.shape[1:]]
        for box in product(rows, *inner):
            expected = whole[tuple(slice(low, high) for low, high in box)]
            out = torch.full(expected.shape, torch.nan, dtype=torch.float64)
            read[0] = 0
            source.read(spec, where, [low for low, _ in box], out)
            assert torch.equal(out, expected.double())
            assert expected.numel() <= read[0] <= most * expected.numel()
        read[0] = 0


def test_weights_that_are_cut_while_they_are_read(tmp_path: Path) -> None:
    """A map of the file would end the process by SIGBUS, without a word."""
    make_model("llama", tmp_path)
    source, file = HFSource(tmp_path), tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: ends at byte \d+, \d+ bytes too early"):
        list(starmap(source.full, source.tensors()))
