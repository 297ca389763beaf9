"""The model's options: its shape, and those of all parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megalite.core.base.errors import require
from megalite.core.options.all_parts import ModelParts, model_parts
from megalite.core.options.choices import FAMILIES, BlockKind
from megalite.core.options.names import check_names
from megalite.core.options.part import put_in_order
from megalite.core.options.rope import RopeScaling
from megalite.core.options.shape import ModelShape


@dataclass(frozen=True)
class ModelConfig(ModelParts, ModelShape):
    """Shape and family of the model. Options without a default are derived from --arch and the other sizes."""

    def __post_init__(self) -> None:
        check_names(self)
        self.check_ranges()
        if self.num_kv_heads is None:
            self._set({"num_kv_heads": self.num_heads})
        self._derive_parts()
        if self.head_dim is None:
            require(
                self.hidden_size % self.num_heads == 0,
                f"--hidden-size {self.hidden_size}",
                f"must be divisible by --num-heads {self.num_heads}",
                "change one of the two, or give --head-dim",
            )
            self._set({"head_dim": self.hidden_size // self.num_heads})
        if self.ffn_hidden_size is None:
            gated = -(-8 * self.hidden_size // (3 * 64)) * 64
            self._set({"ffn_hidden_size": gated if self.gated else 4 * self.hidden_size})
        if self.max_position_embeddings is None:
            self._set({"max_position_embeddings": self.seq_len})
        self._derive_parts()
        if self.query_pre_attn_scalar is None:
            self._set({"query_pre_attn_scalar": self.head_size})
        self.check_sizes()
        for part in model_parts():
            part.check_model(self)

    def _derive_parts(self) -> None:
        for part in model_parts():
            self._set(part.derived(self))

    def _set(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            object.__setattr__(self, name, value)

    @property
    def attention_scale(self) -> float | None:
        """Factor on the attention scores; None: 1 / sqrt(head_dim)."""
        assert self.query_pre_attn_scalar is not None
        # DeepSeek's stretch of all dimensions of queries and keys; YaRN's own is that of the rotated ones.
        scaling = self.rope_scaling if self.kv_lora_rank is not None else None
        stretch = 1.0 if scaling is None else scaling.stretch(scaling.mscale_all_dim) ** 2
        if self.query_pre_attn_scalar == self.head_dim and stretch == 1:
            return None
        return stretch * self.query_pre_attn_scalar**-0.5

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        if self.qk_rope_head_dim is not None:
            return self.qk_rope_head_dim
        # A fraction from a whole number (GPT-J's) may lie just below it.
        return int(self.head_size * self.rope_fraction + 1e-6)

    def block_kind(self, layer: int) -> BlockKind:
        """Mixer and feed-forward layer of a block, as the family has them."""
        return FAMILIES[self.arch].block_kind(self, self.like(layer))

    def chunk_of(self, layer: int) -> int | None:
        """Return the number of positions of a chunk that a layer attends within, shorter than the sequence, or None."""
        size = self.attention_chunk_size
        attends = self.has_rope(layer) and not self.is_delta_net(layer)
        return size if size is not None and size < self.seq_len and attends else None

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> ModelConfig:
        """Build the config from its `dataclasses.asdict`, read from a checkpoint; TypeError if malformed."""
        scaling = options.get("rope_scaling")
        lists = {f.name: tuple(options.get(f.name, f.default)) for f in fields(cls) if isinstance(f.default, tuple)}
        return cls(**{**options, "rope_scaling": RopeScaling(**scaling) if scaling else None, **lists})

    @classmethod
    def from_arch(cls, arch: str, **options: Any) -> ModelConfig:
        """Build a config from the family's options, overridden by `options`."""
        require(arch in FAMILIES, f"--arch {arch}", f"must be one of {', '.join(FAMILIES)}", "choose one of these")
        return cls(arch=arch, **{**FAMILIES[arch].options, **options})


put_in_order(ModelConfig, ModelShape, model_parts())
