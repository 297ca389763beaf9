"""The parts of a model that a family chooses by name: the activation of the MLP, the norm, positions, and the kind of
each block.

Data without torch: the functions are made when the model is built, from the kernels in use (`megalite.core.ops.Ops`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from megalite.core.base.table import Table
from megalite.core.options.part import PartRules

Function = Callable[..., Any]


def _relu(x: Any, weights: Any = None) -> Any:
    return x.relu() if weights is None else (x.relu() * weights.unsqueeze(-1)).to(x.dtype)


@dataclass(frozen=True)
class Activation:
    """The function between the two projections of an MLP.

    Attributes:
        make: kernels in use -> function of [..., 2F] = [gate | up] where gated, else of [..., F], to [..., F]; takes
            `weights`, too, one for each row (`ops.weigh`).
        gated: whether the first projection makes both gate and up.
        keeps_input: whether backward needs its input, and not only its output.
        hf: its name in config.json; None if transformers has no such model.
    """

    make: Callable[[Any], Function]
    gated: bool = False
    keeps_input: bool = True
    hf: str | None = None

    @property
    def kept(self) -> int:
        """Widths of its input that an MLP keeps for backward."""
        return (2 if self.gated else 1) * self.keeps_input


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation(lambda ops: ops.swiglu, gated=True, hf="silu"),
    "clamped_swiglu": Activation(lambda ops: ops.clamped_swiglu, gated=True, hf="silu"),
    "geglu": Activation(lambda ops: ops.geglu, gated=True, hf="gelu"),
    "geglu_tanh": Activation(lambda ops: partial(ops.geglu, approximate="tanh"), gated=True, hf="gelu_pytorch_tanh"),
    "gelu": Activation(lambda ops: ops.gelu, hf="gelu"),
    "gelu_tanh": Activation(lambda ops: partial(ops.gelu, approximate="tanh"), hf="gelu_new"),
    "relu": Activation(lambda ops: _relu, keeps_input=False, hf="relu"),
}
"""Name (`--activation`) -> activation."""


@dataclass(frozen=True)
class Norm:
    """A normalization over the hidden size.

    Attributes:
        make: kernels in use -> (norm, add_norm): norm(x, weight, [bias,] eps) -> y, and add_norm(x, residual, weight,
            [bias,] eps) -> (norm of the sum, sum).
        bias: whether it has a bias.
        statistics: number of fp32 values per token that it keeps for backward.
    """

    make: Callable[[Any], tuple[Function, Function]]
    bias: bool = False
    statistics: int = 1


NORMS: dict[str, Norm] = {
    "rmsnorm": Norm(lambda ops: (ops.rmsnorm, ops.add_rmsnorm)),
    "layernorm": Norm(lambda ops: (ops.layernorm, ops.add_layernorm), bias=True, statistics=2),
}
"""Name (`--norm`) -> norm."""


class Position(PartRules[Any, Any]):
    """What attention knows of positions. A description, read without torch; this one knows nothing.

    Attributes:
        columns: columns of queries, keys and values beside those of a head.
        exact_length: longest sample that it is exact for; None: any.
        limited: whether a model has only the positions it was made with.
        added: whether it adds something to embeddings (`embedding`).
    """

    columns = 0
    exact_length: int | None = None
    limited = False
    added = False
    after = "position"

    def check_chosen(self, m: Any) -> None:
        """Check the options of a model (`ModelConfig`) that has these positions.

        Raises:
            UserError: they do not fit together.
        """

    def specs(self, cfg: Any) -> list[Any]:
        """Declare its parameters (`ParamSpec`), which the first stage has."""
        return []

    def embedding(self, layers: Any) -> Any:
        """Make what is added to embeddings: a module of (x_SBH, `Positions`); None: nothing is."""
        return None

    def tables(self, cfg: Any, layer: int) -> Any:
        """Return what makes a layer's tables, (`Positions`, device) -> tensors, equal where layers share them; None:
        it has none.
        """
        return None

    def of_queries(self, cfg: Any, heads: slice, scale: float, dtype: Any, device: Any) -> Any:
        """Return the columns of queries, [heads, columns] of `dtype`; their product with those of keys is multiplied by
        `scale`. Asked where it has columns.
        """


POSITIONS: Table[Position] = Table("megalite.core.parts.positions", "POSITION")
"""Name (`--position`) -> kind."""


class BlockKind(NamedTuple):
    """What a block is made of.

    Attributes:
        mixer: name of its mixer, in `model.kinds.MIXERS`.
        feed_forward: name of its feed-forward layer, in `model.kinds.FEED_FORWARDS`.
    """

    mixer: str = "gqa"
    feed_forward: str = "mlp"


FAMILIES: Table[Any] = Table("megalite.core.parts.families", "FAMILY")
"""Name (`--arch`) -> family, a `parts.families.common.Family`."""

PREFERENCES: Table[Any] = Table("megalite.core.parts.preferences", "PREFERENCES")
"""Name (`--dpo-loss`) -> kind of preferences, a `parts.preferences.dpo.Preference`."""


def block_of(cfg: Any, layer: int) -> BlockKind:
    """Return the kind of a block of most families: what its options ask for (`cfg`, a `ModelConfig`)."""
    attention = "gqa" if cfg.kv_lora_rank is None else "mla"
    return BlockKind("delta_net" if cfg.is_delta_net(layer) else attention, "moe" if cfg.is_moe(layer) else "mlp")
