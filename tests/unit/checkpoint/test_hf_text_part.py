"""Models for text and images: their text part is a text model with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.extras.convert.hf import export_hf, import_hf
from megalite.runtime.checkpoint.hf.start import hf_model_config
from tests.unit.checkpoint.hf_models import GROUPED, logits_of, make_model, tokens

transformers = pytest.importorskip("transformers")

TEXT: dict[str, Any] = {**GROUPED, "head_dim": 12, "num_hidden_layers": 4, "sliding_window": 5}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A folder, and its logits of a text."""
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, eos_token_id=[1, 5]
    )
    torch.manual_seed(3)
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for p in whole.parameters():
            p.normal_(0.0, 0.2)
        logits = whole(input_ids=tokens()).logits
    folder = tmp_path_factory.mktemp("gemma3")
    whole.save_pretrained(folder)
    return folder, logits.numpy()


@pytest.mark.parametrize("names", ["as_saved", "transformers_5"])
def test_the_text_part_is_a_model_of_its_own(
    model: tuple[Path, np.ndarray], tmp_path: Path, caplog: pytest.LogCaptureFixture, names: str
) -> None:
    from safetensors.torch import load_file, save_file

    folder, expected = model
    stored = load_file(folder / "model.safetensors")
    if names == "transformers_5":
        stored = {
            name.replace("language_model.model.", "model.language_model.").replace(
                "language_model.lm_head", "lm_head"
            ): x
            for name, x in stored.items()
        }
        assert any(name.startswith("model.language_model.layers.") for name in stored)
    else:
        assert any("vision_tower" in name for name in stored)
    (tmp_path / "hf").mkdir()
    save_file(stored, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    (tmp_path / "hf" / "config.json").write_bytes((folder / "config.json").read_bytes())
    import_hf(tmp_path / "hf", tmp_path / "ckpt")
    images = sum("vision_tower" in name or "multi_modal" in name for name in stored)
    assert f"the text part alone is taken; {images} tensors for images are left out" in caplog.text
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    np.testing.assert_allclose(logits_of(tmp_path / "out").numpy(), expected, atol=1e-5, rtol=0)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["eos_token_id"]) == ("gemma3_text", [1, 5])


def test_what_a_text_config_may_omit(model: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    """The 4B model's names hidden size, layers and little else: the rest is transformers' default."""
    from megalite.runtime.checkpoint.hf.config import read_config
    from megalite.runtime.checkpoint.hf.text_part import text_config

    published = {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    cfg = read_config(text_config(published, "here"), "here")
    defaults = transformers.Gemma3TextConfig()
    assert (cfg.vocab_size, cfg.num_heads, cfg.kv_heads) == (
        defaults.vocab_size,
        defaults.num_attention_heads,
        defaults.num_key_value_heads,
    )
    assert (cfg.num_layers, cfg.hidden_size, cfg.window, cfg.window_pattern) == (34, 2560, 1024, 6)
    folder, _ = model
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "text_config": 5})
    )
    with pytest.raises(UserError, match="model_type gemma3 has no text_config"):
        hf_model_config(tmp_path)


def test_the_text_part_of_llama_4(models_of_llama_4: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Under the names of the hub."""
    from safetensors.torch import load_file, save_file

    text = load_file(models_of_llama_4 / "model.safetensors")
    config = json.loads((models_of_llama_4 / "config.json").read_text())
    whole = {f"language_model.{name}": x for name, x in text.items()}
    whole |= {"vision_model.class_embedding": torch.zeros(4), "multi_modal_projector.linear_1.weight": torch.zeros(2)}
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file(whole, hub / "model.safetensors")
    (hub / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": config}))
    import_hf(hub, tmp_path / "ckpt")
    assert "2 tensors for images are left out" in caplog.text
    written = export_hf(tmp_path / "ckpt", tmp_path / "out")
    assert written["model_type"] == "llama4_text"
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == text.keys()
    assert all(torch.equal(out[name], text[name]) for name in text)


@pytest.fixture
def models_of_llama_4(tmp_path: Path) -> Path:
    make_model("llama4", tmp_path / "text")
    return tmp_path / "text"
