"""Parts of tensors of a Hugging Face folder: those that were asked for, and no byte of another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.hf import source as hf
from tests.unit.checkpoint.hf_models import CASES, make_model


@pytest.mark.parametrize("case", CASES)
def test_parts_are_parts_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    make_model(case, tmp_path)
    source = hf.HFSource(tmp_path)
    read = [0]

    class Counting:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def __getitem__(self, index: Any) -> torch.Tensor:
            part: torch.Tensor = self.tensor[index]
            read[0] += part.numel()
            return part

    class File:
        def __init__(self, file: Any) -> None:
            self.file = file

        def get_slice(self, name: str) -> Counting:
            return Counting(self.file.get_slice(name))

    opened = hf._opened

    @contextlib.contextmanager
    def counting(path: Path) -> Iterator[File]:
        with opened(path) as file:
            yield File(file)

    monkeypatch.setattr(hf, "_opened", counting)
    for spec, where in source.tensors():
        whole = source.whole(spec, where)
        assert read == [spec.numel]
        rows = [(a, b) for a in range(0, spec.shape[0], 7) for b in (a + 1, min(a + 17, spec.shape[0]))]
        columns = [()] if len(spec.shape) == 1 else [((0, spec.shape[1]),), ((3, 11),)]
        for box in ((r, *c) for r in rows for c in columns):
            expected = whole[tuple(slice(low, high) for low, high in box)]
            out = torch.full(expected.shape, torch.nan, dtype=torch.float64)
            read[0] = 0
            source.read(spec, where, [low for low, _ in box], out)
            assert torch.equal(out, expected.double())
            assert read == [expected.numel()]
        read[0] = 0
