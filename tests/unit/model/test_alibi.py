"""ALiBi's columns against the bias written out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megalite.core import ops as kernels
from megalite.core.base.errors import UserError
from megalite.core.batch import Documents, Mask, Positions
from megalite.core.parts.positions.alibi import columns as alibi
from megalite.runtime.options.cli import parse

CPU = torch.device("cpu")


def test_slopes_are_those_of_the_paper() -> None:
    assert alibi.slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi.slopes(16) == pytest.approx([2 ** (-i / 2) for i in range(1, 17)])
    # Every other one of twice as many follows those of the power of 2 below (the authors' code).
    assert alibi.slopes(12) == pytest.approx([*(2.0**-i for i in range(1, 9)), *(2 ** (-i / 2) for i in (1, 3, 5, 7))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_of_columns_are_the_bias(dtype: torch.dtype) -> None:
    slopes, length, scale = alibi.slopes(12), 2**16, 64**-0.5
    queries = alibi.of_queries(slopes, scale, 8, dtype, CPU)
    (keys,) = alibi.OfKeys(8)(Positions.of_samples(length), CPU)
    assert torch.equal(keys.to(dtype).float(), keys)
    bias = scale * queries.double() @ keys[:, 0].double().T
    expected = torch.tensor(slopes).double()[:, None] * torch.arange(length)
    torch.testing.assert_close(bias, expected, rtol=2e-7, atol=1e-6)


@pytest.mark.parametrize("documents", [False, True])
def test_attention_is_that_with_a_bias(documents: bool) -> None:
    generator, heads, length, width = torch.Generator().manual_seed(1), 6, 300, 16
    q, k, v = (torch.randn(2, heads, length, width, generator=generator) for _ in range(3))
    starts = (torch.arange(length)[:, None] // torch.tensor([70, 110])) * torch.tensor([70, 110])
    own = Documents.of(starts.T.numpy(), starts) if documents else None
    slopes, scale = alibi.slopes(heads), width**-0.5
    (of_keys,) = alibi.OfKeys(8)(Positions.of_samples(length, own), CPU)
    of_q = alibi.of_queries(slopes, scale, 8, torch.float32, CPU)[:, None].expand(2, -1, length, -1)
    of_k = of_keys.permute(1, 0, 2)[:, None].expand(2, heads, -1, -1)
    attention = kernels.resolve(None, CPU, torch.float32).attention
    wide = attention(torch.cat((q, of_q), -1), torch.cat((k, of_k), -1), v, Mask(), own, scale=scale)

    at = torch.arange(length)
    distance = (at - at[:, None]).double()
    scores = q.double() @ k.double().transpose(2, 3) * scale + torch.tensor(slopes)[:, None, None] * distance
    seen = (distance <= 0) & ((at >= starts.T[..., None]) if documents else True)
    seen = seen[:, None] if documents else seen
    expected = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v.double()
    # Scores of 150 have steps of 1.5e-5.
    torch.testing.assert_close(wide.double(), expected, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("option", ["--attention-sinks", "--attention-softcap 30", "--seq-len 65537"])
def test_what_sees_more_than_differences_of_scores_is_refused(option: str) -> None:
    """A bias by the key's position alone is ALiBi's up to a constant of each query, which a sink would see."""
    with pytest.raises(UserError, match=f"{option.split()[0]}.* with --position alibi"):
        parse(f"--num-layers 1 --hidden-size 64 --num-heads 4 --position alibi {option}".split())


@pytest.mark.parametrize(("head", "rotated"), [(88, 30), (104, 30), (392, 32), (440, 64), (256, 64)])
def test_a_part_of_a_head_that_is_rotated_comes_back_from_its_fraction(head: int, rotated: int) -> None:
    assert replace(parse([]).config.model, head_dim=head, rope_fraction=rotated / head).rotary_dim == rotated
