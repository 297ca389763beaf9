"""Every option of a run: frozen dataclasses, checked where they are made. Field names are the flags' names.

Errors say the value, the rule it breaks, and what to change (`UserError`, exit code 2).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from megalite.errors import UserError

# What a family of models fixes; every value can be overridden by a flag. Source: the families' own configurations.
ARCHS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1e6},
    "qwen3": {"qk_norm": "head", "norm_eps": 1e-6, "rope_theta": 1e6},
    "olmo2": {"qk_norm": "full", "norm_position": "post", "norm_eps": 1e-6, "rope_theta": 5e5},
    "phi3": {},
    "gpt2": {
        "norm": "layernorm",
        "position": "learned",
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
    },
    "gpt_neox": {
        "norm": "layernorm",
        "activation": "gelu",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "rope_fraction": 0.25,
        "parallel_residual": True,
    },
}


def _check(ok: bool, given: str, rule: str, remedy: str) -> None:
    if not ok:
        raise UserError(given, rule, remedy)


def step_range(flag: str, given: str | None) -> range:
    """Steps of an A:B option: B is the first that does not count any more; none for None."""
    if given is None:
        return range(0)
    first, colon, end = given.partition(":")
    ok = bool(colon) and first.isdecimal() and end.isdecimal() and 1 <= int(first) < int(end)
    _check(ok, f"{flag} {given}", "must be A:B with 1 <= A < B, for steps A to B - 1", f"write {flag} 10:13")
    return range(int(first), int(end))


def _in_range(owner: Any, names: str, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Check low <= value < high (`above`: low < value) of the options in `names`; those at None are left to follow."""
    for name in names.split():
        value, flag = getattr(owner, name), "--" + name.replace("_", "-")
        top = "finite" if high == math.inf else f"below {high}"
        rule = f"must be {'more than' if above else 'at least'} {low} and {top}"
        ok = value is None or (low < value if above else low <= value) and value < high
        _check(ok, f"{flag} {value}", rule, f"give a {flag} in that range")


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 scaling of the rotary frequencies (Llama 3 technical report, section 3.2; HF `rope_type: llama3`)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        _check(
            1 <= self.factor < math.inf
            and 0 < self.low_freq_factor < self.high_freq_factor < math.inf
            and self.original_max_position_embeddings >= 1,
            f"--rope-scaling {dataclasses.asdict(self)}",
            "needs factor >= 1, 0 < low_freq_factor < high_freq_factor and a positive original length",
            "take the values of the model's config.json",
        )


