"""Moments and masters in bf16: rounded by hand, the same bits in every ZeRO stage, the same values in every layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.core.optim import low_precision
from megalite.extras.plan.report import update_rows
from megalite.runtime.options.run import Config
from tests.parity import jobs, runs
from tests.parity.harness import Gradients, boxes_of, put_together
from tests.parity.matrices import CUT, MIXTRAL, SMALL
from tests.parity.models import shallow
from tests.rows import always_run
from tests.unit.ops.random_bits import hashed
from tests.workers import WorkerPool

ROLES = ("master", "exp_avg", "exp_avg_sq", "exp_avg_slow")
BOTH = {"moments_dtype": "bf16", "master_dtype": "bf16"}
MOMENTS = {"moments_dtype": "bf16"}
LLAMA, EXPERTS = jobs.llama(2), shallow(MIXTRAL)
Outcome = tuple[list[tuple[float, float]], dict[str, Gradients]]


def config(
    states: dict[str, Any], optimizer: str = "adamw", model: Any = None, layout: Any = None, **train: Any
) -> Config:
    """Masters in bf16 are weights in bf16; moments in bf16 are compared beside weights in fp32."""
    # States compared bit by bit: the same micro-batches in every layout.
    train = {"precision": "bf16" if "master_dtype" in states else "fp32", "micro_batch_size": 2, **train}
    cfg = jobs.make_config(model or LLAMA, layout, **train)
    return replace(cfg, optim=replace(cfg.optim, optimizer=optimizer, muon_ns="fp32", lr=1e-3, clip_grad=0, **states))


def trained(rank: int, cfgs: Sequence[Config], world: int, steps: int = jobs.STEPS, fault: str = "") -> list[Outcome]:
    """By config: (loss, gradient norm) of each step; by role, this rank's states after the first one."""
    out = []
    with pytest.MonkeyPatch.context() as patch:
        if fault == "bits of this rank":
            key = low_precision._key
            patch.setattr(low_precision, "_key", lambda text: key(f"{text} {rank}"))
        if fault == "place in the share":
            places = low_precision._places
            patch.setattr(
                low_precision, "_places", lambda box, shape: places(replace(box, offset=(0,) * len(shape)), shape)
            )
        for cfg in cfgs:
            engine = jobs.start(rank, cfg, world)
            figures = jobs.run_steps(engine, 1)
            states = {role: boxes_of(engine, role) for role in ROLES}
            out.append((figures + (jobs.run_steps(engine, steps - 1, first=2) if steps > 1 else []), states))
            if not fault:
                jobs.check_copies(engine)
    return out


def whole(ranks: Sequence[Outcome]) -> dict[str, np.ndarray]:
    """Put the states of all ranks together, by "role name"."""
    together = {role: put_together([states[role] for _, states in ranks]) for role in ROLES}
    return {f"{role} {name}": array for role, arrays in together.items() for name, array in arrays.items()}


@cache
def one_process(cfg: Config, steps: int = jobs.STEPS) -> tuple[list[tuple[float, float]], dict[str, np.ndarray]]:
    ranks = trained(0, [cfg], 1, steps)
    return ranks[0][0], whole(ranks)


def test_states_are_those_of_fp32_rounded_by_hand() -> None:
    """After one step, whose gradients are the same; the bits of an element are those of its place in its parameter."""
    for model in (LLAMA, EXPERTS):
        exact, got = (one_process(config(states, model=model), 1)[1] for states in ({}, MOMENTS))
        for key, values in got.items():
            role, name = key.split()
            if role != "master":
                digest = blake2b(f"{name} {role} 1".encode(), digest_size=8).digest()
                keys = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")
                rows = exact[key].reshape(-1, values.shape[-1])
                expected = (rows.view(np.uint32) + hashed(keys, *np.indices(rows.shape))) >> 16 << 16
                np.testing.assert_array_equal(values, expected.view(np.float32).reshape(values.shape), err_msg=key)


STAGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"zero": 0}, {}),
    ({"zero": 1, **SMALL}, {}),
    ({"zero": 2, **CUT}, {}),
    ({"zero": 3, **CUT}, {}),
    ({"zero": 1}, {"offload": "optimizer"}),
    ({"zero": 3, **CUT}, {"offload": "optimizer+params"}),
]


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.full)])
def test_same_bits_in_every_zero_stage(pool: WorkerPool, optimizer: str, tmp_path: Path) -> None:
    """Two ranks with one micro-batch each, whose gradients add up to the same bits everywhere."""
    rows = [*STAGES, ({"zero": 2}, {"offload": "optimizer", "offload_dir": str(tmp_path)})]
    cases = [config(BOTH, optimizer, layout=layout, micro_batch_size=4, **train) for layout, train in rows]
    first, *others = ([*ranks] for ranks in zip(*pool.run(2, trained, cases, 2)))
    for ranks, case in zip(others, cases[1:]):
        assert [loss for loss, _ in ranks[0][0]] == [loss for loss, _ in first[0][0]], case.parallel
        for key, values in whole(first).items():
            np.testing.assert_array_equal(whole(ranks)[key], values, err_msg=f"{case.parallel} {key}")


