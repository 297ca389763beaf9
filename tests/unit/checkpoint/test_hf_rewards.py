"""Models of rewards of each family, as transformers' classifiers read and write them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.batch import ForwardPass, MicroBatch
from megalite.core.parts.families import FAMILIES
from megalite.extras.convert.hf import export_hf, import_hf
from megalite.runtime.checkpoint.hf.config import write_config
from megalite.runtime.checkpoint.hf.start import hf_model_config, load_hf
from tests.parity.jobs import engines, make_config
from tests.unit.checkpoint.hf_models import CASES, make_model, read_all, tokens

transformers = pytest.importorskip("transformers")
CLASSED = [case for case, (family, _) in CASES.items() if FAMILIES[family].classifier is not None]


def classifier(folder: Path) -> Any:
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def test_families_without_a_class_are_those_that_transformers_has_none_of() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    for name, family in FAMILIES.items():
        assert family.class_of("score") == NAMES.get(name), name


@pytest.mark.parametrize("case", CLASSED)
def test_rewards_and_round_trip(tmp_path: Path, case: str) -> None:
    """Documents with ids of special tokens inside; one at a time, as the pad id is unknown."""
    make_model(case, tmp_path / "lm")
    torch.manual_seed(5)
    classifier(tmp_path / "lm").save_pretrained(tmp_path / "theirs")
    model = hf_model_config(tmp_path / "theirs")
    assert (model.head, model.tie_embeddings) == ("score", False)
    import_hf(tmp_path / "theirs", tmp_path / "checkpoint")
    config = export_hf(tmp_path / "checkpoint", tmp_path / "ours", dtype="fp32")
    assert config["num_labels"] == 1
    theirs, ours = read_all(tmp_path / "theirs"), read_all(tmp_path / "ours")
    assert ours["score.weight"].equal(theirs["score.weight"])
    hf, ids = classifier(tmp_path / "ours"), tokens()[:, :15]
    assert type(hf).__name__ == config["architectures"][0]
    with torch.no_grad():
        expected = [hf(row[None]).logits.item() for row in ids]
    model = dataclasses.replace(model, seq_len=15)
    cfg = make_config(model, micro_batch_size=2, global_batch_size=2, stage="reward")
    (engine,) = engines([cfg], 1)
    load_hf(tmp_path / "ours", cfg.model, engine.optimizer.states(), engine.ctx)
    engine.optimizer.finish_load()
    batch = MicroBatch.of_samples(ids.t().contiguous())
    with torch.no_grad():
        rewards = engine.stages[0](batch.tokens_SB, batch, ForwardPass(0, 0, training=False))
    scale = max(1.0, *map(abs, expected))
    np.testing.assert_allclose(rewards[-1, :, 0], expected, atol=1e-6 * scale, rtol=1e-6)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.classifier is None])
def test_a_family_without_a_class_is_not_exported(tmp_path: Path, family: str) -> None:
    make_model(next(case for case, (name, _) in CASES.items() if name == family), tmp_path / "lm")
    model = dataclasses.replace(hf_model_config(tmp_path / "lm"), head="score", mtp_num_layers=0)
    with pytest.raises(UserError, match="no class of this family"):
        write_config(model, "float32", {})


def test_a_classifier_of_more_labels_is_refused(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "lm")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=3)
    model.save_pretrained(tmp_path / "labels")
    with pytest.raises(UserError, match="num_labels 3"):
        hf_model_config(tmp_path / "labels")
