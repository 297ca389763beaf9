"""Laws that every optimizer keeps, whatever it computes; a new entry of the table is held to them by itself.

They are laws of one share, without layouts (`tests/parity/test_ways.py` has those). A rule that breaks one for a reason
is in `EXCEPT`, and must break it. Formulas are not known here: in Adan, a wrong sign within a square, or a change of
gradients whose average is not corrected for its start, breaks none, and shows beside a plain computation alone
(`plain_step` of `tests/parity/test_optimizers.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megalite.core import ops as kernels
from megalite.core.options.optim import OptimConfig
from megalite.core.options.update_rule import MatrixRule, Share, UpdateRule
from tests.update_rules import OWN_RULES

SHAPE = (4, 6)
"""Of a matrix; a share has two, one after the other."""
SIZE = 4 * 6
LONG = 800
"""Steps after which averages have forgotten what was before."""
OPS = kernels.resolve(None, torch.device("cpu"), torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {"muon": {"muon_ns": "fp32"}, "ademamix": {"ademamix_beta3": 0.99}}


class Ratios:
    """Trust ratios of parameters that this process has whole."""

    def __init__(self, numel: int, decays: bool) -> None:
        self.offsets, self._decays = tuple(range(0, numel + 1, SIZE)), decays

    def __call__(
        self, weights: torch.Tensor, update: torch.Tensor, ratio: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        sizes = [x.view(-1, SIZE).norm(dim=1) for x in (weights, update)]
        whole = torch.where((sizes[0] > 0) & (sizes[1] > 0), ratio(*sizes), 1.0)
        return whole if self._decays else torch.ones_like(whole)


class Kept(NamedTuple):
    """What a checkpoint has of a share."""

    master: torch.Tensor
    states: tuple[torch.Tensor, ...]
    step: int = 0


def new(rule: UpdateRule, master: torch.Tensor) -> Kept:
    return Kept(master, tuple(torch.zeros_like(master) for _ in rule.states))


def advance(
    rule: UpdateRule,
    kept: Kept,
    grads: Sequence[torch.Tensor],
    lr: float = 1.0,
    decay: float = 0.0,
    scales: Sequence[float] = (1.0,),
    weights: torch.Tensor | None = None,
    **options: Any,
) -> Kept:
    """Return what a share has after a step for each gradient; gradients arrive multiplied by `scales`, in turn."""
    cfg = OptimConfig(beta2=0.98, eps=1e-12, **options)
    master, states = kept.master.clone(), tuple(state.clone() for state in kept.states)
    step = kept.step
    for grad in grads:
        scale = scales[step % len(scales)]
        step += 1
        ratios, factor = Ratios(len(master), decay > 0), torch.tensor(1 / scale)
        share = Share(master, states, grad * scale, weights, factor, lr, decay, step, OPS, ratios)
        if isinstance(rule, MatrixRule):
            rule.direction(share, cfg)
            for matrix in share.grad.view(-1, *SHAPE):
                matrix.copy_(rule.transform(matrix.clone(), cfg))
        rule.update(share, cfg)
    return Kept(master, states, step)


def draw(seed: int, count: int, numel: int = 2 * SIZE) -> list[torch.Tensor]:
    """Return gradients whose elements differ much, and none is close to 0."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, numel, generator=g)
    return list(x.sign() * (x.abs() + 0.1))


def close(actual: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-4) -> None:
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * expected.abs().max().item() / 10)


ZERO = torch.zeros(2 * SIZE)


def negative(rule: UpdateRule, o: dict[str, Any]) -> None:
    """The other way round for weights and gradients of the other sign."""
    (w,), grads = draw(1, 1), draw(2, 3)
    there = advance(rule, new(rule, w), grads, 1e-2, 0.1, **o)
    back = advance(rule, new(rule, -w), [-g for g in grads], 1e-2, 0.1, **o)
    close(back.master, -there.master)


def unscaled(rule: UpdateRule, o: dict[str, Any]) -> None:
    """Clipping and loss scales come as a factor of each step, and leave nothing behind."""
    (w,), grads = draw(1, 1), draw(2, 4)
    plain = advance(rule, new(rule, w), grads, 1e-2, 0.1, **o)
    scaled = advance(rule, new(rule, w), grads, 1e-2, 0.1, (8.0, 0.25, 1024.0), **o)
    for one, other in zip((plain.master, *plain.states), (scaled.master, *scaled.states)):
        close(other, one)


def homogeneous(rule: UpdateRule, o: dict[str, Any]) -> None:
    """With gradients of another unit steps are the same, or in that unit."""
    grads = draw(2, 4)
    one, other = (advance(rule, new(rule, ZERO), [unit * g for g in grads], **o).master for unit in (1.0, 16.0))
    close(other, one * (16.0 if other.norm() > 4 * one.norm() else 1.0), 1e-3)


