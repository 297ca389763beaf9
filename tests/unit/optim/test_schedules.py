"""Learning rate and loss scale, against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any, Literal

import pytest

from megalite.core.base.errors import UserError
from megalite.core.optim.loss_scale import LossScaler, ScaleRule
from megalite.core.options.lr import LR_DECAYS, learning_rate, weight_decay
from megalite.core.options.optim import OptimConfig
from megalite.core.options.rates import rates_at
from megalite.extras.compat.dialect import DIALECT
from megalite.runtime.options.cli import parse


def cfg(decay: str, **options: Any) -> OptimConfig:
    return OptimConfig(lr=0.1, init_lr=0.01, min_lr=0.001, warmup_steps=100, lr_decay=decay, **options)


@pytest.mark.parametrize(
    ("step", "linear", "cosine"),
    [
        (0, 0.01, 0.01),
        (50, 0.055, 0.055),
        (100, 0.1, 0.1),
        (500, 0.056, 0.0590956),
        (1000, 0.001, 0.001),
        (5000, 0.001, 0.001),
    ],
)
def test_figures(step: int, linear: float, cosine: float) -> None:
    assert learning_rate(step, cfg("linear"), 1000) == pytest.approx(linear, rel=1e-6)
    assert learning_rate(step, cfg("cosine"), 1000) == pytest.approx(cosine, rel=1e-6)


@pytest.mark.parametrize(("rule", "factor"), [("sqrt", 2.0), ("linear", 4.0)])
def test_rates_scale_with_the_batch(rule: str, factor: float) -> None:
    argv = f"--lr 1e-4 --min-lr 1e-5 --init-lr 2e-6 --warmup-steps 10 --global-batch-size 1024 --scale-lr {rule}"
    config = parse(f"{argv} --base-batch-size 256 --lr-decay linear".split()).config
    assert (config.rates.lr, config.rates.min_lr, config.rates.init_lr) == pytest.approx(
        (1e-4 * factor, 1e-5 * factor, 2e-6 * factor), rel=1e-12
    )
    # Halfway up, at the top, halfway down, at the end.
    figures = {5: 5.1e-5, 10: 1e-4, 55: 5.5e-5, 100: 1e-5}
    rates = [learning_rate(step, config.rates, 100) for step in figures]
    assert rates == pytest.approx([factor * rate for rate in figures.values()], rel=1e-12)
    # What is recorded are the options as given: read back, they scale once.
    assert config.optim.lr == 1e-4


@pytest.mark.parametrize(
    ("ramp", "figures"),
    [
        (None, [0.04, 0.06, 0.08, 0.1, 0.1]),
        ("linear", [0.04, 0.06, 0.08, 0.1, 0.1]),
        # 0.02 + 0.08 (1 - cos(pi k / 4)) / 2
        ("cosine", [0.0317157288, 0.06, 0.0882842712, 0.1, 0.1]),
    ],
)
def test_weight_decay_ramps(ramp: Literal["linear", "cosine"] | None, figures: list[float]) -> None:
    up = OptimConfig(start_weight_decay=0.02, weight_decay=0.1, weight_decay_ramp=ramp)
    assert [weight_decay(step, up, 4) for step in range(1, 6)] == pytest.approx(figures, abs=1e-9)
    down = dataclasses.replace(up, start_weight_decay=0.1, weight_decay=0.02)
    assert [weight_decay(step, down, 4) for step in range(1, 6)] == pytest.approx([0.12 - x for x in figures], abs=1e-9)
    assert weight_decay(3, OptimConfig(weight_decay=0.3), 4) == 0.3


@pytest.mark.parametrize(
    ("shape", "decay", "rates"),
    [
        ("deepspeed-log", "constant", [0, 0, 0.04306766, 0.06826062, 0.08613531, 0.1, 0.1, 0.1]),
        ("deepspeed-linear", "constant", [0, 0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.1]),
        ("deepspeed-linear", "linear", [0, 0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.08, 0.06, 0.04, 0.02, 0, 0]),
        # The formula of their scheduler: 0.1 (1e-4 + (1 - 1e-4) (1 + cos(pi k / 5)) / 2), k = 1 at the sixth step.
        ("deepspeed-linear", "cosine", [0, 0, 0.02, 0.04, 0.06, 0.08, 0.09045180, 0.06545430, 0.03455570, 0.00955820]),
    ],
)
def test_rates_of_deepspeed(
    shape: Literal["deepspeed-linear", "deepspeed-log"], decay: str, rates: list[float]
) -> None:
    options = OptimConfig(lr=0.1, warmup_steps=5, warmup_shape=shape, lr_decay=decay, lr_decay_steps=10)
    if decay == "cosine":
        options = dataclasses.replace(options, min_lr=0.1 * 1e-4)
    assert [learning_rate(step, options, 99) for step in range(1, len(rates) + 1)] == pytest.approx(rates, abs=5e-9)


def test_warmup_stable_decay_and_constant() -> None:
    rates = {step: learning_rate(step, cfg("wsd", wsd_decay_steps=200), 1000) for step in (50, 100, 800, 900, 1000)}
    assert rates == pytest.approx({50: 0.055, 100: 0.1, 800: 0.1, 900: 0.0505, 1000: 0.001})
    # By default the last tenth decays.
    assert learning_rate(900, cfg("wsd"), 1000) == pytest.approx(0.1)
    assert learning_rate(950, cfg("wsd"), 1000) == pytest.approx(0.0505)
    assert [learning_rate(s, cfg("constant"), 1000) for s in (50, 100, 5000)] == pytest.approx([0.055, 0.1, 0.1])


WSD = "--lr 1 --lr-decay wsd"
THEIRS = "--lr 1 --lr-decay-style WSD --global-batch-size 16 --rampup-batch-size 8 8 160"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            f"{WSD} --warmup-steps 10 --wsd-decay-steps 100 --train-steps 50",
            "--wsd-decay-steps 100: is more than --warmup-steps 10 leaves of the schedule's 50 steps; give 40 or less, "
            "or raise --train-steps to 110",
        ),
        (
            f"{WSD} --warmup-steps 10 --wsd-decay-steps 41 --lr-decay-steps 50 --train-steps 900",
            "schedule's 50 steps; give 40 or less, or raise --lr-decay-steps to 51",
        ),
        (f"{WSD} --warmup-steps 50 --wsd-decay-steps 1 --train-steps 50", "lower --warmup-steps 50, or raise"),
        # 100 + 200 samples; 53 steps are 324, of which 320 are needed.
        (
            f"{WSD} --warmup-steps 10 --wsd-decay-steps 30 --train-steps 50 --batch-size-schedule '0:4 25:8' "
            "--lr-by samples",
            "schedule's 37.5 full batches of 8 samples; give 27 or less, or raise --train-steps to 53",
        ),
        (
            "--lr 1 --lr-decay-style WSD --lr-warmup-iters 10 --lr-wsd-decay-iters 100 --train-iters 50",
            "schedule's 50 steps; give 40 or less, or raise --train-iters to 110",
        ),
        # 50 iterations are 20 of 8 samples and 30 of 16.
        (f"{THEIRS} --lr-warmup-samples 160 --lr-wsd-decay-samples 640 --train-iters 50", "40 full batches of 16"),
        (f"{THEIRS} --lr-warmup-samples 160 --lr-wsd-decay-iters 40 --train-samples 640", "40 full batches of 16"),
    ],
)
def test_a_decay_longer_than_the_warmup_leaves_is_refused(words: str, error: str) -> None:
    """The rate would fall from 0.9 to 0.4 and then 0.39 in the first of these."""
    with pytest.raises(UserError) as caught:
        parse(shlex.split(words), dialect=DIALECT)
    assert error in str(caught.value)


def test_a_decay_may_begin_where_the_warmup_ends() -> None:
    parse(shlex.split(f"{WSD} --warmup-steps 10 --wsd-decay-steps 40 --train-steps 50"))
    parse(shlex.split(f"{THEIRS} --lr-warmup-samples 160 --lr-wsd-decay-samples 480 --train-iters 50"), dialect=DIALECT)
    # Within the warm-up the rate rises whatever comes after it.
    parse(shlex.split(f"{WSD} --warmup-steps 100 --wsd-decay-steps 40 --train-steps 50"))
    # A decay that nobody asked for takes what is left of its tenth.
    late = parse(shlex.split(f"{WSD} --warmup-steps 98 --train-steps 100")).config
    rates = [rates_at(late.optim, late.train, step).lr for step in range(97, 101)]
    assert rates == pytest.approx([97 / 98, 1.0, 0.5, 0.0])


def test_inverse_square_root_is_megatrons() -> None:
    # lr sqrt(warmup / step) and no less than min_lr; min_lr after the decay's last step.
    rates = {step: learning_rate(step, cfg("inverse-square-root"), 900) for step in (50, 100, 400, 900, 901)}
    assert rates == pytest.approx({50: 0.055, 100: 0.1, 400: 0.05, 900: 0.1 / 3, 901: 0.001})
    assert learning_rate(2_000_000, cfg("inverse-square-root"), 3_000_000) == 0.001


def test_decay_may_end_before_the_run() -> None:
    early = cfg("linear", lr_decay_steps=550)
    assert learning_rate(325, early, 1000) == pytest.approx((0.1 + 0.001) / 2)
    assert learning_rate(550, early, 1000) == learning_rate(1000, early, 1000) == 0.001


@pytest.mark.parametrize("decay", LR_DECAYS)
def test_edges(decay: str) -> None:
    # A run that is all warm-up, and one without: no division by zero, no rate above the peak.
    rates = [learning_rate(step, cfg(decay), 100) for step in range(102)]
    assert max(rates) <= 0.1
    assert rates[99] == pytest.approx(0.0991)
    none = OptimConfig(lr=0.1, lr_decay=decay)
    assert learning_rate(0, none, 10) == 0.1
    assert all(0 <= learning_rate(step, none, 10) <= 0.1 for step in range(12))


@pytest.mark.parametrize("decay", LR_DECAYS)
@pytest.mark.parametrize("warmup", [0, 100])
def test_the_rate_goes_on_from_its_peak_and_never_rises(decay: str, warmup: int) -> None:
    optim = OptimConfig(lr=0.1, lr_decay=decay, warmup_steps=warmup)
    rates = [learning_rate(step, optim, warmup + 1000) for step in range(warmup, warmup + 1002)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 0.1


# The rate's last value of those that do not end at `min_lr`.
ENDS = {"constant": 0.1, "inverse-square-root": 0.1 * (100 / 1100) ** 0.5}


@pytest.mark.parametrize("decay", LR_DECAYS)
def test_the_rate_ends_at_its_minimum_and_knows_no_unit(decay: str) -> None:
    """Steps may be samples, and rates those of a larger batch; a resumed run asks for any step first."""
    optim, steps = cfg(decay), [*range(101, 1101), 1102, 5000]
    rates = {step: learning_rate(step, optim, 1100) for step in steps}
    assert rates[1100] == pytest.approx(ENDS.get(decay, 0.001), rel=1e-12)
    assert rates[1102] == rates[5000]
    assert rates[1099] > rates[1100] or decay == "constant"
    assert min(rates.values()) == (0.1 if decay == "constant" else 0.001)
    larger = dataclasses.replace(optim, **{name: 10 * getattr(optim, name) for name in ("lr", "min_lr", "init_lr")})
    samples = dataclasses.replace(optim, warmup_steps=1600)
    for step, rate in reversed(rates.items()):
        assert learning_rate(step, larger, 1100) == pytest.approx(10 * rate, rel=1e-12)
        assert learning_rate(16 * step, samples, 16 * 1100) == pytest.approx(rate, rel=1e-12)
        assert learning_rate(step, dataclasses.replace(optim, lr_decay_steps=1100), 9999) == rate


# DeepSpeed 0.19's scale at each step of "..x.x....xx......" (x: overflow), from 256 with a window of 4.
TRACES = {
    1: [256] * 3 + [128] * 2 + [64] * 5 + [32] + [16] * 5 + [32],
    2: [256] * 5 + [128] * 5 + [64] + [32] * 5 + [64],
}


@pytest.mark.parametrize("hysteresis", TRACES)
def test_loss_scale_moves_as_deepspeeds(hysteresis: int) -> None:
    scaler, seen = LossScaler(256.0, ScaleRule(4, hysteresis)), []
    for step in "..x.x....xx......":
        seen.append(scaler.scale)
        # A checkpoint in between changes nothing.
        scalars, scaler = scaler.scalars(), LossScaler(1024.0, ScaleRule(4, hysteresis))
        scaler.load_scalars(scalars)
        scaler.update(step == "x")
    assert seen == TRACES[hysteresis]
    for _ in range(12):
        scaler.update(True)
    assert scaler.scale == scaler.minimum == 1.0


def test_consecutive_hysteresis_counts_from_the_last_good_step() -> None:
    scaler = LossScaler(256.0, ScaleRule(100, 2, consecutive=True))
    scales = []
    for step in "x.x.xx":
        scaler.update(step == "x")
        scales.append(scaler.scale)
    assert scales == [256] * 5 + [128]


def test_first_loss_scale_makes_up_for_the_batch() -> None:
    assert LossScaler.of(OptimConfig(), 1).scale == 2.0**16
    assert LossScaler.of(OptimConfig(), 2048).scale == 2.0**27
    assert LossScaler.of(OptimConfig(), 1025).scale == 2.0**27
    assert LossScaler.of(OptimConfig(initial_loss_scale=8.0, min_loss_scale=16.0), 2048).scale == 16.0
    # Nothing moves a constant scale, and every overflow under it is one too many.
    fixed = LossScaler.of(OptimConfig(loss_scale=128.0), 2048)
    for overflow in (True, False, False):
        fixed.update(overflow)
    assert fixed.scale == 128.0 < fixed.minimum
