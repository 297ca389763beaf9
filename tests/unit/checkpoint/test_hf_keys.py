"""Keys of config.json, of every family: what files leave out, and what megalite does not know.

Transformers says which keys there are, what they are when a file has none, and which of them matter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.options.model import ModelConfig
from megalite.core.parts.families import FAMILIES
from megalite.runtime.checkpoint.hf.config import read_config
from tests.unit.checkpoint.hf_models import CASES, tokens

transformers = pytest.importorskip("transformers", "5")


def options_of(family: str) -> dict[str, Any]:
    return next(options for model_type, options in CASES.values() if model_type == family)


def raw(config: Any) -> dict[str, Any]:
    return {"architectures": [FAMILIES[config.model_type].architecture], **config.to_dict()}


def outcome(values: dict[str, Any]) -> ModelConfig | None:
    """The model; None: it is refused."""
    try:
        return read_config(values, "config.json")
    except UserError:
        return None


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_files_leave_out_are_as_in_transformers(family: str) -> None:
    """Switches, numbers and names; files say how many there are of anything."""
    whole = raw(transformers.AutoConfig.for_model(family, **options_of(family)))
    theirs = transformers.AutoConfig.for_model(family).to_dict()
    for key in whole.keys() & {*FAMILIES[family].defaults, "rope_parameters"}:
        if isinstance(value := theirs.get(key), bool | float | str | dict):
            left_out = {name: value for name, value in whole.items() if name != key}
            assert outcome(left_out) == outcome({**whole, key: value}), f"{key} {value}"


def computed(config: Any, weights: dict[str, torch.Tensor] | None = None) -> tuple[Any, dict[str, torch.Tensor]]:
    """Logits of transformers in training, and the weights: those given, as far as the model has them."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    if weights is None:
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.data.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.2)
    else:
        model.load_state_dict(weights, strict=False)
    torch.manual_seed(4)
    with torch.no_grad():
        return model(tokens()).logits, model.state_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_changes_a_model_is_read_or_refused(family: str) -> None:
    """Switches the other way round, and other numbers."""
    own = transformers.AutoConfig.for_model(family, **options_of(family))
    expected, (logits, weights) = outcome(raw(own)), computed(own)
    for key, value in own.to_dict().items():
        if not isinstance(value, bool | float):
            continue
        other = not value if isinstance(value, bool) else value * 1.5 or 0.25
        try:
            config = transformers.AutoConfig.for_model(family, **{**options_of(family), key: other})
            changed, names = computed(config, weights)
        except Exception:  # transformers cannot, either
            continue
        if names.keys() == weights.keys() and torch.allclose(changed, logits, rtol=1e-4, atol=1e-5):
            continue
        assert outcome(raw(config)) != expected, f"{key} {other}: makes another model, and was not read"
