"""What FP8 cannot quantize is refused in one line, before ranks start."""

from __future__ import annotations

import pytest

from megalite.core.base.errors import UserError
from megalite.core.options.recipe import RECIPES
from megalite.core.parts.options.fp8_options import describe_fp8, fp8_layers
from megalite.runtime.options.cli import parse
from megalite.runtime.options.run import Config

SIZES = "--vocab-size 90 --num-layers 4 --hidden-size 512 --num-heads 8 --num-kv-heads 8 --seq-len 128"


def config(flags: str) -> Config:
    return parse([*SIZES.split(), *flags.split()]).config


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        # Eight key heads of 64 at tp 8 are 64 rows for a rank.
        (
            "--fp8 blockwise --precision bf16 --tp 8",
            "64 queries of a rank: must be divisible by 128: a cut inside a block",
        ),
        (
            "--fp8 blockwise --precision bf16 --tp 2 --num-kv-heads 2",
            "with 64 keys of a rank: must be divisible by 128",
        ),
        ("--fp8 blockwise --precision bf16 --ffn-hidden-size 1000", "1000 inner features of a rank: must be div"),
        ("--fp8 blockwise --precision bf16 --seq-len 64", "with 64 tokens of a micro-batch: must be divisible by 128"),
        ("--fp8 mxfp8 --precision bf16 --ffn-hidden-size 1040", "must be divisible by 32"),
    ],
)
def test_bad_input(flags: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        config(flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_accepted_cuts_no_block(name: str) -> None:
    recipe = RECIPES[name]
    assert all(recipe.multiple % extent == 0 for extent in (*recipe.activation, *recipe.weight) if extent)


def test_cuts_on_block_borders_are_accepted() -> None:
    sizes = "--tp 4 --micro-batch-size 2 --seq-len 64 --ffn-hidden-size 1024"
    cfg = config(f"{sizes} --precision bf16 --fp8 blockwise --fp8-keep-bf16 1")
    assert list(fp8_layers(cfg.model, cfg.train)) == [1, 2]
    assert describe_fp8(cfg.model, cfg.train) == ", FP8 blockwise (products of layers 1 to 2)"
    moe = config("--arch mixtral --num-experts 4 --precision bf16 --fp8 tensorwise --ffn-hidden-size 1024")
    told = ", FP8 tensorwise (products of layers 0 to 3, experts one after the other)"
    assert describe_fp8(moe.model, moe.train) == told
    plain = config("")
    assert not fp8_layers(plain.model, plain.train)
    assert describe_fp8(plain.model, plain.train) == ""
