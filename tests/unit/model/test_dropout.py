"""Dropout of the residual stream and of attention: one mask for each sample of the global batch, wherever it is."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from megalite.core.batch import ForwardPass, Positions
from megalite.core.mesh.context import Axis
from megalite.core.model.dropout import Dropout, MaskWords
from megalite.core.ops import resolve
from megalite.core.ops.dropout import keep_mask
from megalite.core.parts.context.blocks import BlockAttention
from megalite.core.parts.context.ring import Ring
from megalite.core.parts.mixers.gqa.attention import Attention
from tests.unit.model.tiny_layers import layers_of, tiny

ALONE = Axis("own")
BLOCKS = BlockAttention(Ring(ALONE), ALONE, resolve("torch", "cpu", torch.float32))
S, H = 16, 64
WHOLE = Positions.of_samples(S)


def passed(
    samples: range = range(8), positions: Positions = WHOLE, step: int = 1, training: bool = True
) -> ForwardPass:
    return ForwardPass(step, 0, training, samples=samples, positions=positions)


def mask(
    fwd: ForwardPass, layer: int = 0, site: str = "mlp_out", tp: Axis | None = None, seed: int = 1
) -> torch.Tensor:
    """What dropout makes of ones, [tokens, samples, H]; with tp, of a shard of the sequence."""
    dropout = Dropout(0.25, MaskWords(seed, tp or Axis("tp"), tp is not None), (layer, site), keep_mask)
    assert fwd.positions is not None
    tokens = sum(map(len, fwd.positions.runs)) // (tp.size if tp else 1)
    x = torch.ones(tokens, len(fwd.samples), H, requires_grad=True)
    y = dropout(x, fwd)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y)
    return y.detach()


def test_elements_are_dropped_and_the_others_scaled() -> None:
    whole = mask(passed())
    assert set(whole.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (whole == 0).double().mean().item() == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / whole.numel()) ** 0.5)
    assert torch.equal(mask(passed(training=False)), torch.ones(S, 8, H))


def test_a_mask_is_that_of_the_sample_and_its_positions() -> None:
    """In micro-batches of any size, on ranks of cp, and on shards of the sequence."""
    whole = mask(passed())
    for size in (1, 2, 4):
        parts = [mask(passed(range(first, first + size))) for first in range(0, 8, size)]
        assert torch.equal(torch.cat(parts, 1), whole)
    for rank in range(2):
        shared = WHOLE.shared(2, rank)
        own = torch.cat([whole[run.start : run.stop] for run in shared.runs])
        assert torch.equal(mask(passed(positions=shared)), own)
        shards = [mask(passed(positions=shared), tp=Axis("tp", 4, shard, tuple(range(4)))) for shard in range(4)]
        assert torch.equal(torch.cat(shards), own)


def test_every_seed_step_layer_and_site_has_masks_of_its_own() -> None:
    """Also of two samples or positions: none has more in common with another than independent draws have."""
    drawn: list[torch.Tensor] = [
        mask(passed()),
        mask(passed(step=2)),
        mask(passed(), layer=1),
        mask(passed(), site="attention_out"),
        mask(passed(), seed=2),
        mask(passed(range(8, 16))),
    ]
    drawn += [drawn[0].roll(1, dim) for dim in range(3)]
    deviation = 0.25 * 0.75 / drawn[0].numel() ** 0.5
    for one, other in combinations([(x == 0).double() - 0.25 for x in drawn], 2):
        assert abs((one * other).mean().item()) < 5 * deviation


def test_heads_of_ranks_are_the_heads_of_one() -> None:
    cfg = tiny(attention_dropout=0.5, num_kv_heads=4)
    qkv = torch.randn(S, 2, 3 * 32, generator=torch.Generator().manual_seed(3))

    def core(rank: int, size: int, **options: Any) -> torch.Tensor:
        own = qkv.unflatten(-1, (3, size, -1))[:, :, :, rank].flatten(2)
        attention = Attention(layers_of(cfg, Axis("tp", size, rank, tuple(range(size)))), 0, recompute_core=False)
        attention.attention = BLOCKS
        return attention._core(own.clone(), None, None, passed(range(2), **options))

    whole = core(0, 1)
    torch.testing.assert_close(torch.cat([core(0, 2), core(1, 2)], -1), whole)
    assert not torch.equal(core(0, 1, step=2), whole)
    assert not torch.equal(core(0, 1, training=False), whole)
