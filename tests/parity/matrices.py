"""Training by rules that take whole matrices: figures, first moments and the last weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.harness import Gradients, assert_same_gradients, boxes_of, put_together

CUT = {"zero_whole_below": 500}
SMALL = {"bucket_size": 900, **CUT}
MIXTRAL = jobs.llama(init_std=0.12, num_experts=8, moe_topk=2, moe_ffn_size=24, moe_aux_loss_coeff=0.02)
Outcome = tuple[list[tuple[float, float]], Gradients, Gradients]


def trained(rank: int, cfgs: Sequence[Config], world: int) -> list[Outcome]:
    """By config: (loss, gradient norm) of each step; this rank's first moments after one step; masters at the end."""
    out = []
    for cfg in cfgs:
        engine = jobs.start(rank, cfg, world)
        steps, moments = jobs.run_steps(engine, 1), boxes_of(engine)
        steps += jobs.run_steps(engine, jobs.STEPS - 1, first=2)
        out.append((steps, moments, boxes_of(engine, "master")))
        jobs.check_copies(engine)
    return out


@cache
def one_process(cfg: Config) -> tuple[list[tuple[float, float]], dict[str, np.ndarray], dict[str, np.ndarray]]:
    ((steps, moments, masters),) = trained(0, [cfg], 1)
    return steps, put_together([moments]), put_together([masters])


def assert_same(ranks: Sequence[Outcome], single: Config, what: str) -> None:
    steps, moments, masters = one_process(single)
    for number, (got, *_) in enumerate(ranks):
        np.testing.assert_allclose(got, steps, rtol=1e-5, err_msg=f"{what}, rank {number}")
    assert_same_gradients([moments for _, moments, _ in ranks], moments, what)
    held = put_together([masters for *_, masters in ranks])
    assert held.keys() == masters.keys()
    for name, expected in masters.items():
        # Of one update, whose size is the learning rate of 1e-3: a bias of keys has no gradient but rounding.
        np.testing.assert_allclose(held[name], expected, rtol=0, atol=1e-6, err_msg=f"{what}: {name}")


@contextmanager
def products_in_fp32() -> Iterator[None]:
    """Let torch.optim.Muon round nothing to bf16: by `bfloat16` in torch 2.13, by `to` in 2.15."""

    def to(tensor: torch.Tensor, *args: Any, cast: Any = torch.Tensor.to, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.bfloat16:
            options["dtype"] = torch.float32
        return cast(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
        patch.setattr(torch.Tensor, "to", to)
        yield