def proportional(rule: UpdateRule, o: dict[str, Any]) -> None:
    """A step is as long as the learning rate is large."""
    grads = draw(2, 4)
    one, other = (advance(rule, new(rule, ZERO), grads, lr, **o).master for lr in (1.0, 0.5))
    close(other, one / 2)


def decoupled(rule: UpdateRule, o: dict[str, Any]) -> None:
    """Weight decay shrinks weights by lr * decay, whatever the gradients are, and leaves states alone."""
    (w,), grads = draw(1, 1), draw(2, 1)
    plain, decayed = (advance(rule, new(rule, w), grads, 1e-2, decay, **o) for decay in (0.0, 1.0))
    np.testing.assert_allclose(decayed.master - plain.master, -1e-2 * w, atol=3e-4, rtol=1e-2)
    for one, other in zip(plain.states, decayed.states):
        close(other, one)


def even(rule: UpdateRule, o: dict[str, Any]) -> None:
    """With the same gradient the first step is as long as any later one: averages are corrected for their start."""
    (g,) = draw(3, 1)
    at = new(rule, ZERO)
    moved = []
    for _ in range(LONG):
        then = advance(rule, at, [g], **o)
        moved.append(then.master)
        at = then._replace(master=ZERO)
    for i in (0, 1, 2, 5, 20, 100):
        close(moved[i], moved[-1], 1e-3)


def forgets(rule: UpdateRule, o: dict[str, Any]) -> None:
    """What gradients were long ago does not matter."""
    g, h = draw(3, 2)
    ends = []
    for before in (g, h):
        at = advance(rule, new(rule, ZERO), [before] * 5 + [g] * (2 * LONG), **o)
        ends.append(advance(rule, at._replace(master=ZERO), [g], **o).master)
    close(ends[1], ends[0], 1e-2)


def forward(rule: UpdateRule, o: dict[str, Any]) -> None:
    """Steps go against the gradient, and a gradient that grows a little does not shorten them."""
    (g,) = draw(3, 1)
    at = advance(rule, new(rule, ZERO), [g] * LONG, **o)._replace(master=ZERO)
    step = advance(rule, at, [g], **o).master
    assert step @ g < 0
    for change in (0.01 * g, *(0.01 * x for x in draw(4, 3))):
        longer = advance(rule, at, [g + change], **o).master
        assert (longer - step) @ change <= 1e-5 * change.norm() * step.norm()


def separate(rule: UpdateRule, o: dict[str, Any]) -> None:
    """A parameter's update is its own, and where none of matrices, an element's."""
    (w,), grads = draw(1, 1), draw(2, 3)
    whole = advance(rule, new(rule, w), grads, 1e-2, 0.1, **o)
    for part in (slice(0, SIZE), slice(SIZE, 2 * SIZE)):
        alone = advance(rule, new(rule, w[part]), [g[part] for g in grads], 1e-2, 0.1, **o)
        close(whole.master[part], alone.master)
    if not isinstance(rule, MatrixRule):
        order = torch.randperm(2 * SIZE, generator=torch.Generator().manual_seed(5))
        there = advance(rule, new(rule, w), grads, 1e-2, **o).master
        close(advance(rule, new(rule, w[order]), [g[order] for g in grads], 1e-2, **o).master, there[order])


def resumed(rule: UpdateRule, o: dict[str, Any]) -> None:
    """Masters, states and the number of steps are all that a rule knows: it serves many shares, and runs resume."""
    (w, v), grads = draw(1, 2), draw(2, 4)
    whole = advance(copy.deepcopy(rule), new(rule, w), grads, 1e-2, 0.1, **o)
    half = advance(rule, new(rule, w), grads[:2], 1e-2, 0.1, **o)
    advance(rule, new(rule, v), draw(6, 3), 1e-2, **o)
    rest = advance(rule, half, grads[2:], 1e-2, 0.1, **o)
    for one, other in zip((whole.master, *whole.states), (rest.master, *rest.states)):
        close(other, one, 1e-6)


def stored(rule: UpdateRule, o: dict[str, Any]) -> None:
    """Every state is written; those that other optimizers take over mean the same in all, whatever the rate is."""
    grads, (g,) = draw(2, 3), draw(3, 1)
    one, other = (advance(rule, new(rule, ZERO), grads, lr, **o) for lr in (1.0, 0.0))
    assert all(state.any() for state in one.states)
    assert not other.master.any()
    end = advance(rule, new(rule, ZERO), [g] * LONG, **o)
    means = {"exp_avg": g, "exp_avg_sq": g.square()}
    for name, moved, still, last in zip(rule.states, one.states, other.states, end.states):
        if name not in rule.own:
            close(still, moved)
            if name in means:
                close(last, means[name], 1e-2)


