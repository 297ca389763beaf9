"""FP8 in the plan of time: products at twice the rate, casts as traffic, and GPUs without them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.core.base.errors import UserError
from megalite.core.base.hardware import DEVICES
from megalite.core.mesh.grid import Grid
from megalite.core.pipeline.schedule import placement_of
from megalite.extras.plan.cluster import Cluster, Constants
from megalite.extras.plan.time.rates import Rates
from megalite.extras.plan.time.replicas import replicas_of
from megalite.extras.plan.time.step import StepTime, step_time
from megalite.runtime.options.cli import parse

FLAGS = "--preset llama-3-8b --vocab-size 128256 --mock-data --precision bf16 --device cuda --global-batch-size 64"


def cluster(name: str) -> Cluster:
    device = DEVICES[name]
    return Cluster(device, 8, 8, device.network, Constants())


def planned(name: str, *flags: str) -> StepTime:
    return step_time(parse([*FLAGS.split(), "--zero", "2", *flags]).config, Grid.of(8), cluster(name))


def test_products_and_casts_by_hand() -> None:
    """Large products take half the time; 3 bytes per element and backward cast, 1 where norm or activation casts."""
    cfg = parse([*FLAGS.split(), "--fp8", "blockwise"]).config
    rates = Rates.of(cfg, cluster("h100"))
    plain, tokens, n, k = replace(rates, in_fp8=0.0), 8192, 28672, 4096
    (ahead, back), (codes, codes_back) = plain.products(tokens, n, k), rates.products(tokens, n, k)
    assert codes == pytest.approx(ahead / 2 + tokens * k / rates.memory)
    assert codes_back == pytest.approx(back / 2 + 3 * tokens * (2 * n + k) / rates.memory)
    half = replace(rates, in_fp8=0.5).products(tokens, n, k)
    assert half == pytest.approx(((ahead + codes) / 2, (back + codes_back) / 2))


def test_a_step_gains_what_its_products_gain() -> None:
    bf16, kept = planned("h100"), planned("h100", "--fp8", "blockwise", "--fp8-keep-bf16", "8")
    by_recipe = {name: planned("h100", "--fp8", name) for name in ("blockwise", "rowwise", "tensorwise")}
    for fp8 in by_recipe.values():
        assert bf16.total - fp8.total == pytest.approx(bf16.gemm - fp8.gemm, rel=0.05)
        assert 1.2 < bf16.total / fp8.total < 1.5
    assert by_recipe["blockwise"].total < by_recipe["rowwise"].total == by_recipe["tensorwise"].total
    assert kept.gemm == pytest.approx((bf16.gemm + by_recipe["blockwise"].gemm) / 2, rel=0.02)


def test_zero_3_gathers_one_byte_per_element() -> None:
    """Matrices of the blocks; embedding, output layer, norms and blocks in bf16 take two."""
    block = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    for flags, coded in (([], 0), (["blockwise"], 32), (["rowwise"], 0), (["blockwise", "--fp8-keep-bf16", "3"], 26)):
        cfg = parse([*FLAGS.split(), "--zero", "3", *(["--fp8", *flags] if flags else [])]).config
        (own,) = replicas_of(cfg, Grid.of(8), placement_of("1f1b", 1, 1), [range(32)], 0, 8)
        assert own.coded == coded * block
        rates = Rates.of(cfg, cluster("h100"))
        size = 2 * own.elements - own.coded
        assert own.gathered(rates, 1) == pytest.approx(rates.ring(size, 8, 1, 1))


def test_gpus_without_fp8_are_refused() -> None:
    with pytest.raises(UserError, match="--fp8 rowwise on a100-80g: this GPU has no FP8 products"):
        planned("a100-80g", "--fp8", "rowwise")
