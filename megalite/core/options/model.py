"""The model's options: shape, family, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megalite.core.base.errors import in_range, require
from megalite.core.options.choices import ACTIVATIONS, FAMILIES, NORMS, Activation, BlockKind, Norm
from megalite.core.options.layer_types import SLIDING, read_layer_types
from megalite.core.options.names import Choices, check_names
from megalite.core.options.part import PARTS
from megalite.core.options.rope import RopeScaling, check_rope_options

# Parameters are listed per layer: without a limit, the list could take all memory before anything is checked.
_MAX_LAYERS = 10_000
# Samples and rotary tables of one sequence are made before its first step.
_MAX_SEQ_LEN = 2**24
BALANCING = (
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_load_balancing_type",
    "moe_router_bias_update_rate",
)
"""Options of a run that do not change the meaning of the weights."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape and family of the model. Options without a default are derived from --arch and the other sizes."""

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
    kv_lora_rank: int | None = None
    """Width of the latents that keys and values are made of (multi-head latent attention, DeepSeek-V2). Default: none,
    grouped-query attention."""
    q_lora_rank: int | None = None
    """With --kv-lora-rank: width of the latents that queries are made of. Default: none, one projection."""
    qk_nope_head_dim: int | None = None
    """With --kv-lora-rank: size of the part of a query or key head that is not rotated. Default: 128."""
    qk_rope_head_dim: int | None = None
    """With --kv-lora-rank: size of the rotated part, of which all key heads share one. Default: 64."""
    v_head_dim: int | None = None
    """With --kv-lora-rank: size of a value head. Default: 128."""
    linear_attention_freq: int = 0
    """Every n-th layer has attention, the others are gated delta nets (Qwen3-Next: 4); 0: every layer has attention."""
    linear_num_key_heads: int | None = None
    """With --linear-attention-freq: number of key and query heads of a gated delta net. Default: 16."""
    linear_num_value_heads: int | None = None
    """With --linear-attention-freq: number of its value heads, each with a state. Default: 32."""
    linear_key_head_dim: int | None = None
    """With --linear-attention-freq: size of its key heads. Default: 128."""
    linear_value_head_dim: int | None = None
    """With --linear-attention-freq: size of its value heads. Default: 128."""
    linear_conv_kernel_dim: int | None = None
    """With --linear-attention-freq: tokens that its convolution sees, the current one included. Default: 4."""
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
    norm_position: Literal["pre", "post", "both"] = "pre"
    """Normalize the input of each sub-layer (pre), its output before the residual is added (post; OLMo 2), or both
    (Gemma)."""
    zero_centered_norm: bool = False
    """Scale by 1 + weight in norms (Gemma)."""
    position: Literal["rope", "learned"] = "rope"
    """Rotary or learned absolute position embeddings."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_fraction: float = 1.0
    """Fraction of each head that is rotated (GPT-NeoX: 0.25)."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, e.g. '{factor: 8.0}' (Llama 3's rule) or '{rope_type: yarn, factor: 32.0,
    original_max_position_embeddings: 4096}'."""
    rope_linear_factor: float = 1.0
    """Divide the rotary frequencies by this (position interpolation; Gemma 3: 8)."""
    rope_theta_local: float | None = None
    """Base of the rotary frequencies, unscaled, in sliding-window layers (Gemma 3). Default: the frequencies of the
    other layers."""
    window: int | None = None
    """Size of the sliding attention window in tokens, the current one included. Default: full attention in every
    layer."""
    window_pattern: int = 0
    """With --window: every n-th layer uses full attention (Gemma 2: 2, Gemma 3: 6); 0: no layer does."""
    layer_types: tuple[str, ...] = ()
    """With --window: sliding_attention or full_attention for each layer, as config.json of Hugging Face names them; a
    shorter list is repeated. Overrides --window-pattern."""
    attention_chunk_size: int | None = None
    """Layers of attention with rope attend within chunks of this many positions (Llama 4: 8192), counted from the start
    of the document where documents are masked. Default: within the sequence."""
    no_rope_freq: int = 0
    """Every n-th layer has no rope, and attends to the whole sequence (Llama 4: 4); 0: none."""
    attention_temperature: float = 0.0
    """In layers without rope, multiply queries by 1 + this * ln(1 + floor(position / --attention-temperature-floor)),
    positions counted from 1 (Llama 4: 0.1)."""
    attention_temperature_floor: int = 8192
    """Number of positions of one step of --attention-temperature."""
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
    init_std: float = 0.02
    """Standard deviation of initial weights; that of output projections is divided by sqrt(2 * num_layers)."""
    mup_base_width: int | None = None
    """muP: --hidden-size at which learning rate, weight decay and --init-std were chosen; they hold for this model."""
    mup_base_head_dim: int | None = None
    """muP: --head-dim of that model. Default: the same."""
    mtp_num_layers: int = 0
    """Number of modules after the last layer, each of which predicts one token further (multi-token prediction,
    DeepSeek-V3). They are trained and saved; evaluation and generation do without."""
    hidden_dropout: float = 0.0
    """Dropout on embeddings and sub-layer outputs."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities."""
    num_experts: int | None = None
    """Number of experts of each MoE layer. Default: none, every layer is dense."""
    moe_topk: int = 2
    """Number of experts that each token is sent to."""
    moe_ffn_size: int | None = None
    """Inner width of an expert. Default: --ffn-hidden-size."""
    moe_renormalize: bool = True
    """Divide the routing weights of a token by their sum (Mixtral), instead of using the scores as they are."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Score of an expert: its share of a softmax, or a sigmoid of its own logit (DeepSeek-V3)."""
    moe_router_topk_scaling_factor: float = 1.0
    """Multiply the routing weights by this, last of all (DeepSeek-V3: 2.5)."""
    moe_router_num_groups: int = 1
    """Number of groups of neighboring experts, of which a token uses only the best (DeepSeek-V3: 8); 1: no groups."""
    moe_router_group_topk: int = 1
    """Number of groups that a token may use (DeepSeek-V3: 4)."""
    moe_router_enable_expert_bias: bool = False
    """Choose experts by score + bias, and move the bias after every step against the load: balance without a loss
    (DeepSeek-V3). Saved with the weights, in fp32."""
    moe_router_bias_update_rate: float = 1e-3
    """Size of that move; 0 leaves the bias as it is."""
    moe_apply_probs_on_input: bool = False
    """Multiply the input of an expert by the routing weight, instead of its output (Llama 4)."""
    moe_shared_ffn_size: int = 0
    """Inner width of the shared expert, which sees every token; 0: none."""
    moe_shared_gate: bool = False
    """Multiply the output of the shared expert by a sigmoid gate (Qwen2-MoE)."""
    moe_dense_layers: tuple[int, ...] = ()
    """Layers, from 0, that have a dense MLP instead of experts."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the load-balancing loss in the gradients (0.01 is usual); `loss` in the metrics is without it."""
    moe_z_loss_coeff: float = 0.0
    """Weight of the squared log-sum-exp of the router's logits in the gradients (ST-MoE; 1e-3 is usual)."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "aux_loss"
    """Whether that balances the tokens of each micro-batch, and so depends on its size, or of each sequence (seq)."""

    def __post_init__(self) -> None:
        check_names(self)
        in_range(self, "num_layers", 1, _MAX_LAYERS + 1)
        in_range(self, "hidden_size num_heads num_kv_heads head_dim mup_base_width mup_base_head_dim", 1, 2**20 + 1)
        in_range(self, "ffn_hidden_size", 1, 2**24)
        in_range(self, "seq_len", 1, _MAX_SEQ_LEN + 1)
        in_range(self, "mtp_num_layers", 0, min(9, self.seq_len))
        in_range(self, "max_position_embeddings window query_pre_attn_scalar", 1, 2**30)
        in_range(self, "window_pattern", 0, _MAX_LAYERS)
        types, pattern = read_layer_types(self.layer_types, self.window_pattern, self.window, self.num_layers)
        object.__setattr__(self, "layer_types", types)
        object.__setattr__(self, "window_pattern", pattern)
        in_range(self, "vocab_size", 2, 10**8)
        in_range(self, "norm_eps rope_fraction init_std", 0, 100, above=True)
        in_range(self, "rope_theta rope_theta_local attention_softcap logit_softcap", 0, 1e12, above=True)
        in_range(self, "rope_linear_factor", 1, 10**6)
        in_range(self, "hidden_dropout attention_dropout", 0, 1)
        self._default("num_kv_heads", self.num_heads)
        for part in PARTS.values():
            for name, value in part.defaults(self).items():
                self._default(name, value)
            part.check_model(self)
        if self.head_dim is None:
            require(
                self.hidden_size % self.num_heads == 0,
                f"--hidden-size {self.hidden_size}",
                f"must be divisible by --num-heads {self.num_heads}",
                "change one of the two, or give --head-dim",
            )
            self._default("head_dim", self.hidden_size // self.num_heads)
        self._default("query_pre_attn_scalar", self._mup_attention_scalar())
        gated = -(-8 * self.hidden_size // (3 * 64)) * 64
        self._default("ffn_hidden_size", gated if self.gated else 4 * self.hidden_size)
        self._default("max_position_embeddings", self.seq_len)
        if self.num_experts is not None:
            self._default("moe_ffn_size", self.ffn_hidden_size)
        require(
            self.num_heads % self.kv_heads == 0,
            f"--num-kv-heads {self.num_kv_heads}",
            f"must divide --num-heads {self.num_heads}",
            "choose a divisor of --num-heads",
        )
        require(
            self.position != "learned" or self.positions >= self.seq_len,
            f"--seq-len {self.seq_len}",
            f"is longer than the {self.max_position_embeddings} learned positions",
            "lower --seq-len or raise --max-position-embeddings",
        )
        check_rope_options(self)

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.num_experts is not None and self._like(layer) not in self.moe_dense_layers

    def _like(self, layer: int) -> int:
        """Return the layer whose options a block has: those that predict further tokens are like the last attention."""
        every = self.linear_attention_freq or 1
        return layer if layer < self.num_layers else (self.num_layers // every * every or self.num_layers) - 1

    def is_delta_net(self, layer: int) -> bool:
        """Whether a layer is a gated delta net instead of attention."""
        return self.linear_attention_freq > 0 and (self._like(layer) + 1) % self.linear_attention_freq != 0

    def _mup_attention_scalar(self) -> int:
        """Return what makes attention's scale sqrt(base head size) / head size: 1 / sqrt(head size) at the base."""
        base = self.mup_base_head_dim or self.head_size
        require(
            self.head_size**2 % base == 0 and (self.mup_base_head_dim is None or self.mup_base_width is not None),
            f"--mup-base-head-dim {self.mup_base_head_dim}",
            f"must divide {self.head_size} x {self.head_size}, and needs --mup-base-width",
            "change it, or give --mup-base-width",
        )
        return self.head_size**2 // base

    @property
    def width_multiplier(self) -> float:
        """Width over muP's base width; 1 without muP."""
        return self.hidden_size / (self.mup_base_width or self.hidden_size)

    def _default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    @property
    def mtp_layers(self) -> range:
        """Numbers of the blocks that predict further tokens: they follow the last layer's."""
        return range(self.num_layers, self.num_layers + self.mtp_num_layers)

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
    def nope_size(self) -> int:
        assert self.qk_nope_head_dim is not None
        return self.qk_nope_head_dim

    @property
    def value_size(self) -> int:
        return self.head_size if self.v_head_dim is None else self.v_head_dim

    @property
    def latent_size(self) -> int:
        assert self.kv_lora_rank is not None
        return self.kv_lora_rank

    @property
    def delta_heads(self) -> tuple[int, int, int, int]:
        """Key heads, value heads, and the size of either, of a gated delta net."""
        sizes = self.linear_num_key_heads, self.linear_num_value_heads
        dims = self.linear_key_head_dim, self.linear_value_head_dim
        assert None not in (*sizes, *dims)
        return (*sizes, *dims)  # type: ignore[return-value]

    @property
    def ffn_size(self) -> int:
        assert self.ffn_hidden_size is not None
        return self.ffn_hidden_size

    @property
    def expert_ffn_size(self) -> int:
        assert self.moe_ffn_size is not None
        return self.moe_ffn_size

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
    def gated(self) -> bool:
        return self.activation_kind.gated

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

    def block_kind(self, layer: int) -> BlockKind:
        """Mixer and feed-forward layer of a block, as the family has them."""
        return FAMILIES[self.arch].block_kind(self, self._like(layer))

    def window_of(self, layer: int) -> int | None:
        """Return the number of positions that a layer attends to, the current one included; None: no limit."""
        layer = self._like(layer)
        if self.layer_types:
            return self.window if self.layer_types[layer] == SLIDING else None
        sees_all = self.window_pattern and (layer + 1) % self.window_pattern == 0
        return None if sees_all else self.window

    def has_rope(self, layer: int) -> bool:
        """Whether a layer rotates queries and keys."""
        return self.position == "rope" and not (self.no_rope_freq and (self._like(layer) + 1) % self.no_rope_freq == 0)

    def chunk_of(self, layer: int) -> int | None:
        """Return the number of positions of a chunk that a layer attends within, shorter than the sequence, or None."""
        size = self.attention_chunk_size
        attends = self.has_rope(layer) and not self.is_delta_net(layer)
        return size if size is not None and size < self.seq_len and attends else None

    @property
    def rotary_dim(self) -> int:
        return int(self.head_size * self.rope_fraction) if self.qk_rope_head_dim is None else self.qk_rope_head_dim

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> ModelConfig:
        """Build the config from its `dataclasses.asdict`, read from a checkpoint; TypeError if malformed."""
        scaling = options.get("rope_scaling")
        lists = {name: tuple(options.get(name, ())) for name in ("moe_dense_layers", "layer_types")}
        return cls(**{**options, "rope_scaling": RopeScaling(**scaling) if scaling else None, **lists})

    @classmethod
    def from_arch(cls, arch: str, **options: Any) -> ModelConfig:
        """Build a config from the family's options, overridden by `options`."""
        require(arch in FAMILIES, f"--arch {arch}", f"must be one of {', '.join(FAMILIES)}", "choose one of these")
        return cls(arch=arch, **{**FAMILIES[arch].options, **options})