def rounded(rule: UpdateRule, o: dict[str, Any]) -> None:
    """The model gets the masters, rounded; steps without a gradient only decay them."""
    (w,) = draw(1, 1)
    weights = torch.full_like(w, 7.0, dtype=torch.bfloat16)
    kept = advance(rule, new(rule, w), draw(2, 2), 1e-2, weights=weights, **o)
    assert torch.equal(weights, kept.master.bfloat16())
    assert torch.equal(advance(rule, new(rule, w), [ZERO] * 3, 1e-2, **o).master, w)


Law = Callable[[UpdateRule, dict[str, Any]], None]
LAWS: tuple[Law, ...] = (
    *(negative, unscaled, homogeneous, proportional, decoupled, even, forgets, forward, separate, resumed, stored),
    rounded,
)
EXCEPT: dict[tuple[str, str], str] = {
    ("sgd", "even"): "its momentum is a sum",
    ("lars", "even"): "its momentum is a sum",
    ("ademamix", "even"): "its authors do not correct the slow momentum",
    ("lamb", "decoupled"): "decay is a part of the direction that a trust ratio scales",
    ("lars", "decoupled"): "decay is a part of the direction that a trust ratio scales",
}
"""(rule, law) -> why the rule breaks it."""


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", OWN_RULES)
def test_every_rule_keeps_the_laws(name: str, law: Law) -> None:
    if (name, law.__name__) in EXCEPT:
        with pytest.raises(AssertionError):
            law(OWN_RULES[name], OPTIONS.get(name, {}))
    else:
        law(OWN_RULES[name], OPTIONS.get(name, {}))


# A rule that no test knows: Adan (Xie et al. 2022, algorithm 1), with decoupled weight decay.
ADAN = """
class Adan(UpdateRule):
    states = ("exp_avg", "change", "square", "previous")

    def update(self, share, cfg):
        grad, (mean, change, square, previous) = share.scaled_grad(), share.states
        diff = grad - previous if share.step > 1 else torch.zeros_like(grad)
        mean.lerp_(grad, 0.02)
        change.lerp_(diff, 0.08)
        square.lerp_((grad + 0.92 * diff).square(), 0.01)
        previous.copy_(grad)
        t = share.step
        step = mean / (1 - 0.98**t) + 0.92 * change / (1 - 0.92**t)
        step /= (square / (1 - 0.99**t)).sqrt() + cfg.eps
        share.master.mul_(1 - share.lr * share.weight_decay)
        share.master.sub_(step, alpha=share.lr)
        share.round_weights()
"""

MISTAKES: list[tuple[str, str, str]] = [
    ("mean / (1 - 0.98**t)", "mean", "even"),
    ("square / (1 - 0.99**t)", "square", "even"),
    ("0.99**t", "0.98**t", "even"),
    (" + 0.92 * change", " - 0.92 * change", "forward"),
    ("grad - previous", "previous - grad", "forward"),
    (".sub_(step", ".add_(step", "forward"),
    (".sqrt()", "", "homogeneous"),
    ("diff).square()", "diff).abs()", "homogeneous"),
    ("square.lerp_((grad + 0.92 * diff).square(), 0.01)", "square.add_(grad.square())", "forgets"),
    ("share.scaled_grad()", "share.grad", "unscaled"),
    ("1 - share.lr * share.weight_decay", "1 + share.lr * share.weight_decay", "decoupled"),
    ("mean.lerp_(", "grad.add_(share.master, alpha=share.weight_decay); mean.lerp_(", "decoupled"),
    ("1 - share.lr * share.weight_decay", "1 - share.weight_decay", "decoupled"),
    ("previous.copy_(grad)", "self.previous = grad.clone()", "stored"),
    (
        "diff = grad - previous if share.step > 1 else",
        "diff, self.g = grad - getattr(self, 'g', grad), grad +",
        "resumed",
    ),
    ("mean.lerp_(grad, 0.02)", "mean.lerp_(grad, 0.98 * share.lr)", "stored"),
    ("mean.lerp_(grad, 0.02)", "mean.mul_(0.98).add_(grad)", "stored"),
    ("step /= ", "step /= step.norm() + ", "separate"),
    ("        share.round_weights()", "", "rounded"),
]
"""(text, what a mistake makes of it, a law that it breaks)."""


def made(text: str) -> UpdateRule:
    names: dict[str, Any] = {"torch": torch, "UpdateRule": UpdateRule}
    exec(compile(text, "adan", "exec"), names)
    return names["Adan"]()  # type: ignore[no-any-return]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_unknown_rule_keeps_them(law: Law) -> None:
    law(made(ADAN), {})


@pytest.mark.parametrize(("text", "mistake", "law"), MISTAKES)
def test_mistakes_in_it_break_one(text: str, mistake: str, law: str) -> None:
    assert ADAN.count(text) == 1
    rule, laws = made(ADAN.replace(text, mistake)), {law.__name__: law for law in LAWS}
    with pytest.raises(AssertionError):
        laws[law](rule, {})
