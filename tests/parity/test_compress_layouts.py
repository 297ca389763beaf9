"""Codecs in layouts: what they make of gradients, beside the whole gradients of one process.

A codec reads the gradients that one stage and rank of tp hold, bucket by bucket. Where stages cut between buckets it
reads the same numbers. Shards of tp, and samples cut over cp, make other blocks, in which it errs as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from megalite.core.options.compression import CODECS
from megalite.runtime.options.run import Config
from tests.codecs import specs_of
from tests.parity import jobs
from tests.parity.harness import STEPS, Result, one_process, put_together, trained
from tests.rows import always_run
from tests.workers import WorkerPool

SPECS = [specs_of(name)[-1] for name in sorted(CODECS)]
# On four ranks, as dp alone is.
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"cp": 2, "cp_comm": "ring"},
    {"tp": 2, "sequence_parallel": False, "zero": 0},
    {"cp": 2, "cp_comm": "gather", "zero": 0},
    {"pp": 2, "schedule": "zb-h1", "zero": 0},
    {"tp": 2, "cp": 2},
]
# On twice the ranks of dp 2.
STAGES: list[dict[str, Any]] = [{"pp": 2}, {"pp": 2, "vp": 2, "schedule": "interleaved"}, {"pp": 2, "zero": 0}]
# What codecs differ by in layouts, as their blocks do.
NO_WORSE = 1.3


def config(compress: str, layers: int = 2, **layout: Any) -> Config:
    cfg = jobs.make_config(jobs.llama(layers), {"bucket_size": 1, **layout}, compress=compress, micro_batch_size=2)
    return replace(cfg, optim=replace(cfg.optim, clip_grad=0.0))


def compressed(rank: int, cfgs: Sequence[Config], world: int, steps: int = STEPS, mistake: str = "") -> list[Result]:
    with pytest.MonkeyPatch.context() as patch:
        if mistake:
            patch.setattr(*MISTAKES[mistake]())
        return trained(rank, cfgs, world, steps=steps)


@cache
def whole() -> Result:
    return one_process(config("none"))


class Error:
    """Of gradients: relative to the whole ones, and its mean in deviations of the mean of a fair error."""

    def __init__(self, ranks: Sequence[Result]) -> None:
        held, exact = (put_together([r.gradients for r in results]) for results in (ranks, [whole()]))
        assert held.keys() == exact.keys()
        wrong = np.concatenate([(held[name] - exact[name]).ravel() for name in exact])
        size = np.sqrt(np.square(wrong).sum(dtype=np.float64))
        self.relative = size / np.sqrt(sum(np.square(grad).sum(dtype=np.float64) for grad in exact.values()))
        self.bias = abs(wrong.sum(dtype=np.float64)) / size


def errors(pool: WorkerPool, specs: Sequence[str], layout: dict[str, Any], *mistake: str) -> list[Error]:
    """By codec, in a layout of four ranks, all of which report the same figures."""
    ranks = pool.run(4, compressed, [config(spec, **layout) for spec in specs], 4, 1, *mistake)
    for results in zip(*ranks):
        assert all(result.steps == results[0].steps for result in results)
        # Of the first step nothing is compressed.
        assert results[0].steps[0][0] == pytest.approx(whole().steps[0][0], rel=1e-6)
    return [Error(results) for results in zip(*ranks)]


@pytest.fixture(scope="module")
def by_dp(pool: WorkerPool) -> list[Error]:
    return errors(pool, SPECS, {})


@pytest.mark.parametrize("layout", always_run(LAYOUTS, LAYOUTS[0]), ids=str)
def test_a_codec_errs_no_more_in_a_layout(pool: WorkerPool, by_dp: list[Error], layout: dict[str, Any]) -> None:
    for spec, error, alone in zip(SPECS, errors(pool, SPECS, layout), by_dp, strict=True):
        assert 0 < error.relative < NO_WORSE * alone.relative, f"{spec} {layout}"
        assert spec != "int8-stochastic" or error.bias < 5, layout


@pytest.mark.parametrize("layout", always_run(STAGES, STAGES[0]), ids=str)
def test_stages_cut_between_buckets(pool: WorkerPool, layout: dict[str, Any]) -> None:
    """Residuals, too: figures of the second step are those of two ranks with all layers."""
    zero, layers = {name: value for name, value in layout.items() if name == "zero"}, 2 * layout.get("vp", 1)
    expected = pool.run(2, compressed, [config(spec, layers, **zero) for spec in SPECS], 2)
    got = pool.run(4, compressed, [config(spec, layers, **layout) for spec in SPECS], 4)
    for spec, there, here in zip(SPECS, zip(*expected), zip(*got), strict=True):
        np.testing.assert_allclose(here[0].steps, there[0].steps, rtol=1e-5, err_msg=spec)
        held, meant = (put_together([result.gradients for result in results]) for results in (here, there))
        assert held.keys() == meant.keys()
        # A rounding may turn a code, or the choice of an element.
        turned = [(np.abs(held[name] - grad) > 1e-5 * np.abs(grad).max()).sum() for name, grad in meant.items()]
        assert sum(turned) < 1e-3 * sum(grad.size for grad in meant.values()), spec


def _rounded_down() -> tuple[Any, str, Callable[..., Any]]:
    from megalite.core.parts.codecs import int8_stochastic

    return int8_stochastic, "noise", lambda x, rank: x * 0


def _largest_magnitude() -> tuple[Any, str, Callable[..., Any]]:
    from megalite.core.parts.codecs import threshold

    signs_of = threshold.to_signs

    def to_signs(rows: Any, fraction: float) -> Any:
        signs, magnitudes = signs_of(rows, fraction)
        return signs, magnitudes / fraction

    return threshold, "to_signs", to_signs


MISTAKES = {"int8-stochastic": _rounded_down, "threshold:0.5": _largest_magnitude}


def test_a_mistake_of_a_codec_is_an_error_beyond_that(pool: WorkerPool, by_dp: list[Error]) -> None:
    for spec in MISTAKES:
        (error,) = errors(pool, [spec], {"tp": 2}, spec)
        assert error.relative > NO_WORSE * by_dp[SPECS.index(spec)].relative, spec
        assert spec != "int8-stochastic" or error.bias > 5
