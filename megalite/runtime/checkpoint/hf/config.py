"""Convert config.json to `ModelConfig` and back.

transformers 5 writes `rope_parameters` and `dtype`; 4.57, vLLM and llama.cpp read `rope_theta`, `rope_scaling` and
`torch_dtype`, and silently take defaults where those are missing. Both sets are written; either is read.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from megalite.core.base.errors import UserError, require
from megalite.core.base.log import logger
from megalite.core.options.choices import ACTIVATIONS
from megalite.core.options.model import ModelConfig
from megalite.core.options.rope import SCALING_FIELDS, RopeScaling
from megalite.core.options.values import choices_of, fits, rule_of
from megalite.core.parts.families import FAMILIES
from megalite.core.parts.families.common import Family
from megalite.core.parts.options.attention_options import FULL, SLIDING
from megalite.core.parts.options.expert_options import BALANCING
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint

_ALIASES = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "swish": "silu"}
_STRETCH = ("factor", "original_max_position_embeddings")
_SCALING_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (*_STRETCH, *SCALING_FIELDS["llama3"]),
    "yarn": _STRETCH,
}
_FACTORS = ("attention_factor", "mscale", "mscale_all_dim")
_NUMBERS = (
    "rope_theta",
    "rope_theta_local",
    "partial_rotary_factor",
    *_SCALING_KEYS["llama3"],
    "beta_slow",
    "beta_fast",
    *_FACTORS,
)
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# Options that a run may change without changing the meaning of the weights.
TRAINING_ONLY = ("arch", "seq_len", "hidden_dropout", "attention_dropout", "init_std", *BALANCING)


def _activations(family: Family) -> dict[str, str]:
    """Return the activations that the family's config.json can name: its own if that is gated, else all plain ones."""
    default = family.options.get("activation", "swiglu")
    plain = {name: kind.hf for name, kind in ACTIVATIONS.items() if kind.hf and not kind.gated}
    return {default: ACTIVATIONS[default].hf or default} if default not in plain else plain


def family_of(config: dict[str, Any], where: str) -> Family:
    """Return the family of a config.json."""
    model_type = config.get("model_type")
    model_type = next((f.name for f in FAMILIES.values() if model_type in f.others), model_type)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        rule = f"model_type {model_type!r:.60} is not one of {', '.join(FAMILIES)}"
        raise BadCheckpoint(where, rule, "convert a model of one of these families")
    return FAMILIES[model_type]


def read_config(config: dict[str, Any], where: str) -> ModelConfig:
    """Read the `ModelConfig` of a config.json; seq_len is its number of positions.

    Raises:
        UserError: an unknown family, a missing key, or something that megalite does not support.
    """
    family = family_of(config, where)
    values = {**family.defaults, **config}
    _check_types(values, family, where)

    def refuse(key: str, rule: str) -> BadCheckpoint:
        return BadCheckpoint(f"{where}: {key} {values.get(key)!r:.80}", rule, "convert another model")

    options, source_of = dict(family.options), dict[str, str]()
    given = {name for key, name in family.fields if key in values}
    for key, name in family.fields:
        if key not in values and name in given:
            continue  # the field has another key
        if key not in values:
            raise BadCheckpoint(where, f"has no {key}", "use the config.json that belongs to the weights")
        if name in source_of and options[name] != values[key]:
            raise refuse(key, f"differs from {source_of[name]} {options[name]!r}, and megalite has one value for both")
        options[name], source_of[name] = values[key], key
    options |= family.read(values, options)
    window = values.get("sliding_window")
    if isinstance(window, int) and window >= (options["max_position_embeddings"] or 0):
        # No shorter than the longest sequence, so equal to full attention.
        values["sliding_window"] = None
    for key, value in family.constants.items():
        # Null and false mean the same.
        if (values.get(key, value) or None) != (value or None):
            raise refuse(key, f"is not supported: megalite computes {value!r}")
    if "window" in options:
        options.update(_read_pattern(config, options, where))
    elif "layer_types" not in family.derived and any(kind != FULL for kind in config.get("layer_types") or ()):
        raise BadCheckpoint(f"{where}: layer_types", "must all be full_attention", "convert another model")
    written = str(values.get(family.activation))
    names = {_ALIASES.get(theirs, theirs): ours for ours, theirs in _activations(family).items()}
    activation = names.get(_ALIASES.get(written, written))
    if activation is None:
        raise refuse(family.activation, f"is not one of {', '.join(names)}")
    options["activation"] = activation
    options["head"] = _read_head(values, where)
    if options["head"] == "score":
        options["mtp_num_layers"] = 0  # which config.json may name, and files of classifiers do not hold
    if options.get("position", "rope") == "rope" and family.old_theta:
        options.update(_read_rope(config, values, family, where))
    # Absent and null both mean the default, derived from the other sizes.
    options = {k: v for k, v in options.items() if v is not None}
    options.setdefault("ffn_hidden_size", 4 * options["hidden_size"])
    return _made(family, options, values, where)