# (ranks, states, optimizer, model, layout, training options), the strongest first.
GRID: list[tuple[int, dict[str, str], str, Any, dict[str, Any], dict[str, Any]]] = [
    (4, MOMENTS, "adamw", LLAMA, {"tp": 2, "zero": 3, **CUT}, {}),
    (4, BOTH, "adamw", LLAMA, {"tp": 2, "zero": 1, **SMALL}, {"offload": "optimizer"}),
    (4, MOMENTS, "muon", LLAMA, {"tp": 2, "zero": 1, **SMALL}, {"offload": "optimizer"}),
    (4, MOMENTS, "adamw", EXPERTS, {"ep": 2, "tp": 2, "zero": 3, **CUT}, {}),
    (4, MOMENTS, "lamb", LLAMA, {"zero": 3, "zero_group": "2", **CUT}, {}),
    (4, MOMENTS, "ademamix", LLAMA, {"cp": 2, "zero": 1}, {}),
    (8, MOMENTS, "lion", jobs.llama(), {"tp": 2, "pp": 2, "vp": 2, "schedule": "zb-v"}, {}),
    (8, BOTH, "adamw", LLAMA, {"tp": 2, "pp": 2, "zero": 3, **CUT}, {"recompute": "full"}),
]


def assert_same(ranks: Sequence[Outcome], case: Config, single: Config) -> None:
    """Losses agree, and states after the first step but for values that a last bit of the gradient moved."""
    figures, states = one_process(single)
    wide = case.train.precision == "fp32"
    for losses, _ in ranks:
        np.testing.assert_allclose(np.array(losses)[:, 0], np.array(figures)[:, 0], rtol=1e-5 if wide else 3e-3)
    held = whole(ranks)
    assert held.keys() == states.keys()
    # Of weights in bf16, gradients themselves differ: only masters, which move by the learning rate, are compared.
    roles = ("exp_avg", "exp_avg_sq", "exp_avg_slow") if wide else ("master",)
    pairs = [(held[key].ravel(), states[key].ravel()) for key in states if key.split()[0] in roles]
    got, expected = (np.concatenate(arrays) for arrays in zip(*pairs))
    assert (got != expected).mean() < (2e-3 if wide else 0.1)
    np.testing.assert_allclose(got, expected, rtol=2**-7 if wide else 2**-5, atol=1e-7 if wide else 3e-3)


@pytest.mark.parametrize("row", always_run(range(len(GRID)), 0))
def test_same_in_every_layout(pool: WorkerPool, row: int) -> None:
    world, states, optimizer, model, layout, train = GRID[row]
    case = config(states, optimizer, model, layout, **train)
    assert_same([rank[0] for rank in pool.run(world, trained, [case], world)], case, config(states, optimizer, model))


@pytest.mark.parametrize("fault", always_run(["bits of this rank", "place in the share"], "place in the share"))
def test_bits_of_a_rank_are_found(pool: WorkerPool, fault: str) -> None:
    case = config(MOMENTS, layout={"tp": 2, "zero": 1})
    ranks = [rank[0] for rank in pool.run(2, trained, [case], 2, jobs.STEPS, fault)]
    with pytest.raises(AssertionError):
        assert_same(ranks, case, config(MOMENTS))


def test_nothing_is_lost_that_rounding_to_the_nearest_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a hundredth of a bf16 digit add up; to the nearest, no weight near 1 would move."""
    cfg = config(BOTH, optimizer="lion")
    cfg = replace(cfg, optim=replace(cfg.optim, lr=4e-5, warmup_steps=0, lr_decay="constant", weight_decay=0.0))

    def moved() -> float:
        engine = jobs.start(0, cfg, 1)
        before = put_together([boxes_of(engine, "master")])
        for first in (1, 2, 3, 4):
            jobs.run_steps(engine, 1, first=first)
        after = put_together([boxes_of(engine, "master")])
        return float(np.mean([np.abs(after[k] - before[k]).mean() for k in before if k.endswith("norm.weight")]))

    assert 2e-5 < moved() < 4e-4
    nearest = type("Nearest", (), {"stochastic_round": staticmethod(lambda x, out, key, place: out.copy_(x))})
    monkeypatch.setattr(low_precision.StateRounding, "_ops", nearest, raising=False)
    monkeypatch.setattr(
        low_precision.StateRounding, "__init__", lambda self, bucket, ops: setattr(self, "_bucket", bucket)
    )
    assert moved() == 0.0


@pytest.mark.full
def test_checkpoints(tmp_path: Path) -> None:
    """Resumed to the bit; saved in 2 bytes per value; fp32 states are rounded when a run changes, and back."""
    flags = [*runs.MODEL, "--micro-batch-size", "4", "--precision", "bf16"]
    states = ["--moments-dtype", "bf16", "--master-dtype", "bf16"]

    def run(name: str, steps: int, *more: str) -> str:
        arguments = [*flags, *more, "--train-steps", str(steps), "--run-dir", str(tmp_path / name)]
        return runs.train(0, arguments, 1)[1]

    whole_run = run("whole", 4, *states)
    run("halves", 2, *states)
    assert run("halves", 4, *states) == whole_run
    (manifest,) = (tmp_path / "halves" / "checkpoints").glob("step_00000002/manifest.json")
    tensors = json.loads(manifest.read_text())["tensors"]
    assert {t["dtype"] for role in tensors.values() for t in role.values()} == {"BF16"}
    run("mixed", 2, *states)
    run("mixed", 4)
    run("mixed", 6, *states)
    log = (tmp_path / "mixed" / "logs" / "rank_0.log").read_text()
    assert "--moments-dtype fp32 -> bf16" in log
    assert "--master-dtype bf16 -> fp32" in log
    assert "starts at zero" not in log
    assert len(runs.losses(tmp_path / "mixed")) == 6


def test_dry_run_names_them() -> None:
    assert update_rows(config({})) == []
    ((title, text),) = update_rows(config(BOTH))
    assert (title, text) == ("states", "masters bf16, moments bf16; bf16 is rounded stochastically")
