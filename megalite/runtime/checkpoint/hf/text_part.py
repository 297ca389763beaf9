"""The language model of a folder that has images too (Gemma 3 from 4B on, Llama 4): its config.json, its names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from megalite.core.base.log import warn_on_rank_0
from megalite.core.parts.families import FAMILIES
from megalite.runtime.checkpoint.hf.config import special_ids
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint

_OTHERS = re.compile(r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\..*")
# On the hub the model lies in language_model.model, transformers 5 writes model.language_model.
_PREFIX = re.compile(r"^(model\.)?language_model\.")
T = TypeVar("T")


def text_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the config.json of the language model; that of a model without other parts is returned as it is.

    Raises:
        BadCheckpoint: it has no text_config.
    """
    model_type = str(config.get("model_type"))
    family = next((family for family in FAMILIES.values() if model_type in family.text_of), None)
    if family is None:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise BadCheckpoint(where, f"model_type {model_type} has no text_config", "complete the download")
    special = {key: value for key, value in special_ids(config).items() if value is not None}
    return {**family.text_of[model_type], **text, **special, "model_type": family.name}


def text_tensors(tensors: Mapping[str, T], where: str) -> dict[str, T]:
    """Return the tensors of the language model, under the names that it has alone; the number of others is logged."""
    text = {_PREFIX.sub(r"\1", name): tensor for name, tensor in tensors.items() if not _OTHERS.fullmatch(name)}
    left_out = len(tensors) - len(text)
    warn_on_rank_0(f"{where}: the text part alone is taken; {left_out} tensors for images are left out")
    return text
