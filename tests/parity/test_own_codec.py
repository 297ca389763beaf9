"""A codec of gradients from outside: an entry of CODECS, and nothing else knows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.core.options.compression import CODECS, Compression, Gradients
from megalite.core.parts.codecs.exchange import Exchange
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.workers import WorkerPool


@dataclass(frozen=True)
class Mantissa(Exchange):
    """`--compress mantissa`: each rank sends the gradients of a share in bf16; they are summed in fp32."""

    form = "mantissa"

    @classmethod
    def read(cls, argument: str | None) -> Compression | None:
        return cls() if argument is None else None

    def encode(self, rows: Tensor, rank: int) -> tuple[Tensor, None]:
        return rows.bfloat16(), None

    def add(self, total: Tensor, message: Tensor) -> None:
        total += message

    @property
    def element_bytes(self) -> float:
        return 2.0

    def memory(self, grads: Gradients) -> tuple[int, int]:
        return 0, 4 * grads.waiting + 6 * grads.largest


@contextmanager
def added() -> Iterator[None]:
    CODECS["mantissa"] = Mantissa
    try:
        yield
    finally:
        del CODECS["mantissa"]


LAYOUTS: list[dict[str, Any]] = [{"zero": 1}, {"zero": 0}, {"tp": 2}, {"pp": 2, "schedule": "zb-h1"}]


def trained(rank: int, layout: dict[str, Any], world: int) -> list[tuple[float, float]]:
    with added():
        return jobs.train(rank, jobs.make_config(jobs.llama(), layout, compress="mantissa"), world)


def test_one_file_adds_a_codec(pool: WorkerPool) -> None:
    expected = jobs.train(0, jobs.make_config(jobs.llama()), 1)
    for layout in LAYOUTS:
        ranks = pool.run(4, trained, layout, 4)
        assert all(rank == ranks[0] for rank in ranks)
        # bf16 rounds to 8 bits: gradients of ranks, not their sum.
        np.testing.assert_allclose(ranks[0], expected, rtol=2**-8)
        assert ranks[0] != expected


def test_it_is_planned_and_named_in_errors() -> None:
    with added():
        coded, plain = (_planned(name) for name in ("mantissa", "none"))
        assert coded > plain
        with pytest.raises(UserError, match="must be none, int8, mantissa, int8-stochastic, topk:F"):
            _planned("mantissa:3")


def _planned(compress: str) -> int:
    cfg: Config = jobs.make_config(jobs.llama(), compress=compress)
    return memory_per_rank(cfg, Grid.from_config(cfg.parallel, 4))[0].temporary
