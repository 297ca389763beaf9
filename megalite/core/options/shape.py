"""The options that every model has: its family, its sizes, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megalite.core.base.errors import in_range, require
from megalite.core.options.choices import ACTIVATIONS, FAMILIES, NORMS, POSITIONS, Activation, Norm, Position
from megalite.core.options.names import Choices

MAX_LAYERS = 10_000
"""Parameters are listed per layer: without a limit, the list could take all memory before anything is checked."""
# Samples and rotary tables of one sequence are made before its first step.
_MAX_SEQ_LEN = 2**24


@dataclass(frozen=True)
class ModelShape:
    """Sizes, norms, biases and positions. A part inherits from it where its own options depend on these."""

    arch: Annotated[str, Choices(FAMILIES)] = "llama"
    """Model family; sets defaults for the options below."""
    num_layers: int = 4
    """Number of transformer blocks."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_heads: int = 4
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key/value heads (grouped-query attention). Default: --num-heads."""
    head_dim: int | None = None
    """Size of each head. Default: --hidden-size / --num-heads."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP. Default: 4 times --hidden-size; with a gated activation 8/3 times, rounded up to a
    multiple of 64."""
    vocab_size: int | None = None
    """Vocabulary size before padding (padding is automatic). Default: the tokenizer's."""
    seq_len: int = 256
    """Sequence length in tokens. Also the number of learned positions, unless --max-position-embeddings is larger."""
    max_position_embeddings: int | None = None
    """Number of positions the model supports. Default: --seq-len."""
    norm: Annotated[str, Choices(NORMS)] = "rmsnorm"
    """Normalization layer."""
    norm_eps: float = 1e-5
    """Epsilon under the square root of the normalization."""
    norm_position: Literal["pre", "post", "both", "shared", "sum"] = "pre"
    """Normalize the input of each sub-layer (pre), its output before the residual is added (post; OLMo 2), both
    (Gemma), with --parallel-residual the input of both sub-layers once (shared; GPT-J), or the sum of residual and
    output, without a norm behind the last block (sum; OPT-350M)."""
    zero_centered_norm: bool = False
    """Scale by 1 + weight in norms (Gemma)."""
    position: Annotated[str, Choices(POSITIONS)] = "rope"
    """What attention knows of positions: {each}."""
    query_pre_attn_scalar: int | None = None
    """Divide attention scores by the square root of this. Default: --head-dim."""
    attention_softcap: float | None = None
    """Soft-cap attention scores to c * tanh(score / c) (Gemma 2: 50)."""
    attention_sinks: bool = False
    """Learn a score for each head that takes part in the softmax and has no value (gpt-oss)."""
    attention_output_gate: bool = False
    """Multiply the output of attention by a sigmoid gate, which is projected with the queries (Qwen3-Next)."""
    logit_softcap: float | None = None
    """Soft-cap logits to c * tanh(logit / c) (Gemma 2: 30)."""
    scale_embeddings: bool = False
    """Multiply embeddings by the square root of --hidden-size (Gemma)."""
    embedding_norm: bool = False
    """Normalize embeddings, with their learned positions if any (BLOOM)."""
    activation: Annotated[str, Choices(ACTIVATIONS)] = "swiglu"
    """MLP activation; those with glu in their name are gated."""
    qkv_bias: bool = False
    """Add a bias to the q, k and v projections."""
    o_bias: bool = False
    """Add a bias to the attention output projection."""
    mlp_bias: bool = False
    """Add biases to the MLP; with experts, to each of them and to the router."""
    qk_norm: Literal["none", "head", "full", "l2"] = "none"
    """RMSNorm on q and k: per head (Qwen 3), over the full projection (OLMo 2), or per head after rope, without weights
    and in layers with rope alone (l2; Llama 4)."""
    parallel_residual: bool = False
    """Run attention and MLP in parallel on the same residual stream (GPT-NeoX)."""
    tie_embeddings: bool = False
    """Share the weights of the input embedding with the output layer."""
    head_bias: bool = False
    """Add a bias to the output layer (GPT-J)."""
    init_std: float = 0.02
    """Standard deviation of initial weights; that of output projections is divided by sqrt(2 * num_layers)."""
    hidden_dropout: float = 0.0
    """Dropout on embeddings and sub-layer outputs."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities."""

    def like(self, layer: int) -> int:
        """Return the layer whose options a block has: modules after the last layer are like the last."""
        return min(layer, self.num_layers - 1)

    # Resolved values with their exact types (the fields are Optional only on the command line).
    @property
    def kv_heads(self) -> int:
        assert self.num_kv_heads is not None
        return self.num_kv_heads

    @property
    def head_size(self) -> int:
        assert self.head_dim is not None
        return self.head_dim

    @property
    def key_size(self) -> int:
        """Width in which attention meets queries, keys and values."""
        return self.head_size + self.position_kind.columns

    @property
    def ffn_size(self) -> int:
        assert self.ffn_hidden_size is not None
        return self.ffn_hidden_size

    @property
    def vocab(self) -> int:
        assert self.vocab_size is not None, "vocab_size is resolved from the tokenizer before a model is built"
        return self.vocab_size

    @property
    def positions(self) -> int:
        assert self.max_position_embeddings is not None
        return self.max_position_embeddings

    @property
    def activation_kind(self) -> Activation:
        return ACTIVATIONS[self.activation]

    @property
    def norm_kind(self) -> Norm:
        return NORMS[self.norm]

    @property
    def position_kind(self) -> Position:
        return POSITIONS[self.position]

    @property
    def last_norm(self) -> bool:
        """Whether a norm follows the last block: norms of sums end that block itself."""
        return self.norm_position != "sum"

    @property
    def gated(self) -> bool:
        return self.activation_kind.gated

    def check_ranges(self) -> None:
        """Check each value by itself.

        Raises:
            UserError: a value is out of range.
        """
        in_range(self, "num_layers", 1, MAX_LAYERS + 1)
        in_range(self, "hidden_size num_heads num_kv_heads head_dim", 1, 2**20 + 1)
        in_range(self, "ffn_hidden_size", 1, 2**24)
        in_range(self, "seq_len", 1, _MAX_SEQ_LEN + 1)
        in_range(self, "max_position_embeddings query_pre_attn_scalar", 1, 2**30)
        in_range(self, "vocab_size", 2, 10**8)
        in_range(self, "norm_eps init_std", 0, 100, above=True)
        in_range(self, "attention_softcap logit_softcap", 0, 1e12, above=True)
        in_range(self, "hidden_dropout attention_dropout", 0, 1)

    def check_sizes(self) -> None:
        """Check derived values against each other.

        Raises:
            UserError: they do not fit together.
        """
        require(
            self.num_heads % self.kv_heads == 0,
            f"--num-kv-heads {self.num_kv_heads}",
            f"must divide --num-heads {self.num_heads}",
            "choose a divisor of --num-heads",
        )
        require(
            self.norm_position != "shared" or self.parallel_residual,
            "--norm-position shared without --parallel-residual",
            "is one norm of what both sub-layers read",
            "give --parallel-residual, or --norm-position pre",
        )
        require(
            self.norm_position != "sum" or not self.parallel_residual,
            "--norm-position sum with --parallel-residual",
            "norms each sum before the next sub-layer reads it",
            "drop one of the two",
        )
        require(
            not (self.head_bias and self.tie_embeddings),
            "--head-bias with --tie-embeddings",
            "an output layer that shares its weights has no bias",
            "drop one of the two",
        )
        self.position_kind.check_chosen(self)
