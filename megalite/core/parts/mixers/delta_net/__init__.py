"""Gated delta nets (Yang et al. 2024, arXiv:2412.06464, figure 1, as in Qwen3-Next), key heads split over
tensor-parallel ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.core.model.kinds import Mixer
from megalite.core.model.saved import SavedTensor, element_size, inside, tokens
from megalite.core.model.specs import linear, out_std
from megalite.core.options.model import ModelConfig
from megalite.core.options.step import StepConfig
from megalite.core.parts.mixers.delta_net.delta_slices import heads_at_once, products_work, transition_work, work_bytes
from megalite.core.sharding import ParamSpec

if TYPE_CHECKING:
    from torch import nn

    from megalite.core.model.layers import Layers


class DeltaNet(Mixer):
    """in_proj -> causal convolution of queries, keys and values -> gated delta rule -> norm -> gate -> out_proj."""

    passes_states = True

    def specs(self, cfg: ModelConfig, name: str) -> list[ParamSpec]:
        key_heads, heads, key_size, value_size = cfg.delta_heads
        keys, values = key_heads * key_size, heads * value_size
        # Of each key head: query, key, its values, their gates; then of each key head: their betas and decays.
        parts, per_key = (2 * keys + 2 * values, 2 * heads), heads // key_heads
        turns = (key_size, key_size, per_key * value_size, per_key * value_size), (per_key, per_key)
        mixed = linear(
            f"{name}.in_proj", sum(parts), cfg.hidden_size, 0, bias=False, std=cfg.init_std, parts=parts, turns=turns
        )

        def of_heads(leaf: str, init: str) -> ParamSpec:
            return ParamSpec(f"{name}.{leaf}", (heads,), (("tp", 0),), init=init, weight_decay=False)  # type: ignore

        conv = (_features(cfg), 1, _conv(cfg))
        # A rank sees its own heads only: a partial gradient, always.
        norm = ParamSpec(f"{name}.norm.weight", (value_size,), init="ones", weight_decay=False, partial=("tp",))
        return [
            *mixed,
            # As torch's Conv1d, whatever --init-std is: a feature has few weights, and what they make is normed.
            ParamSpec(f"{name}.conv1d", conv, (("tp", 0),), parts=(keys, keys, values), std=(3 * _conv(cfg)) ** -0.5),
            of_heads("dt_bias", "ones"),
            of_heads("A_log", "log"),
            norm,
            *linear(f"{name}.out_proj", cfg.hidden_size, values, 1, bias=False, std=out_std(cfg)),
        ]

    def module(self, layers: Layers, index: int, recompute_core: bool) -> nn.Module:
        from megalite.core.parts.mixers.delta_net.delta_net_layer import DeltaNetLayer

        return DeltaNetLayer(layers, index, recompute_core)

    def saved(self, cfg: StepConfig) -> list[SavedTensor]:
        _, heads, _, size = cfg.model.delta_heads
        return [inside(cfg, "gated values", element_size(cfg) * heads * size)]

    def core(self, cfg: StepConfig) -> list[SavedTensor]:
        e, heads = element_size(cfg), cfg.model.delta_heads[1]
        return [
            *(inside(cfg, f"{name} of the convolution", e * _features(cfg.model)) for name in ("input", "output")),
            inside(cfg, "betas", e * heads),
            *(inside(cfg, f"decays{what}", 4 * heads) for what in (" before softplus", " after it", "")),
            *(_of_pieces(cfg) if cfg.parallel.cp > 1 else ()),
            *_behind_the_rule(cfg),
        ]

    def core_input(self, cfg: StepConfig) -> list[SavedTensor]:
        key_heads, heads, key_size, size = cfg.model.delta_heads
        return [inside(cfg, "input of the core", element_size(cfg) * 2 * (key_heads * key_size + heads * (size + 1)))]

    def passed(self, cfg: ModelConfig, samples: int, cp: int, tp: int, element: int) -> tuple[int, int, int]:
        _, _, key_size, size = cfg.delta_heads
        state = 4 * _pieces_worked_through(cfg, samples, cp, tp) * (cp - 1) // cp * key_size
        before = element * (_conv(cfg) - 1) * _features(cfg)
        return 2 * samples * before * (cp - 1) // tp, state * (key_size + size), state * size

    def plain_work(self, cfg: ModelConfig, cp: int) -> float:
        _, heads, *sizes = cfg.delta_heads
        return heads * (products_work(*sizes) + (transition_work(*sizes) if cp > 1 else 0))

    def work(self, cfg: StepConfig) -> int:
        """Compute the bytes of one slice of the rule's heads, and of the gradients of its values and their gates.

        Over cp gradients of the rule's inputs are kept, twice (fitted), while what pieces make of states is computed.
        """
        key_heads, heads, *sizes = cfg.model.delta_heads
        each = tokens(cfg), heads // key_heads, *sizes
        taken = heads_at_once(key_heads // cfg.parallel.tp, *each) * work_bytes(*each)
        if cfg.parallel.device != "cpu":
            # A GPU's kernel has the states of all chunks at once, K x V each beside rows of K + V: with sizes of 128,
            # counted, an eighth more.
            taken += taken * sizes[0] // 1024
        taken += inside(cfg, "", 2 * element_size(cfg) * heads * sizes[1]).bytes
        if cfg.parallel.cp > 1:
            taken += inside(cfg, "", 2 * element_size(cfg) * _features(cfg.model)).bytes
        return max(0, taken - sum(row.bytes for row in (*self.saved(cfg), *_behind_the_rule(cfg))))

    def touched(self, cfg: ModelConfig) -> int:
        _, heads, _, size = cfg.delta_heads
        return 6 * _features(cfg) + 9 * heads * size

    def weight_work(self, cfg: ModelConfig) -> int:
        """Count the multiply-adds of a token with weights: those of the convolution too, one each."""
        return super().weight_work(cfg) + _features(cfg) * _conv(cfg)

    def token_work(self, cfg: ModelConfig, layer: int) -> tuple[float, float]:
        """Count the multiply-adds of a token with the states: both its key and its query read, its key writes."""
        _, heads, key_size, size = cfg.delta_heads
        work = 3.0 * heads * key_size * size
        return work, work


def _behind_the_rule(cfg: StepConfig) -> list[SavedTensor]:
    """List what the core keeps of what follows the rule."""
    e, (_, heads, _, size) = element_size(cfg), cfg.model.delta_heads
    return [
        inside(cfg, "values of the delta rule", e * heads * size),
        inside(cfg, "statistics of their norm", 4 * heads),
        inside(cfg, "gates and normed values", 2 * e * heads * size),
    ]


def _of_pieces(cfg: StepConfig) -> list[SavedTensor]:
    """List what the core keeps besides where samples are in pieces, two of each on a rank."""
    p = cfg.parallel
    samples = cfg.train.micro_batch_size
    _, heads, key_size, size = cfg.model.delta_heads
    before = element_size(cfg) * (_conv(cfg.model) - 1) * _features(cfg.model)
    states = 4 * _pieces_worked_through(cfg.model, samples, p.cp, p.tp) * key_size
    return [
        SavedTensor("tokens before pieces, and their features", 4 * samples * before // p.tp),
        SavedTensor("what pieces make of states", states * (key_size + size)),
        SavedTensor("states before pieces, as computed", states * size // (2 * p.cp) * (2 * p.cp - 1)),
        SavedTensor("states before own pieces", 4 * 2 * samples * heads // p.tp * key_size * size),
        inside(cfg, "betas in pieces", element_size(cfg) * heads),
    ]


def _pieces_worked_through(cfg: ModelConfig, samples: int, cp: int, tp: int) -> int:
    """Count the pieces of heads that a rank goes through: all pieces of its share of the heads of samples."""
    return 2 * cp * -(-samples * cfg.delta_heads[1] // (tp * cp))


def _features(cfg: ModelConfig) -> int:
    key_heads, heads, key_size, size = cfg.delta_heads
    return 2 * key_heads * key_size + heads * size


def _conv(cfg: ModelConfig) -> int:
    assert cfg.linear_conv_kernel_dim is not None
    return cfg.linear_conv_kernel_dim


MIXER = DeltaNet()
