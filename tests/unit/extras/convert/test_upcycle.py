"""Upcycling: a dense folder as a model with experts, whose logits are those of the folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.extras.convert import command
from megalite.extras.convert.hf import export_hf
from tests.unit.checkpoint.hf_models import logits_of, make_model, read_all, tokens


def upcycle(folder: Path, out: Path, *more: str) -> None:
    command.main(["import", "--hf", str(folder), "--out", str(out), "--num-experts", "4", *more])


@pytest.mark.parametrize(("case", "arch"), [("llama", "mixtral"), ("qwen3", "qwen3_moe")])
def test_logits_stay(tmp_path: Path, case: str, arch: str) -> None:
    with torch.no_grad():
        expected = make_model(case, tmp_path / "dense")(tokens()).logits
    upcycle(tmp_path / "dense", tmp_path / "ckpt", "--moe-topk", "3", "--seed", "5")
    config = export_hf(tmp_path / "ckpt", tmp_path / "sparse")
    assert config["model_type"] == arch
    assert config["num_experts_per_tok"] == 3
    np.testing.assert_allclose(logits_of(tmp_path / "sparse"), expected, rtol=0, atol=2e-5)
    routers = [t for name, t in read_all(tmp_path / "sparse").items() if name.endswith(".gate.weight")]
    assert len(routers) == 2
    assert not torch.equal(*routers)
    assert all(0.05 < router.std() < 0.2 for router in routers)
    if arch == "qwen3_moe":
        # Weights whose sum is not 1 would show.
        path = tmp_path / "sparse" / "config.json"
        path.write_text(json.dumps({**config, "norm_topk_prob": False}))
        assert (logits_of(tmp_path / "sparse") - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("case", "more", "says"),
    [
        ("mixtral", (), "--num-experts 4: the model has 4 experts already"),
        ("llama3_tied_biased", (), "--mlp-bias with --num-experts 4: experts made of an MLP have no biases"),
        ("llama", ("--moe-topk", "5"), "--moe-topk 5: is more than the 4 experts"),
        ("llama", ("--iteration", "3"), "--iteration 3: applies to --megatron only"),
    ],
)
def test_what_is_refused(tmp_path: Path, case: str, more: tuple[str, ...], says: str) -> None:
    make_model(case, tmp_path / "dense")
    with pytest.raises(UserError, match=says):
        upcycle(tmp_path / "dense", tmp_path / "ckpt", *more)
    assert not (tmp_path / "ckpt").exists()


def test_experts_need_their_number(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--moe-topk or --seed: applies to a model that gets experts"):
        command.main(["import", "--hf", "x", "--out", str(tmp_path / "ckpt"), "--moe-topk", "2"])
    with pytest.raises(UserError, match="--num-experts 4: applies to --hf only"):
        command.main(["import", "--megatron", "x", "--out", str(tmp_path / "ckpt"), "--num-experts", "4"])
