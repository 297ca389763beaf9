"""Faults that the composer has to find: each is put into the library for one run of a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.composer.draws import Draw, has_experts

Plant = Callable[[pytest.MonkeyPatch, Any, int], None]


@contextmanager
def planted(name: str, words: Sequence[str], world: int) -> Iterator[None]:
    """Put a fault of `FAULTS` into the library; "": none."""
    from megalite.runtime.options import cli

    with pytest.MonkeyPatch.context() as patch:
        if name:
            FAULTS[name][1](patch, cli.parse(list(words)).config, world)
        yield


def _without(axis: str) -> Plant:
    """Leave an axis out of those over which gradients are summed."""

    def plant(patch: pytest.MonkeyPatch, cfg: Any, world: int) -> None:
        from megalite.core.sharding import Shard

        reduce: Any = Shard.reduce
        axes = reduce.fget
        patch.setattr(Shard, "reduce", property(lambda self: tuple(name for name in axes(self) if name != axis)))

    return plant


def _aux_loss_with_accumulation(patch: pytest.MonkeyPatch, cfg: Any, world: int) -> None:
    """The balance loss of every micro-batch weighs as much as that of the whole batch."""
    from megalite.core.parts.ffn.experts.routing import Routing

    p, add = cfg.parallel, Routing.add_loss
    passes = cfg.num_microbatches(world // (p.tp * p.pp * p.cp))

    def heavier(self: Any, y: Any, fwd: Any) -> Any:
        loss = None if self.loss is None else self.loss * passes
        return add(Routing(self.ids_TK, self.weights_TK, loss, self.key), y, fwd)

    patch.setattr(Routing, "add_loss", heavier)


def _weight_of_loss(patch: pytest.MonkeyPatch, cfg: Any, world: int) -> None:
    """Losses are divided by cp, as if its ranks held copies of them."""
    from megalite.core import step

    run = step.forward_backward

    def divided(engine: Any, rows: Any, number: int, weight: float, *args: Any) -> Any:
        return run(engine, rows, number, weight / cfg.parallel.cp, *args)

    patch.setattr(step, "forward_backward", divided)


def _experts_averaged(patch: pytest.MonkeyPatch, cfg: Any, world: int) -> None:
    """The gradients of experts are divided by ep once more."""
    from megalite.core.ops.grouped import grouped_wgrad
    from megalite.core.parts.ffn.experts.grouped_linear import GroupedLinear

    init = GroupedLinear.__init__

    def averaged(main_grad: Any, dy: Any, *rest: Any) -> None:
        grouped_wgrad(main_grad, dy / cfg.parallel.ep, *rest)

    def averaging(self: Any, *args: Any) -> None:
        init(self, *args)
        self.products = type(self.products)(replace(self.products.ops, grouped_wgrad=averaged))

    patch.setattr(GroupedLinear, "__init__", averaging)


def _window(patch: pytest.MonkeyPatch, cfg: Any, world: int) -> None:
    """Windows see one token more."""
    from megalite.core.options.model import ModelConfig

    window = ModelConfig.window_of
    patch.setattr(ModelConfig, "window_of", lambda self, layer: None if (w := window(self, layer)) is None else w + 1)


def _whole(draw: Draw) -> bool:
    return draw.get("tp", 1) > 1 and draw.get("sequence_parallel", True)


def _balanced(draw: Draw) -> bool:
    passes = draw.get("global_batch_size", 4) // draw.get("micro_batch_size", 1) // draw.get("dp", 1)
    return has_experts(draw) and draw.get("moe_aux_loss_coeff", 0) > 0 and passes > 1


FAULTS: dict[str, tuple[Callable[[Draw], bool], Plant]] = {
    "sum of norms over tp": (_whole, _without("tp")),
    "balance loss with accumulation": (_balanced, _aux_loss_with_accumulation),
    "weight of losses under cp": (lambda draw: draw.get("cp", 1) > 1, _weight_of_loss),
    "experts averaged twice": (lambda draw: draw.get("ep", 1) > 1, _experts_averaged),
    "window under cp": (lambda draw: "window" in draw and draw.get("cp", 1) > 1, _window),
    "sum of a tied embedding": (
        lambda draw: draw.get("tie_embeddings", False) and draw.get("pp", 1) > 1,
        _without("ends"),
    ),
}
"""Name -> (whether a draw of this kind can meet it, what puts it there)."""
