"""FP8 products of each layer of a block: values of an independent emulation, and the same codes at every tp."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.microbatches import to_microbatches, to_rows
from megalite.core.options.recipe import RECIPES, Recipe
from megalite.core.parts.quant import fp8, fp8_products
from megalite.core.sharding import Shard
from megalite.extras.plan.memory.fp8 import code_bytes
from tests.parity import jobs
from tests.rows import always_run
from tests.unit.ops.fp8_by_hand import by_hand
from tests.unit.tensor_parallel.fp8_layers import (
    BLOCKS,
    LAYERS,
    SMALL,
    Results,
    config,
    operands,
    run_layers,
    shapes,
    spec_of,
)
from tests.workers import WorkerPool


def put_together(ranks: list[Results], name: str, what: str, shape: tuple[int, ...]) -> np.ndarray:
    whole = torch.full(shape, torch.nan)
    for rank in ranks:
        values, where = rank[name][what]
        where = tuple(i for i in where if not isinstance(i, int))
        whole[where] = values.reshape(whole[where].shape)
    assert whole.isfinite().all()
    return whole.numpy()


@cache
def one_process(recipe: str) -> dict[str, dict[str, np.ndarray]]:
    cfg = config(recipe)
    ranks = [run_layers(0, cfg, 1)]
    return {n: {what: put_together(ranks, n, what, s) for what, s in shapes(cfg, n).items()} for n in LAYERS}


def assert_same_codes_and_products(ranks: list[Results], recipe: str) -> None:
    cfg = config(recipe)
    for name in LAYERS:
        for what, shape in shapes(cfg, name).items():
            got, expected = put_together(ranks, name, what, shape), one_process(recipe)[name][what]
            if what.startswith("codes"):
                np.testing.assert_array_equal(got, expected, err_msg=f"{name} {what}")
            else:
                atol = 1e-6 * np.abs(expected).max()
                np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=f"{name} {what}")


def emulated(recipe: Recipe, operand: torch.Tensor, dims: str) -> np.ndarray:
    """Quantize a whole operand by hand; gradients have N and O."""
    block = recipe.activation if "N" in dims else recipe.weight
    name = recipe.grad_format if {"N", "O"} <= set(dims) else "e4m3"
    return by_hand(operand.double().numpy(), block, name, recipe.power_of_2)


def assert_emulated(recipe_name: str, results: dict[str, dict[str, np.ndarray]]) -> None:
    cfg, recipe = config(recipe_name), RECIPES[recipe_name]
    for name in LAYERS:
        spec = spec_of(cfg, name)
        x, dy = (each[:, 0] for each in operands(spec, cfg.model.seq_len))
        w = Shard(spec).initial(cfg.train.seed)
        expected = {
            "y": emulated(recipe, x, "NI") @ emulated(recipe, w, "OI").T,
            "dx": emulated(recipe, dy, "NO") @ emulated(recipe, w.t(), "IO").T,
            "dW": emulated(recipe, dy.t(), "ON") @ emulated(recipe, x.t(), "IN").T,
        }
        for what, value in expected.items():
            atol = 1e-6 * np.abs(value).max()
            np.testing.assert_allclose(results[name][what], value, rtol=0, atol=atol, err_msg=f"{name} {what}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_of_each_layer(recipe: str) -> None:
    assert_emulated(recipe, one_process(recipe))


# At tp 4 the cuts of blockwise would be inside blocks.
TP_OF = [(recipe, tp) for recipe in RECIPES for tp in (2, 4) if (recipe, tp) != ("blockwise", 4)]


@pytest.mark.parametrize("row", always_run(TP_OF, *(row for row in TP_OF if row[1] == 2)), ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_same_codes_at_every_tp(pool: WorkerPool, row: tuple[str, int], sequence_parallel: bool) -> None:
    recipe, tp = row
    assert_same_codes_and_products(pool.run(tp, run_layers, config(recipe, tp, sequence_parallel), tp), recipe)


FAULTS = {"scale halved": "blockwise", "no clamp": "rowwise", "E5M2 weights": "tensorwise", "floor": "mxfp8"}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_quantization_are_found(fault: str) -> None:
    cfg = config(FAULTS[fault])
    results = run_layers(0, cfg, 1, fault)
    found = {n: {w: r[0].reshape(shapes(cfg, n)[w]).numpy() for w, r in each.items()} for n, each in results.items()}
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_emulated(FAULTS[fault], found)


def test_a_maximum_of_one_rank_is_found(pool: WorkerPool) -> None:
    for recipe in ("rowwise", "tensorwise"):
        ranks = pool.run(2, run_layers, config(recipe, 2), 2, "amax of this rank")
        with pytest.raises(AssertionError, match="Arrays are not equal"):
            assert_same_codes_and_products(ranks, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_of_codes_are_planned(recipe: str) -> None:
    """What the weights' codes take after a pass is planned, experts' too, without the blocks left in bf16."""
    small = config(recipe)
    experts = {"num_experts": 4, "moe_topk": 2, "moe_ffn_size": 128, "moe_dense_layers": (2,)}
    model = jobs.llama(4, **{**(BLOCKS if recipe == "blockwise" else SMALL), "qk_norm": "head", **experts})
    cfg = replace(small, model=model, train=replace(small.train, fp8_keep_bf16=1))
    engine = jobs.start(0, cfg, 1)
    batch = np.zeros((cfg.train.global_batch_size, model.seq_len + 1), np.int64)
    (stage,) = engine.stages.values()
    rows = to_rows(batch, engine, len(batch))
    microbatches = to_microbatches(rows, 1, engine.ctx.device, engine.ctx.axis("cp"))
    engine.executor.run(engine.eval_program, microbatches, 0, 0)
    held = [tensor for p in stage.parameters() for codes in (p.codes or ()) for tensor in codes[:2]]
    assert sum(tensor.nbytes for tensor in held) == code_bytes(cfg, 1, [range(4)], [0], 1)[0] > 0


def test_weights_are_quantized_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve products per block and micro-batch; none of embedding, head and kept blocks; two codes of a weight."""
    counts = {"product": 0, "weights": 0, "operands": 0}
    product, codes = fp8.emulated_product, fp8_products.Fp8.codes

    def counted_product(*args: Any, **options: Any) -> torch.Tensor:
        counts["product"] += 1
        return product(*args, **options)

    def counted_codes(self: Any, x: torch.Tensor, dims: str, amax: torch.Tensor | None = None) -> fp8.Codes:
        counts["operands" if "N" in dims else "weights"] += 1
        return codes(self, x, dims, amax)

    monkeypatch.setattr(fp8, "emulated_product", counted_product)
    monkeypatch.setattr(fp8_products.Fp8, "codes", counted_codes)
    model = jobs.llama(4, **{**SMALL, "seq_len": 16})
    cfg = jobs.make_config(model, fp8="rowwise", fp8_emulate=True, fp8_keep_bf16=1)
    engine = jobs.start(0, cfg, 1)
    for step in (1, 2):
        jobs.run_steps(engine, 1, first=step)
        # Two of four blocks with four layers, eight micro-batches.
        assert counts == {"product": step * 2 * 12 * 8, "weights": step * 2 * 4 * 2, "operands": step * 2 * 16 * 8}
