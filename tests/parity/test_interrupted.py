"""A step that is interrupted (Ctrl-C in a notebook, an exception of a hook) and made again, as if nothing had been."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.runtime.options.run import Config
from tests.parity.jobs import llama, make_config, run_steps, start
from tests.workers import WorkerPool


class Interrupt(Exception):
    pass


def interrupted(rank: int, cfg: Config, world: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Three steps without and with interruptions of the second: in a forward, and twice in a backward pass."""
    plain = run_steps(start(rank, cfg, world), 3)
    engine = start(rank, cfg, world)
    results = run_steps(engine, 1)

    def interrupt(*_: Any) -> None:
        raise Interrupt

    modules = {name: module for stage in engine.stages.values() for name, module in stage.named_modules()}
    for register in (
        modules["layers.1"].register_forward_hook,
        modules["layers.2.self_attn"].register_full_backward_hook,
        modules["layers.0"].register_full_backward_pre_hook,
    ):
        hook = register(interrupt)
        with pytest.raises(Interrupt):
            run_steps(engine, 1, first=2)
        hook.remove()
    return plain, results + run_steps(engine, 2, first=2)


@pytest.mark.parametrize(
    "parallel",
    [
        {"zero": 1},
        {"zero": 2},
        {"zero": 3, "zero_whole_below": 0},
        {"zero": 3, "zero_whole_below": 0, "zero_keep": "backward", "zero_reduce": "step"},
        {"zero": 3, "zero_whole_below": 0, "tp": 2},
    ],
    ids=lambda options: "-".join(f"{name}{value}" for name, value in options.items()),
)
def test_a_step_made_again_has_the_same_bits(pool: WorkerPool, parallel: dict[str, Any]) -> None:
    world = 2 * parallel.get("tp", 1)
    for plain, again in pool.run(world, interrupted, make_config(llama(), parallel), world):
        assert again == plain
