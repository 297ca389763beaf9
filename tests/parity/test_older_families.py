"""Families of before Llama: five steps of AdamW beside transformers' own models, and every gradient beside those of one
process.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from megalite.runtime.checkpoint.hf.start import hf_model_config
from megalite.runtime.data import Rows
from tests.parity import jobs
from tests.parity.families import tiny
from tests.parity.features import Feature
from tests.parity.harness import ranks_of
from tests.parity.models import MIXTRAL, dropped
from tests.parity.oracle import STARTS, Expected, check_follows, train_plainly
from tests.parity.oracle import damped as damped
from tests.rows import always_run
from tests.unit.checkpoint.hf_models import load_model, make_model, read_all
from tests.workers import WorkerPool

pytestmark = pytest.mark.usefixtures("damped")

FAMILIES, STEPS = ("opt", "bloom", "gpt_neo", "gptj"), 3
# Of transformers' models: OPT-350M has norms of sums and embeddings that are projected.
MODELS_OF_HF = (*FAMILIES, "opt_350m")
# World -> layouts, one after the other on the same ranks.
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"tp": 2, "sequence_parallel": False}, {"pp": 2, "schedule": "zb-h1"}],
    4: [
        {"tp": 2, "cp": 2, "cp_comm": "ring"},
        {"tp": 2, "zero": 3, "zero_whole_below": 500},
        {"pp": 2, "zero": 2, "schedule": "gpipe"},
    ],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of each family, and what transformers and torch make of it: figures of every step, last weights."""
    made: dict[str, Expected] = {}

    def get(family: str) -> Any:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            make_model(family, folder)
            hf = load_model(folder)
            steps = train_plainly(hf, STEPS)
            hf.save_pretrained(folder / "trained")
            made[family] = folder, steps, read_all(folder / "trained")
        return made[family]

    return get


CASES = [(world, family) for world in LAYOUTS for family in MODELS_OF_HF]
# In one process each family.
ALWAYS = [*CASES[: len(MODELS_OF_HF)], (2, "bloom"), (2, "gptj"), (2, "opt_350m")]


@pytest.mark.parametrize("case", always_run(CASES, *ALWAYS), ids=lambda case: f"{case[1]}-of{case[0]}")
def test_every_layout_follows_transformers(
    pool: WorkerPool, models: Any, tmp_path: Path, case: tuple[int, str]
) -> None:
    world, family = case
    expected = models(family)
    model = dataclasses.replace(
        hf_model_config(expected[0]), seq_len=jobs.SEQ, hidden_dropout=0.0, attention_dropout=0.0
    )
    # Two micro-batches accumulate; a pipeline has more.
    sizes = (2 if "pp" in layout or world > 2 and "cp" not in layout else 4 for layout in LAYOUTS[world])
    options = [{"train_steps": STEPS, "micro_batch_size": size} for size in sizes]
    cfgs = [jobs.make_config(model, layout, **more) for layout, more in zip(LAYOUTS[world], options)]
    check_follows(pool, expected, cfgs, world, tmp_path)


def packed(step: int) -> Rows:
    """Samples of several documents: positions are counted in each."""
    batch = jobs.batches(step)[step - 1]
    return Rows(batch[:, :-1], batch[:, 1:], STARTS)


MODELS = [dataclasses.replace(tiny(family), init_std=0.1) for family in FAMILIES]
OPT_350M = dataclasses.replace(MODELS[0], norm_position="sum", embedding_size=24)
# Two query heads on each key head, a window and an output gate; and a module that predicts a further token, whose
# output layer has a bias.
BLOOM = dataclasses.replace(
    tiny("bloom"),
    init_std=0.1,
    num_kv_heads=4,
    window=7,
    attention_output_gate=True,
)
# Sums of experts' outputs, and every option of an embedding and an output layer beside their projections.
SUMS_OF_EXPERTS = dataclasses.replace(MIXTRAL, norm_position="sum", embedding_size=24)
PROJECTED = jobs.llama(
    init_std=0.1, embedding_size=20, embedding_norm=True, scale_embeddings=True, head_bias=True, logit_softcap=5.0
)
FURTHER = jobs.llama(position="alibi", head_bias=True, mtp_num_layers=1, init_std=0.1)


