"""config.json to `ModelConfig` and back.

transformers 5 writes `rope_parameters` and `dtype`; 4.57, vLLM and llama.cpp read `rope_theta`, `rope_scaling` and
`torch_dtype`, and silently take defaults where those are missing. Both sets are written, and either is read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megalite.checkpoint.safetensors_io import BadCheckpoint
from megalite.config.model import ModelConfig, RopeScaling
from megalite.errors import UserError
from megalite.families import FAMILIES
from megalite.families.common import Family

# Activation in megalite -> in config.json, for gated and plain MLPs.
_GATED = {"swiglu": "silu"}
_PLAIN = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
_ALIASES = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "swish": "silu"}
_SCALING_KEYS = tuple(f.name for f in dataclasses.fields(RopeScaling))
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# What a run may choose anew without changing what the weights mean.
TRAINING_ONLY = ("arch", "seq_len", "hidden_dropout", "attention_dropout", "init_std")


def _activations(family: Family) -> dict[str, str]:
    """Names of a family's activations: gated ones where its own is."""
    return _GATED if family.options.get("activation", "swiglu") in _GATED else _PLAIN


def family_of(config: dict[str, Any], where: str) -> Family:
    """The family of a config.json."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        rule = f"model_type {model_type!r:.60} is not one of {', '.join(FAMILIES)}"
        raise BadCheckpoint(where, rule, "convert a model of one of these families")
    return FAMILIES[model_type]


def read_config(config: dict[str, Any], where: str) -> ModelConfig:
    """`ModelConfig` of a config.json; seq_len is the number of positions it is made for.

    Raises:
        UserError: an unknown family, a missing key, or something that megalite does not compute.
    """
    family = family_of(config, where)
    values = {**family.defaults, **config}

    def refuse(key: str, rule: str) -> BadCheckpoint:
        return BadCheckpoint(f"{where}: {key} {values.get(key)!r:.80}", rule, "convert another model")

    options: dict[str, Any] = dict(family.options)
    said_by: dict[str, str] = {}
    for key, name in family.fields:
        if key not in values:
            raise BadCheckpoint(where, f"has no {key}", "take the config.json that belongs to the weights")
        if name in said_by and options[name] != values[key]:
            raise refuse(key, f"differs from {said_by[name]} {options[name]!r}, and megalite has one value for both")
        options[name], said_by[name] = values[key], key
    window = values.get("sliding_window")
    if isinstance(window, int) and window >= (options["max_position_embeddings"] or 0):
        # As long as the longest sequence: full attention by another name.
        values["sliding_window"] = None
    for key, value in family.constants.items():
        if values.get(key, value) != value:
            raise refuse(key, f"is not supported: megalite computes {value!r}")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise BadCheckpoint(f"{where}: layer_types", "must all be full_attention", "convert another model")
    written = str(values.get(family.activation))
    names = {theirs: ours for ours, theirs in _activations(family).items()}
    activation = names.get(_ALIASES.get(written, written))
    if activation is None:
        raise refuse(family.activation, f"is not one of {', '.join(names)}")
    options["activation"] = activation
    if options.get("position") != "learned":
        options.update(_read_rope(config, values, family, where))
    # Absent and null both mean the default that follows from the other sizes.
    options = {k: v for k, v in options.items() if v is not None}
    if "ffn_hidden_size" not in options:
        options["ffn_hidden_size"] = 4 * options["hidden_size"]
    try:
        return ModelConfig(arch=family.name, seq_len=options["max_position_embeddings"], **options)
    except TypeError as e:
        raise BadCheckpoint(where, f"holds a value of the wrong type ({e})", "correct it") from None


def _read_rope(config: dict[str, Any], values: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Rotary options, from the new keys or the old; a stop where both are there and differ."""
    new = _typed(config["rope_parameters"]) if config.get("rope_parameters") else {}
    # A null rope_scaling says: none.
    old = _typed(config["rope_scaling"] or {}) if "rope_scaling" in config else {}
    if family.old_theta in config:
        old["rope_theta"] = config[family.old_theta]
    if family.partial_rotary and family.partial_rotary in config:
        old["partial_rotary_factor"] = config[family.partial_rotary]
    for key in sorted(new.keys() & old.keys()):
        if new[key] != old[key]:
            rule = f"rope_parameters say {new[key]!r}, the old keys {old[key]!r}"
            raise BadCheckpoint(f"{where}: {key}", rule, "correct the wrong one")
    rope = {**old, **new}
    kind = rope.get("rope_type", "default")
    options: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta", family.defaults[family.old_theta]))}
    if family.partial_rotary:
        options["rope_fraction"] = float(rope.get("partial_rotary_factor", family.defaults[family.partial_rotary]))
    if kind == "llama3":
        missing = [key for key in _SCALING_KEYS if key not in rope]
        if missing:
            raise BadCheckpoint(where, f"rope scaling llama3 has no {', '.join(missing)}", "correct it")
        options["rope_scaling"] = RopeScaling(**{key: rope[key] for key in _SCALING_KEYS})
    elif kind != "default":
        raise BadCheckpoint(
            f"{where}: rope_type {kind!r:.60}", "is neither default nor llama3", "convert another model"
        )
    return options