def _read_head(values: dict[str, Any], where: str) -> str:
    """Read what a model ends in, from the name of its class."""
    names = values.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith("ForSequenceClassification") for name in names):
        return "lm"
    labels = values.get("id2label")
    number = values.get("num_labels", len(labels) if isinstance(labels, dict) else 2)
    if number != 1:
        rule = "is not supported: megalite reads one, a reward"
        raise BadCheckpoint(f"{where}: num_labels {number!r:.20}", rule, "convert another model")
    return "score"


def _made(family: Family, options: dict[str, Any], values: dict[str, Any], where: str) -> ModelConfig:
    """Make the model; lists of layers must be those that the family would write."""
    try:
        cfg = ModelConfig(arch=family.name, seq_len=options["max_position_embeddings"], **options)
    except TypeError as e:
        raise BadCheckpoint(where, f"holds a value of the wrong type ({e})", "correct it") from None
    for key, value in family.write(cfg).items():
        if isinstance(value, list) and (values.get(key) or value) != value:
            raise BadCheckpoint(
                f"{where}: {key}", f"is not supported: megalite computes {value}", "convert another model"
            )
    return cfg


def _check_types(values: dict[str, Any], family: Family, where: str) -> None:
    """Refuse values of another type than their option has; null stands for the default."""
    hints, old = get_type_hints(ModelConfig), (family.old_theta, family.local_theta, family.partial_rotary)
    expected: dict[str, Any] = {
        **dict.fromkeys(("sliding_window", "sliding_window_pattern", "_sliding_window_pattern"), int),
        **dict.fromkeys(("rope_parameters", "rope_scaling"), dict),
        **dict.fromkeys((key for key in old if key), float),
        **{key: hints[name] for key, name in family.fields},
        **family.derived,
        "layer_types": list,
        family.activation: str,
    }
    for key, hint in expected.items():
        if values.get(key) is not None:
            _check_type(where, key, values[key], hint)
    nested = [values.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    nested += [inner for rope in nested for inner in rope.values() if isinstance(inner, dict)]
    kinds = {**dict.fromkeys(_NUMBERS, float), **dict.fromkeys(("rope_type", "type"), str), "truncate": bool}
    kinds |= dict.fromkeys(("full_attention", "sliding_attention"), dict)
    for key, value in (item for rope in nested for item in rope.items()):
        if key in kinds:
            _check_type(where, key, value, kinds[key])


def _check_type(where: str, key: str, value: Any, hint: Any) -> None:
    if not fits(hint, value):
        raise BadCheckpoint(f"{where}: {key} {value!r:.80}", f"is of the wrong type: {rule_of(hint)}", "correct it")
    if (choices := choices_of(hint)) and value not in choices:
        raise BadCheckpoint(f"{where}: {key} {value!r:.80}", rule_of(hint), "convert another model")


def _read_pattern(config: dict[str, Any], options: dict[str, Any], where: str) -> dict[str, Any]:
    """Read which layers have the window: from `layer_types`, else from the older key or the family."""
    written = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    pattern = {"window_pattern": options.get("window_pattern", 0) if written is None else written}
    if (types := config.get("layer_types")) is None:
        return pattern
    if len(types) != options["num_layers"] or not set(map(str, types)) <= {FULL, SLIDING}:
        rule = f"must name {options['num_layers']} layers, each {SLIDING} or {FULL}"
        raise BadCheckpoint(f"{where}: layer_types", rule, "convert another model")
    # Without a window, or with one as long as the model's positions, all layers see everything.
    return {**pattern, "layer_types": tuple(types)} if options["window"] is not None else pattern


def _layer_types(cfg: ModelConfig) -> list[str]:
    """Name the attention of each layer as transformers does."""
    return [FULL if cfg.window_of(layer) is None else SLIDING for layer in range(cfg.num_layers)]


def _read_rope(config: dict[str, Any], values: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Read the rotary options from the new keys or the old ones; raise where both are present and differ."""
    # Without either key, readers take the family's. A null rope_scaling alone means that to some, and none to others.
    assumed = {} if config.get("rope_scaling") else family.defaults.get("rope_parameters", {})
    new = _new_rope(config.get("rope_parameters") or assumed, family, where)
    old = _with_type(config["rope_scaling"] or {}) if "rope_scaling" in config else {}
    old_keys = {
        "rope_theta": family.old_theta,
        "rope_theta_local": family.local_theta,
        "partial_rotary_factor": family.partial_rotary,
    }
    old.update({key: config[theirs] for key, theirs in old_keys.items() if theirs in config})
    for key in sorted(new.keys() & old.keys()):
        if new[key] != old[key]:
            rule = f"rope_parameters say {new[key]!r}, the old keys {old[key]!r}"
            raise BadCheckpoint(f"{where}: {key}", rule, "correct the wrong one")
    rope = {**{key: family.defaults[theirs] for key, theirs in old_keys.items() if theirs}, **old, **new}
    options: dict[str, Any] = {"rope_theta": float(rope["rope_theta"])}
    if family.local_theta:
        options["rope_theta_local"] = float(rope["rope_theta_local"])
    if family.partial_rotary:
        options["rope_fraction"] = float(rope["partial_rotary_factor"])
    key = "original_max_position_embeddings"
    # As transformers; of Phi-3 it takes a key beside the scaling.
    if rope.get("rope_type") in SCALING_FIELDS and key not in {**rope, **values} and family.name != "phi3":
        rope[key] = values["max_position_embeddings"]
        logger.warning(f"{where}: rope scaling {rope['rope_type']} has no {key}: {rope[key]}, as transformers takes it")
    return {**options, **_read_scaling(rope, where)}


def _new_rope(rope: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Read `rope_parameters`, with those of sliding-window layers as `rope_theta_local`."""
    if not any(isinstance(value, dict) for value in rope.values()):
        return _with_type(rope) if rope else {}
    full, local = (rope.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    if not family.local_theta or _with_type(local)["rope_type"] != "default":
        rule = f"{rope!r:.80} is not supported: megalite does not scale frequencies of sliding-window layers"
        raise BadCheckpoint(f"{where}: rope_parameters", rule, "convert another model")
    return {**_with_type(full), **({"rope_theta_local": local["rope_theta"]} if "rope_theta" in local else {})}


def _read_scaling(rope: dict[str, Any], where: str) -> dict[str, Any]:
    """Read the scaling of the frequencies: none, llama3, yarn or linear."""
    kind = rope.get("rope_type", "default")
    if kind not in _SCALING_KEYS:
        rule = f"is not one of {', '.join(_SCALING_KEYS)}"
        raise BadCheckpoint(f"{where}: rope_type {kind!r:.60}", rule, "convert another model")
    missing = [key for key in _SCALING_KEYS[kind] if key not in rope]
    if missing:
        raise BadCheckpoint(where, f"rope scaling {kind} has no {', '.join(missing)}", "correct it")
    if kind in SCALING_FIELDS:
        given = {key: rope[key] for key in (*_STRETCH, *SCALING_FIELDS[kind]) if rope.get(key) is not None}
        return {"rope_scaling": RopeScaling(rope_type=kind, **given)}
    return {"rope_linear_factor": float(rope["factor"])} if kind == "linear" else {}


def _with_type(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a rope dictionary with its type under `rope_type`, whichever key it had."""
    return {"rope_type": rope.get("type", "default"), **{k: v for k, v in rope.items() if k != "type"}}


def write_config(cfg: ModelConfig, dtype: str, special: dict[str, Any]) -> dict[str, Any]:
    """Write the config.json of a model, which transformers 4.57 and 5 read alike.

    Args:
        cfg: the model.
        dtype: "float32", "bfloat16" or "float16".
        special: ids under "bos_token_id", "eos_token_id" and "pad_token_id"; None or absent where there is none.

    Raises:
        UserError: the family has no keys for an option of this model.
    """
    family = FAMILIES[cfg.arch]
    architecture = family.class_of(cfg.head)
    rule = "cannot be exported: transformers has no class of this family that gives rewards"
    require(architecture is not None, f"a reward model of --arch {cfg.arch}", rule, "keep the checkpoint")
    out: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": family.name,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        **family.constants,
    }
    for key, name in family.fields:
        value = getattr(cfg, name)
        out[key] = list(value) if isinstance(value, tuple) else value
    out |= family.write(cfg)
    out[family.activation] = _activations(family).get(cfg.activation, cfg.activation)
    if cfg.position == "rope" and family.old_theta:
        out.update(_write_rope(cfg, family))
    if ("sliding_window", "window") in family.fields:
        out["layer_types"] = _layer_types(cfg)
        # Older readers know the pattern alone.
        out.update({} if cfg.layer_types else {"sliding_window_pattern": cfg.window_pattern})
    out.update({key: special.get(key) for key in _SPECIAL})
    if cfg.head == "score":
        out["num_labels"] = 1
    _check_round_trip(cfg, out)
    return out


def _write_rope(cfg: ModelConfig, family: Family) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "default"}
    if cfg.rope_scaling is not None:
        kind = cfg.rope_scaling.rope_type
        given = {name: getattr(cfg.rope_scaling, name) for name in (*_STRETCH, *SCALING_FIELDS[kind])}
        # 0 stands for an absent key.
        scaling = {"rope_type": kind, **{k: v for k, v in given.items() if v or k not in _FACTORS}}
    elif cfg.rope_linear_factor != 1:
        scaling = {"rope_type": "linear", "factor": cfg.rope_linear_factor}
    partial = {"partial_rotary_factor": cfg.rope_fraction} if family.partial_rotary else {}
    new: dict[str, Any] = {**scaling, "rope_theta": cfg.rope_theta, **partial}
    out: dict[str, Any] = {
        family.old_theta: cfg.rope_theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
    }
    if family.local_theta:
        local = cfg.rope_theta if cfg.rope_theta_local is None else cfg.rope_theta_local
        new = {"full_attention": new, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
        out[family.local_theta] = local
    if family.partial_rotary:
        out[family.partial_rotary] = cfg.rope_fraction
    return {"rope_parameters": new, **out}


def _check_round_trip(cfg: ModelConfig, out: dict[str, Any]) -> None:
    """Check that the config.json reads back as the model: otherwise its family has no key for some option."""
    remedy = f"export needs options that {cfg.arch} models have"
    try:
        read_back = read_config(out, "config.json of this export")
    except UserError as e:
        raise UserError(f"a model of --arch {cfg.arch}", f"cannot be exported ({e})", remedy) from None
    for f in dataclasses.fields(ModelConfig):
        written, meant = getattr(read_back, f.name), getattr(cfg, f.name)
        if f.name not in TRAINING_ONLY and written != meant:
            rule = f"has {f.name} {meant!r}, but a config.json of this family means {written!r}"
            raise UserError(f"a model of --arch {cfg.arch}", rule, remedy)


def special_ids(config: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of the special tokens of a config.json."""
    return {key: config.get(key) for key in _SPECIAL}
