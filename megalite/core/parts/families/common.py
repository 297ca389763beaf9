"""The description of a model family, and the names and keys that most families share. Data only, without torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megalite.core.options.choices import BlockKind, block_of

_LAYER = "model.layers.{}."


@dataclass(frozen=True)
class Packing:
    """The Hugging Face tensors that make up one tensor of megalite.

    Attributes:
        names: names of the tensors, with {} for the layer; several (q, k, v or gate, up) are packed in this order.
            Experts are stacked in megalite: with {{}} for the expert they have tensors of their own, without it they
            are stacked in the file too.
        how: "rows" (one below the other), "heads" (GPT-NeoX: rows [heads, 3, head_dim]), "alternating" (gpt-oss: a row
            of the first part, one of the second, and so on) or "pairs" (Llama 4, GPT-J: neighbors in a head of q or k
            are rotated together, which in megalite lie half of what is rotated apart).
        transposed: whether matrices are [in, out] (GPT-2's Conv1D).
    """

    names: tuple[str, ...]
    how: Literal["rows", "heads", "alternating", "pairs"] = "rows"
    transposed: bool = False


def rows(*names: str) -> Packing:
    """Describe one tensor as it is, or several packed one below the other."""
    return Packing(names)


def transposed(name: str) -> Packing:
    """Describe a Conv1D weight."""
    return Packing((name,), transposed=True)


@dataclass(frozen=True)
class Preset:
    """The shape of a published model; values are those of the model's own configuration.

    Attributes:
        options: `ModelConfig` values that differ from the family's. `seq_len` is the length of (most of) its training;
            dropout, where the model was trained with it, stays 0.
        parameters: published number of parameters, tied tensors counted once: exact (int) or rounded (float);
            None for a shape that was not published.
        active: number of parameters that a token meets; None where it meets all.
    """

    options: Mapping[str, Any]
    parameters: int | float | None
    active: int | None = None


def preset(
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    seq_len: int,
    parameters: int | float | None,
    active: int | None = None,
    **more: Any,
) -> Preset:
    """Make a preset of the sizes that every model has, its published numbers of parameters, and other options."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "vocab_size": vocab, "seq_len": seq_len}
    return Preset({**sizes, **more}, parameters, active)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        name: `--arch`, and `model_type` in config.json.
        architecture: the class in transformers.
        classifier: that of a reward model; "": the one of that name; None: there is none.
        options: `ModelConfig` values of the family; flags, presets and config.json override them.
        tensors: megalite name, with {} for the layer -> tensors of the file. A model uses those it has.
        copies: names of the copies of shared tensors that files hold for each module that predicts further tokens, with
            {} for its layer -> megalite name.
        module: prefix of the names of the block of such a module, for families whose files hold one beside the layers,
            {} for its number from 0; "": modules are further layers. config.json need not name it.
        fields: (key of config.json, `ModelConfig` field) pairs. A field may have several keys: all are written, and one
            suffices.
        defaults: values of keys that config.json may omit, as in transformers.
        constants: keys with the only value that megalite supports; always written, and any other value is refused.
        activation: key of the name of the activation.
        partial_rotary: old key of the rotated fraction of a head, for families that have one; its value without the
            key is in `defaults`, as those of the next two are.
        old_theta: old key of the rotary base; "": files say nothing of the frequencies, which are the default ones.
        local_theta: old key of the rotary base of sliding-window layers, for families that have one.
        text_of: model types with this family in `text_config`, beside images -> values that the text_config may omit.
        skip: patterns of tensors that files of this family may hold and that are not weights.
        prefix: prefix of the names of all tensors but the head; files may lack it (GPT-2 on the hub).
        presets: published models, by name (`--preset`).
        block_kind: (`ModelConfig`, layer) -> the kind of that block.
        others: other model types in files of this family.
        derived: keys that no single field has, with their types.
        read: (keys of config.json, `ModelConfig` values) -> the values that follow from derived keys.
        write: `ModelConfig` -> derived keys.
    """

    name: str
    architecture: str
    classifier: str | None = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Packing]
    copies: Mapping[str, str] = field(default_factory=dict)
    module: str = ""
    fields: tuple[tuple[str, str], ...]
    defaults: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    activation: str = "hidden_act"
    partial_rotary: str | None = None
    old_theta: str = "rope_theta"
    local_theta: str | None = None
    text_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    skip: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    prefix: str = ""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    block_kind: Callable[[Any, int], BlockKind] = block_of
    others: tuple[str, ...] = ()
    derived: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda values, options: {}
    write: Callable[[Any], dict[str, Any]] = lambda cfg: {}

    def copies_in(self, layers: range) -> dict[str, str]:
        """Map the names of copies that files hold in modules of these numbers to names of megalite."""
        return {name.format(layer): ours for layer in layers for name, ours in self.copies.items()}

    def class_of(self, head: str) -> str | None:
        """Name the class in transformers of a model with a head; None: there is none."""
        if head == "lm" or self.classifier != "":
            return self.architecture if head == "lm" else self.classifier
        return re.sub("ForCausalLM$|LMHeadModel$", "ForSequenceClassification", self.architecture)

    def holds(self, modules: int) -> bool:
        """Whether files can hold as many modules that predict further tokens."""
        return modules == 1 if self.module else bool(self.copies)

    def place(self, name: str, num_layers: int) -> Packing:
        """Return the packing of a tensor in files of a model of `num_layers`, with the layer filled in."""
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
        if name == "score.weight":  # in files of every family
            return rows(name)
        entry = self.tensors[f"layers.{{}}.{match[2]}" if match else name]
        layer, names = int(match[1]) if match else 0, entry.names
        if self.module and layer >= num_layers:
            layer, names = layer - num_layers, tuple(n.replace(_LAYER, self.module) for n in names)
        return dataclasses.replace(entry, names=tuple(n.format(layer) for n in names))


# Keys that all families but GPT-2 share.
COMMON_FIELDS: tuple[tuple[str, str], ...] = (
    ("vocab_size", "vocab_size"),
    ("hidden_size", "hidden_size"),
    ("intermediate_size", "ffn_hidden_size"),
    ("num_hidden_layers", "num_layers"),
    ("num_attention_heads", "num_heads"),
    ("max_position_embeddings", "max_position_embeddings"),
    ("tie_word_embeddings", "tie_embeddings"),
    ("initializer_range", "init_std"),
    ("attention_dropout", "attention_dropout"),
)