# Each family has one of two rows of a sort, and with --full the other. GPT-J alone has an output layer with a bias.
SPLIT: tuple[dict[str, Any], int] = ({"schedule": "zb-v", "vp": 2}, 0)
BY_CHUNKS: tuple[dict[str, Any], int] = ({"sequence_parallel": False}, 5)
RING, ALL_TO_ALL = (3, "ring", "selective"), (1, "a2a", "full")


class TestOlderFamilies(Feature):
    strong = {
        ranks_of(4, tp=2, pp=2): [
            (model, 1, more, {"loss_chunk": chunk})
            for model, (more, chunk) in zip((*MODELS, OPT_350M), (SPLIT, BY_CHUNKS, SPLIT, BY_CHUNKS, SPLIT))
        ],
        ranks_of(2, cp=2): [(BLOOM, 1, {"cp_comm": comm}, {"data": packed}) for comm in ("gather", "a2a")],
        ranks_of(4, tp=2, cp=2): [
            (model, zero, {"cp_comm": comm}, {"recompute": recompute})
            for model, (zero, comm, recompute) in zip((*MODELS, OPT_350M), (RING, ALL_TO_ALL, RING, ALL_TO_ALL, RING))
        ],
        ranks_of(2, pp=2): [(FURTHER, 1, {}, {})],
    }
    grid = {
        ranks_of(4, tp=2, pp=2): [
            (model, 1, more, {"loss_chunk": chunk})
            for model, (more, chunk) in zip((*MODELS, OPT_350M), (BY_CHUNKS, SPLIT, BY_CHUNKS, SPLIT, BY_CHUNKS))
        ],
        ranks_of(4, tp=2, cp=2): [
            (model, zero, {"cp_comm": comm}, {"recompute": recompute})
            for model, (zero, comm, recompute) in zip(MODELS, (ALL_TO_ALL, RING) * 2)
        ],
        ranks_of(4, ep=2): [(SUMS_OF_EXPERTS, 1, {}, {})],
        ranks_of(2, pp=2): [
            (dataclasses.replace(FURTHER, norm_position="sum"), 1, {}, {}),
            (PROJECTED, 3, {}, {"recompute": "full"}),
        ],
        ranks_of(4, tp=4): [(model, 2, {}, {}) for model in (*MODELS, OPT_350M)],
        ranks_of(4, cp=4): [(model, 1, {"cp_comm": comm}, {}) for model in MODELS for comm in ("gather", "a2a+ring")],
    }
    recomputed = {ranks_of(1): [(dropped(model), 1, {}, {}) for model in (BLOOM, tiny("gptj"), OPT_350M)]}
    # ALiBi, and one norm for attention and feed-forward.
    compiled = [
        (ranks_of(2, tp=2), (dataclasses.replace(model, num_layers=2), 1, {}, {}))
        for model in (BLOOM, tiny("gptj"), OPT_350M)
    ]
    refused = [
        (functools.partial(dataclasses.replace, tiny(family)), options, {}, says)
        for family, options, says in (
            ("opt", {"position": "rope"}, "--position-offset 2 with --position rope: is of learned positions"),
            ("bloom", {"attention_softcap": 2.0}, "--attention-softcap 2.0 with --position alibi: would cap the bias"),
            (
                "gptj",
                {"parallel_residual": False},
                "--norm-position shared without --parallel-residual: is one norm",
            ),
            ("gptj", {"tie_embeddings": True}, "--head-bias with --tie-embeddings: an output layer that shares its"),
            (
                "opt",
                {"embedding_size": 16, "mtp_num_layers": 1},
                "--embedding-size 16 with --mtp-num-layers 1: embeddings of further tokens are not projected",
            ),
            ("bloom", {"seq_len": 70000}, "--seq-len 70000 with --position alibi: is longer than the 65536 positions"),
        )
    ]