def _typed(rope: dict[str, Any]) -> dict[str, Any]:
    """A rope dictionary with its type under `rope_type`, whatever age it is of."""
    rest = {k: v for k, v in rope.items() if k != "type"}
    return {"rope_type": rope.get("type", "default"), **rest}


def write_config(cfg: ModelConfig, dtype: str, special: dict[str, Any]) -> dict[str, Any]:
    """config.json of a model, read alike by transformers 4.57 and 5.

    Args:
        cfg: the model.
        dtype: "float32", "bfloat16" or "float16".
        special: ids under "bos_token_id", "eos_token_id" and "pad_token_id"; None or absent where there is none.

    Raises:
        UserError: the family cannot say what this model is.
    """
    family = FAMILIES[cfg.arch]
    out: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        **family.constants,
    }
    for key, name in family.fields:
        out[key] = getattr(cfg, name)
    out[family.activation] = _activations(family).get(cfg.activation, cfg.activation)
    if cfg.position == "rope":
        out.update(_write_rope(cfg, family))
    out.update({key: special.get(key) for key in _SPECIAL})
    _check_said(cfg, out)
    return out


def _write_rope(cfg: ModelConfig, family: Family) -> dict[str, Any]:
    scaling = {"rope_type": "default"}
    if cfg.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **dataclasses.asdict(cfg.rope_scaling)}
    partial = {"partial_rotary_factor": cfg.rope_fraction} if family.partial_rotary else {}
    out: dict[str, Any] = {
        "rope_parameters": {**scaling, "rope_theta": cfg.rope_theta, **partial},
        family.old_theta: cfg.rope_theta,
        "rope_scaling": None if cfg.rope_scaling is None else scaling,
    }
    if family.partial_rotary:
        out[family.partial_rotary] = cfg.rope_fraction
    return out


def _check_said(cfg: ModelConfig, out: dict[str, Any]) -> None:
    """What was written, read again, must be the model: else its family has no word for some option."""
    remedy = f"export needs options that {cfg.arch} models have"
    try:
        again = read_config(out, "config.json of this export")
    except UserError as e:
        raise UserError(f"a model of --arch {cfg.arch}", f"cannot be exported ({e})", remedy) from None
    for f in dataclasses.fields(ModelConfig):
        said, meant = getattr(again, f.name), getattr(cfg, f.name)
        if f.name not in TRAINING_ONLY and said != meant:
            rule = f"has {f.name} {meant!r}, and a config.json of this family says {said!r}"
            raise UserError(f"a model of --arch {cfg.arch}", rule, remedy)


def special_ids(config: dict[str, Any]) -> dict[str, Any]:
    """Ids of the special tokens of a config.json."""
    return {key: config.get(key) for key in _SPECIAL}
