"""The options of a step: what model, layout, micro-batches and optimizer are, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megalite.core.base.errors import require
from megalite.core.options.all_parts import model_parts, optim_parts
from megalite.core.options.model import ModelConfig
from megalite.core.options.optim import OptimConfig
from megalite.core.options.parallel import SCHEDULES, ParallelConfig
from megalite.core.options.train import TrainConfig

_MAX_MICROBATCHES = 100_000


@dataclass(frozen=True)
class StepConfig:
    """All options that a training step follows; `Config` adds those of data and of the run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        if self.train.stage == "reward" and self.model.head != "score":
            object.__setattr__(self, "model", replace(self.model, head="score"))
        self._check_tensor_parallel()
        for part in (*model_parts(), *optim_parts()):
            part.check(self)
        self._check_features()
        self._check_stages()

    @property
    def within_documents(self) -> bool:
        """Whether attention stays within documents."""
        return False

    def _check_tensor_parallel(self) -> None:
        m, p = self.model, self.parallel
        for value, what in ((m.num_heads, "--num-heads"), (m.kv_heads, "--num-kv-heads")):
            require(
                value % p.tp == 0,
                f"{what} {value}",
                f"must be divisible by --tp {p.tp}: heads are never split",
                f"use a --tp that divides {value}, or change {what}",
            )
        given, rule = f"--ffn-hidden-size {m.ffn_hidden_size}", f"must be divisible by --tp {p.tp}"
        require(m.ffn_size % p.tp == 0, given, rule, "change one of the two")
        require(
            not self.sequence_parallel or m.seq_len % (p.tp * p.cp * p.tp_chunks) == 0,
            f"--seq-len {m.seq_len}",
            f"must be divisible by --tp {p.tp} x --tp-chunks {p.tp_chunks}"
            + f" x --cp {p.cp}" * (p.cp > 1)
            + " with sequence parallelism",
            "change --seq-len" + (", or lower --tp-chunks" if p.tp_chunks > 1 else ", or give --no-sequence-parallel"),
        )

    def _check_features(self) -> None:
        """Check what cannot be combined, whatever the sizes are."""
        m, p = self.model, self.parallel
        require(
            not (self.train.compile and (m.hidden_dropout or m.attention_dropout)),
            f"--compile with --hidden-dropout {m.hidden_dropout} --attention-dropout {m.attention_dropout}",
            "compiled blocks do not support dropout",
            "drop --compile, or set both to 0",
        )
        require(
            self.train.offload != "optimizer+params" or p.zero == 3,
            f"--offload optimizer+params with --zero {p.zero}",
            "weights can be offloaded only if they are gathered before use",
            "give --zero 3, or --offload optimizer",
        )
        given, wide = f"--grad-dtype {self.train.grad_dtype} with --zero {p.zero}", self.train.grad_dtype == "fp32"
        rule = "saves nothing: the update requires an fp32 gradient of all that a rank owns, here everything"
        require(wide or p.zero > 0, given, rule, "give --zero 1, or drop --grad-dtype")
        given, wide = f"--master-dtype {self.optim.master_dtype}", self.optim.master_dtype == "fp32"
        rule = f"requires weights in bf16, which are then the masters, not --precision {self.train.precision}"
        require(wide or self.train.precision == "bf16", given, rule, "give --precision bf16, or drop --master-dtype")
        require(
            self.train.compress == "none" or p.zero < 2,
            f"--compress {self.train.compress} with --zero {p.zero}",
            "compression requires full gradients once per step, which --zero 2 and 3 do not keep",
            "use --zero 1, or drop --compress",
        )

    def _check_stages(self) -> None:
        m = self.model
        p = self.parallel
        counts = self.parallel.stage_layers
        require(
            counts is not None or p.pp * p.vp <= m.num_layers,
            f"--pp {p.pp} --vp {p.vp}",
            f"makes {p.pp * p.vp} stages of {m.num_layers} layers, and each stage needs at least one layer",
            "lower --pp or --vp, raise --num-layers, or say with --pipeline-layout which have none",
        )
        given, rule = f"--pipeline-layout {p.pipeline_layout}", f"must have the {m.num_layers} layers of --num-layers"
        require(counts is None or sum(counts) == m.num_layers, given, rule, f"it has {sum(counts or ())}: change one")

    @property
    def sequence_parallel(self) -> bool:
        return self.parallel.sequence_parallel and self.parallel.tp > 1

    @property
    def rates(self) -> OptimConfig:
        """The optimizer options, with learning rates for this batch size (`--scale-lr`)."""
        return self.optim.scaled(self.train.global_batch_size)

    @property
    def peak_rate(self) -> str:
        """The peak learning rate and how `--scale-lr` computes it; empty without that option."""
        o, batch = self.optim, self.train.global_batch_size
        if o.scale_lr is None:
            return ""
        return f"{self.rates.lr:.6g} = --lr {o.lr:.6g} at batch {o.base_batch_size}, --scale-lr {o.scale_lr} to {batch}"

    def zero_stage(self, dp: int) -> int:
        """Return the ZeRO stage in effect (`ParallelConfig.zero_stage`)."""
        return self.parallel.zero_stage(dp, self.train.offload == "optimizer+params")

    def passes(self, samples: int, dp: int) -> int:
        """Return how many micro-batches every dp rank runs in a step of `samples`: as many as the one with most has.

        Where others have fewer (`rows.share_of`), their last are without a target (`Rows.filled`): a rank that left one
        out would keep others waiting in what they do together in a pass. There, interleaved runs as many as it can.
        """
        p, microbatches = self.parallel, samples // self.train.micro_batch_size
        most = -(-microbatches // dp)
        grouped = p.vp > 1 if p.schedule == "auto" else SCHEDULES[p.schedule].grouped
        return -(-most // p.pp) * p.pp if microbatches % dp and grouped else most

    def num_microbatches(self, dp: int) -> int:
        """Return the number of micro-batches per step that every dp rank runs, for the largest batch.

        Raises:
            UserError: some batch cannot be shared out.
        """
        self.microbatch_counts(dp)
        return self.passes(self.train.global_batch_size, dp)

    def microbatch_counts(self, dp: int) -> list[int]:
        """List the numbers of micro-batches per step and dp rank that occur in a run, in rising order.

        Raises:
            UserError: some batch cannot be shared out.
        """
        t = self.train
        micro, counts = t.micro_batch_size, set[int]()
        per_pass = micro * dp
        for size in t.batches.sizes:
            flag = f"--global-batch-size {size}"
            if t.batch_size_schedule is not None:
                flag = f"--batch-size-schedule {t.batch_size_schedule}: {size}"
            near = f"use {max(1, round(size / per_pass)) * per_pass}, or"
            rule = f"must be divisible by micro-batch size {micro}"
            require(size % micro == 0, flag, rule, f"{near} change --micro-batch-size")
            rule = f"must give each of {dp} data-parallel ranks a micro-batch of {micro}"
            remedy = f"use at least {per_pass}, fewer ranks, or a smaller --micro-batch-size"
            require(size >= per_pass, flag, rule, remedy)
            rule = f"must be divisible by micro-batch size {micro} x dp {dp} = {per_pass} with {self.rounding}"
            even = size % per_pass == 0 or not self.rounding
            require(even, flag, f"{rule}, which rounds the sum of each rank", f"{near} drop {self.rounding}")
            passes = self.passes(size, dp)
            # The schedule lists every pass of every micro-batch before the first step.
            require(
                passes <= _MAX_MICROBATCHES,
                flag,
                f"makes {passes} micro-batches per step on each of {dp} data-parallel ranks, more than "
                f"{_MAX_MICROBATCHES}",
                "raise --micro-batch-size, or use more ranks",
            )
            counts.add(passes)
        return sorted(counts)

    @property
    def rounding(self) -> str:
        """The options by which a step depends on how its samples are shared out; empty: there are none."""
        t = self.train
        options = {"compress": t.compress, "grad-reduce-dtype": t.grad_reduce_dtype, "grad-dtype": t.grad_dtype}
        return " ".join(f"--{name} {value}" for name, value in options.items() if value not in ("none", "fp32"))