@dataclass(frozen=True)
class ModelConfig:
    """Shape and family of the model. Options left at None follow the family (`--arch`) or the other sizes."""

    arch: str = "llama"
    """Family: llama, mistral, qwen2, qwen3, olmo2, phi3, gpt2 or gpt_neox; sets the options below."""
    num_layers: int = 4
    """Transformer blocks."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int | None = None
    """Key/value heads (grouped-query attention); default: num_heads."""
    head_dim: int | None = None
    """Width of a head; default: hidden_size / num_heads."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP; default: 4 h, or 8/3 h rounded up to a multiple of 64 with a gated activation."""
    vocab_size: int | None = None
    """True vocabulary size (padding is added by itself); default: the tokenizer's."""
    seq_len: int = 256
    """Tokens a sample; also the number of learned positions unless max_position_embeddings says more."""
    max_position_embeddings: int | None = None
    """Positions the model is made for; default: seq_len."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of normalisation."""
    norm_eps: float = 1e-5
    """Epsilon inside the square root of the normalisation."""
    norm_position: Literal["pre", "post"] = "pre"
    """Normalise before each sub-layer, or its output before the residual is added (OLMo 2)."""
    position: Literal["rope", "learned"] = "rope"
    """Rotary or learned absolute positions."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_fraction: float = 1.0
    """Share of each head that is rotated (GPT-NeoX: 0.25)."""
    rope_scaling: RopeScaling | None = None
    """Llama-3 frequency scaling, as '{factor: 8.0}'."""
    activation: Literal["swiglu", "geglu", "gelu", "gelu_tanh"] = "swiglu"
    """MLP activation; swiglu and geglu are gated."""
    qkv_bias: bool = False
    """Bias on the q, k, v projections."""
    o_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    """Biases in the MLP."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of q and k: per head (Qwen 3) or over the whole projection (OLMo 2)."""
    parallel_residual: bool = False
    """Attention and MLP read the same residual stream (GPT-NeoX)."""
    tie_embeddings: bool = False
    """The output layer uses the input embedding."""
    init_std: float = 0.02
    """Standard deviation of initial weights; output projections take init_std / sqrt(2 num_layers)."""
    hidden_dropout: float = 0.0
    """Dropout on embeddings and sub-layer outputs."""
    attention_dropout: float = 0.0
    """Dropout on attention probabilities."""

    def __post_init__(self) -> None:
        _check(self.arch in ARCHS, f"--arch {self.arch}", f"must be one of {', '.join(ARCHS)}", "choose one of these")
        _in_range(self, "num_layers hidden_size num_heads num_kv_heads head_dim ffn_hidden_size seq_len", 1)
        _in_range(self, "max_position_embeddings", 1)
        _in_range(self, "vocab_size", 2)
        _in_range(self, "norm_eps rope_theta rope_fraction init_std", 0, above=True)
        _in_range(self, "hidden_dropout attention_dropout", 0, 1)
        self._default("num_kv_heads", self.num_heads)
        if self.head_dim is None:
            _check(
                self.hidden_size % self.num_heads == 0,
                f"--hidden-size {self.hidden_size}",
                f"must be divisible by --num-heads {self.num_heads}",
                "change one of the two, or give --head-dim",
            )
            self._default("head_dim", self.hidden_size // self.num_heads)
        gated = -(-8 * self.hidden_size // (3 * 64)) * 64
        self._default("ffn_hidden_size", gated if self.gated else 4 * self.hidden_size)
        self._default("max_position_embeddings", self.seq_len)
        _check(
            self.num_heads % self.kv_heads == 0,
            f"--num-kv-heads {self.num_kv_heads}",
            f"must divide --num-heads {self.num_heads}",
            "choose a divisor of --num-heads",
        )
        _check(
            self.position != "learned" or self.positions >= self.seq_len,
            f"--seq-len {self.seq_len}",
            f"is longer than the {self.max_position_embeddings} learned positions",
            "lower --seq-len or raise --max-position-embeddings",
        )
        _check(
            self.position != "rope" or (self.rotary_dim % 2 == 0 and 2 <= self.rotary_dim <= self.head_size),
            f"--rope-fraction {self.rope_fraction}",
            f"rotates {self.rotary_dim} head dimensions, not an even number from 2 to {self.head_dim}",
            "change --head-dim or --rope-fraction",
        )

    def _default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    # Resolved values with the types that code downstream wants (the fields are Optional only on the command line).
    @property
    def kv_heads(self) -> int:
        assert self.num_kv_heads is not None
        return self.num_kv_heads

    @property
    def head_size(self) -> int:
        assert self.head_dim is not None
        return self.head_dim

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
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")

    @property
    def rotary_dim(self) -> int:
        return int(self.head_size * self.rope_fraction)

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> ModelConfig:
        """The config that `dataclasses.asdict` described (a checkpoint holds it as JSON)."""
        scaling = options.get("rope_scaling")
        return cls(**{**options, "rope_scaling": RopeScaling(**scaling) if scaling else None})

    @classmethod
    def from_arch(cls, arch: str, **options: Any) -> ModelConfig:
        """A config with the family's options, then `options`."""
        _check(arch in ARCHS, f"--arch {arch}", f"must be one of {', '.join(ARCHS)}", "choose one of these")
        return cls(arch=arch, **{**ARCHS[arch], **options})


@dataclass(frozen=True)
class ParallelConfig:
    """Layout: world = dp x pp x tp; dp is what is left."""

    tp: int = 1
    """Tensor-parallel size: ranks that share every layer."""
    pp: int = 1
    """Pipeline-parallel size: ranks that share the depth."""
    vp: int = 1
    """Virtual pipeline chunks a rank (interleaved schedule)."""
    sequence_parallel: bool = True
    """Shard norms, dropout and residual stream over the sequence when tp > 1."""
    schedule: Literal["auto", "naive", "gpipe", "1f1b", "1f1b-eager", "interleaved", "zb-h1", "zb-v"] = "auto"
    """Pipeline schedule."""
    zero: Literal[0, 1] = 1
    """ZeRO stage: 1 shards optimizer states and fp32 master weights over dp, 0 replicates them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA when there is one."""
    bucket_size: int = 40_000_000
    """Elements a gradient bucket; a bucket is reduced as soon as its gradients are final."""
    overlap_grad_reduce: bool = True
    """Reduce gradients over dp while backward still runs."""
    overlap_param_gather: bool = True
    """ZeRO-1: gather updated weights while the next forward pass already runs."""
    vocab_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times tp; padding never counts in the loss."""

    def __post_init__(self) -> None:
        _in_range(self, "tp pp vp bucket_size vocab_divisible_by", 1)


@dataclass(frozen=True)
class DataConfig:
    """Tokens to train on."""

    data: tuple[str, ...] = ()
    """PREFIX, or WEIGHT PREFIX pairs for a blend (PREFIX.bin and PREFIX.idx)."""
    valid_data: tuple[str, ...] = ()
    """Evaluation data, as --data; default: the second part of --split."""
    split: str = "99,1,0"
    """Shares of the documents for training, validation and test."""
    tokenizer: str | None = None
    """Tokenizer folder or file that made the data."""
    shuffle: bool = True
    """Shuffle samples by (seed, epoch)."""
    mock_data: bool = False
    """Train on made-up sequences; needs no files."""


@dataclass(frozen=True)
class TrainConfig:
    """Batch, time, precision and memory."""

    micro_batch_size: int = 1
    """Samples a forward pass."""
    global_batch_size: int = 8
    """Samples a step, over all dp ranks."""
    train_steps: int = 100
    """Optimizer steps of the whole run."""
    seed: int = 1234
    """Seed of initial weights, data order and dropout."""
    deterministic: bool = False
    """Only deterministic kernels (slower on CUDA)."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of parameters and activations; master weights and main gradients are fp32."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute in backward: nothing, the attention core, or whole blocks."""
    ops: str = "auto"
    """Kernels: a backend for all ops (auto, torch, triton, cuda, cpp, apex), or OP=BACKEND pairs, comma-separated."""
    loss_chunk: int = 0
    """Tokens at a time in the output layer and the loss, so that all logits never exist; 0: all at once."""
    label_smoothing: float = 0.0
    """Weight of the uniform distribution in the target."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients travel over dp."""

    def __post_init__(self) -> None:
        _in_range(self, "micro_batch_size global_batch_size train_steps", 1)
        _in_range(self, "seed", 0, 2**63)
        _in_range(self, "label_smoothing", 0, 1)
        _in_range(self, "loss_chunk", 0)
        _check(
            not (self.loss_chunk and self.label_smoothing),
            f"--loss-chunk {self.loss_chunk} with --label-smoothing {self.label_smoothing}",
            "the loss by chunks has no label smoothing",
            "leave one of the two out",
        )


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    optimizer: Literal["adamw", "lamb", "sgd"] = "adamw"
    """adamw (decoupled weight decay), lamb (with trust ratios) or sgd (momentum beta1)."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: int = 0
    """Steps of linear warm-up from init_lr."""
    init_lr: float = 0.0
    """Learning rate at step 0 of the warm-up."""
    lr_decay: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape of the decay after the warm-up."""
    lr_decay_steps: int | None = None
    """Step at which the decay ends; default: train_steps."""
    wsd_decay_steps: int | None = None
    """wsd: steps of the final linear decay; default: a tenth of the run."""
    weight_decay: float = 0.1
    """Decoupled weight decay; none on norms and biases."""
    beta1: float = 0.9
    """Adam's first decay rate (sgd: momentum)."""
    beta2: float = 0.95
    """Adam's second decay rate."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    loss_scale: float | None = None
    """fp16: constant loss scale; default: dynamic."""
    initial_loss_scale: float = 65536.0
    """fp16: first dynamic loss scale."""
    loss_scale_window: int = 1000
    """fp16: steps without overflow before the scale doubles."""

    def __post_init__(self) -> None:
        _in_range(self, "lr eps loss_scale initial_loss_scale", 0, above=True)
        _in_range(self, "clip_grad weight_decay warmup_steps init_lr", 0)
        _in_range(self, "lr_decay_steps wsd_decay_steps loss_scale_window", 1)
        _in_range(self, "beta1 beta2", 0, 1)
        _check(
            0 <= self.min_lr <= self.lr,
            f"--min-lr {self.min_lr}",
            f"must be between 0 and --lr {self.lr}",
            "lower --min-lr or raise --lr",
        )
        _check(
            self.lr_decay_steps is None or self.lr_decay_steps >= self.warmup_steps,
            f"--lr-decay-steps {self.lr_decay_steps}",
            f"the decay would end before the --warmup-steps {self.warmup_steps} are over",
            "raise it (it counts from the start of the run) or lower --warmup-steps",
        )


@dataclass(frozen=True)
class RunConfig:
    """Where results go, and how often."""

    run_dir: str = "runs/run"
    """Folder of the run: config.yaml, metrics.jsonl, checkpoints/, logs/."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    keep_last: int = 2
    """Checkpoints kept; older ones are pruned after a commit."""
    resume: str = "latest"
    """latest, never, or the path of a checkpoint."""
    init_from_hf: str | None = None
    """Start a new run from this Hugging Face folder: its model options and weights."""
    resume_fallback: bool = False
    """Where the newest checkpoint is damaged, resume from the one before it."""
    save_errors: Literal["stop", "warn"] = "stop"
    """What a failed save does to the run."""
    check_replicas: bool = True
    """Before every save, compare the copies of each weight over dp and tp; save nothing where they differ."""
    watchdog_timeout: float = 600.0
    """Seconds without progress of any rank before the run is ended and the culprit named; 0: no watchdog."""
    on_spike: Literal["ignore", "skip", "rewind"] = "ignore"
    """A loss spike: go on, leave out its update, or go back to the last checkpoint and skip the samples since then."""
    spike_threshold: float = 1.5
    """A spike is a loss above this multiple of the median of the last 32."""
    save_model_every: int = 0
    """Steps between saves of the weights alone, as bf16; 0: never."""
    eval_every: int = 0
    """Steps between evaluations; 0: never."""
    eval_steps: int = 10
    """Global batches an evaluation."""
    log_every: int = 1
    """Steps between console lines (metrics.jsonl has every step)."""
    record_schedule: str | None = None
    """A:B writes to RUN_DIR/schedule when each pipeline operation of steps A to B - 1 ran (see tools/schedule.py)."""
    profile: str | None = None
    """A:B profiles steps A to B - 1: a trace and a table of times of each rank in RUN_DIR/profile."""
    memory_snapshot: bool = False
    """CUDA: record every allocation, and write RUN_DIR/profile/memory_rank_N.pickle at the end or out of memory."""
    tensorboard: bool = False
    """Also write TensorBoard events to RUN_DIR/tensorboard."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (offline where there is no key)."""

    def __post_init__(self) -> None:
        _in_range(self, "save_every save_model_every eval_every", 0)
        _in_range(self, "eval_steps log_every", 1)
        _in_range(self, "keep_last", 2)
        _in_range(self, "watchdog_timeout", 0)
        _in_range(self, "spike_threshold", 1, above=True)
        _check(self.run_dir != "", "--run-dir ''", "names no folder", "give a folder")
        step_range("--record-schedule", self.record_schedule)
        step_range("--profile", self.profile)


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        m, p = self.model, self.parallel
        for value, what in ((m.num_heads, "--num-heads"), (m.kv_heads, "--num-kv-heads")):
            _check(
                value % p.tp == 0,
                f"{what} {value}",
                f"must be divisible by --tp {p.tp}: a head is never cut",
                f"use a --tp that divides {value}, or change {what}",
            )
        _check(
            m.ffn_size % p.tp == 0,
            f"--ffn-hidden-size {m.ffn_hidden_size}",
            f"must be divisible by --tp {p.tp}",
            "change one of the two",
        )
        _check(
            not self.sequence_parallel or m.seq_len % p.tp == 0,
            f"--seq-len {m.seq_len}",
            f"must be divisible by --tp {p.tp} with sequence parallelism",
            "change --seq-len, or give --no-sequence-parallel",
        )
        _check(
            p.pp * p.vp <= m.num_layers,
            f"--pp {p.pp} --vp {p.vp}",
            f"makes {p.pp * p.vp} stages of {m.num_layers} layers; every stage needs one",
            "lower --pp or --vp, or raise --num-layers",
        )

    @property
    def sequence_parallel(self) -> bool:
        return self.parallel.sequence_parallel and self.parallel.tp > 1

    def num_microbatches(self, dp: int) -> int:
        """Micro-batches a dp rank runs each step; `UserError` where the batch does not divide."""
        t = self.train
        per_pass = t.micro_batch_size * dp
        _check(
            t.global_batch_size % per_pass == 0,
            f"--global-batch-size {t.global_batch_size}",
            f"must be divisible by micro-batch size {t.micro_batch_size} x dp {dp} = {per_pass}",
            f"use {max(1, round(t.global_batch_size / per_pass)) * per_pass}, or change --micro-batch-size",
        )
        return t.global_batch_size // per_pass
