"""Flags of Megatron-LM, Megatron-DeepSpeed, the Hugging Face Trainer and torchrun that are no options here.

Flags that do not affect training can be ignored with `--ignore-megatron-flags`. The others matter: each is refused with
its own reason and remedy, all flags of a command line at once. docs/megatron.md prints these tables.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.extras.compat import trainer
from megalite.extras.compat.megatron import NEEDS
from megalite.extras.compat.table import Refusal, patterns_of, read_table
from megalite.runtime.options.dialect import Flag

IGNORE = "ignore-megatron-flags"

_NO_EFFECT = """
layers are distributed over the stages by cost, including embedding and output layer, or by --pipeline-layout
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-* account-for-*
    standalone-embedding-stage
the interleaved schedule runs --pp micro-batches through a chunk before the next
    microbatch-group-size-per-virtual-pipeline-stage
communication is always overlapped with computation where the schedule allows it
    overlap-param-gather-with-optimizer-step *overlap-p2p-* tp-comm-* no-tp-comm-* no-align-* *-wgrad-compute
    wgrad-deferral-limit
megalite has its own gradient buffer and ZeRO
    DDP-impl ddp-* zero-* no-contiguous-buffers-in-local-ddp
process groups are made from --tp and --pp; NCCL is configured by its environment variables
    nccl-* use-nccl-ub use-sharp sharp-enabled-group high-priority-stream-groups use-gloo-process-groups
    use-ring-exchange-p2p create-all-gather-group use-tp-pp-dp-mapping no-batch-p2p-*
DeepSpeed's engine and its optimizer are not used
    no-pipeline-parallel ds-fused-adam
the launcher sets the rank of each process
    lazy-mpu-init
full recomputes every block, selective the attention core; --recompute full:SHARE does so in a share of the blocks
    recompute-method=uniform|block recompute-modules=core_attn recompute-* checkpoint-num-layers
    distribute-*-activations partition-activations contigious-checkpointing
tokens are sorted and multiplied in groups in one way
    moe-grouped-gemm moe-use-legacy-grouped-gemm moe-permute-fusion moe-router-fusion
    moe-enable-deepep moe-shared-expert-overlap
kernels are selected automatically and logged
    no-bias-swiglu-fusion no-*-fusion cross-entropy-* use-flash-attn* flash-attention-version attention-backend=auto
    transformer-impl no-persist-layer-norm use-fused-* fused-* use-te-activation-func use-transformer-engine-op-fuser
    use-flashinfer-* memory-efficient-layer-norm disable-jit-fuser use-mcore-models use-legacy-models
    enable-experimental
memory, garbage collection and CUDA graphs of their implementation
    manual-gc* no-manual-gc-eval empty-unused-memory-level train-sync-interval *cuda-graph* *te-rng-tracker
    overlap-cpu-optimizer-* inference-* cache-mla-latents deallocate-pipeline-outputs
    no-clone-scatter-output-in-embedding
norms, softmax and loss are always computed in fp32
    *-query-key-layer-scaling *attention-softmax-in-fp32
initial values depend only on the seed and the name of the parameter, on any device and layout
    use-cpu-initialization no-initialization init-model-with-meta-device
the type of the tokenizer is read from its files
    tokenizer-type tokenizer-metadata tiktoken-pattern legacy-tokenizer trust-remote-code no-save-tokenizer-assets
    merge-file
the types of the optimizer's states are options of their own
    use-precision-aware-optimizer
padding follows from --vocab-size, --vocab-divisible-by and --tp, and never counts
    padded-vocab-size no-pad-vocab-size
the loss is always divided by the number of targets of the whole step; the mask is always causal
    calculate-per-token-loss *create-attention-mask-in-dataloader
data files are memory-mapped and indices built in memory, without cache files or worker processes
    data-cache-path no-mmap-bin-files mmap-warmup num-workers dataloader-fast-* dataloader-defer-*
    data-impl num-dataset-builder-threads mid-level-dataset-surplus object-storage-cache-path *able-msc
the flags set the learning rate, never the checkpoint
    override-opt-param-scheduler
checkpoints have one format: complete, verified, written in the background, loadable in any layout
    ckpt-format use-dist-ckpt dist-ckpt-* *-ckpt-format ckpt-assume-* *ckpt-fully-parallel-* async-* use-persistent-*
    non-persistent-save-interval non-persistent-* no-save-optim no-save-rng verify-*
a run stops with a checkpoint at SIGTERM or SIGINT
    exit-signal-handler* exit-signal
metrics.jsonl records all metrics of every step
    log-* timing-log-* no-log-loss-scale-to-tensorboard tensorboard-log-interval tensorboard-queue-size *one-logger*
    app-tag-* otel-* config-logger-dir logging-level barrier-with-* no-barrier-with-* run-workload-inspector-server
the run is named by --run-dir; wandb has environment variables of its own
    wandb-exp-name wandb-save-dir
failures, slow ranks and bad values are watched for in another way (docs/reliability.md)
    *check-for-* rerun-mode result-rejected-* error-injection-* *straggler* enable-ft-package calc-ft-timeouts
    inprocess-* *flight-recorder-* gpu-sniff-test-interval check-weight-hash-*
the steps to profile are given as --profile A:B
    profile-* use-pytorch-profiler use-nsys-profiler pytorch-profiler-* nvtx-ranges record-* memory-snapshot-path
"""

_MATTERS = """
--cp shares every sample, and --cp-comm says how -> use --cp N, with --cp-comm a2a for DeepSpeed-Ulysses
    cp-partition* hierarchical-context-parallel-sizes hybrid-context-parallel
    ds-sequence-parallel-size=1 force-ds-sequence-parallel
experts get every token that chooses them, by rules of their own -> use the options of docs/experts.md
    num-experts-* expert-* moe-router-dtype=fp32 moe-token-drop-policy=probs|position
    moe-* topk mlp-type=standard
    enable-expert-tensor-parallelism create-moe-param-group use-tutel *-moe-*
there is no separate FSDP engine -> use --zero 3, or --zero 2; --zero-group for hybrid sharding
    use-megatron-fsdp use-torch-fsdp2 *fsdp-*
offload is all or nothing, of one kind of state -> use --offload optimizer, or --offload activations
    cpu-offloading-num-layers=0 optimizer-offload-fraction=1.0 cpu-* optimizer-offload-*
    remote-device use-pin-memory checkpoint-in-cpu fine-grained-* offload-modules
megalite has no DeepSpeed engine -> drop it; --deepspeed-config FILE reads its file
    deepspeed*
the launcher says it by LOCAL_RANK, which differs or is not set -> drop it, or start the ranks with torchrun
    local-rank=$LOCAL_RANK|-1
a layer specification in Python cannot be read -> describe the model with the options in --help all
    spec yaml-cfg
the residual stream is in --precision; embedding, loss and matrix products have no precision of their own -> drop it
    fp32-residual-connection fp16-lm-cross-entropy embedding-weights-in-fp32 disable-bf16-reduced-precision-matmul
both moments have one type, and bf16 is rounded stochastically, not to nearest -> use --moments-dtype bf16
    exp-avg-dtype=fp32 exp-avg-sq-dtype=fp32
masters are fp32, or bf16 and rounded stochastically -> use --master-dtype bf16
    main-params-dtype=fp32
this type is that of the sum over micro-batches -> use --grad-dtype bf16
    main-grads-dtype=fp32
the model does not support this variant -> drop it, or see --help all for the model's options
    squared-relu apply-residual-connection-post-layernorm no-position-embedding rotary-* qk-l2-norm
    qk-clip* softmax-scale relative-attention-* embedding-init-method-std init-method-xavier-uniform no-scaled-init
    data-parallel-random-init hybrid-* is-hybrid-model mamba-* heterogeneous-*
YaRN is one option, in latent attention and any other -> give --rope-scaling with rope_type yarn
    rope-type=rope rotary-scaling-factor=1.0|1 mscale=1.0|1 mscale-all-dim=0.0|0 original-max-position-embeddings
modules that predict further tokens are like the last layer -> use --mtp-num-layers, --mtp-loss-scaling-factor
    mtp-*=0
gpt-oss's softmax and gate have names of their own here -> use --attention-sinks for a learnable softmax, \
--activation clamped_swiglu for quick-geglu with offset 1 and clamp 7
    softmax-type=vanilla quick-geglu glu-linear-offset=0 activation-func-*
this gives windows of positions; layers without one follow --window-pattern -> give --window
    sliding-window
pattern and special tokens come with the tokenizer -> drop it, and give --tokenizer or --vocab-size
    tokenizer-* tiktoken-* null-tokenizer-*
the vocabulary is the tokenizer's -> give --vocab-size with the ids added
    vocab-extra-ids=0
attention, positions and targets stop at document ends by one option -> give --document-mask
    reset-position-ids reset-attention-mask eod-mask-loss dataloader-inter-document-masking
a sample is the next --seq-len tokens of its documents -> drop it
    dataloader-type=single fim-*
conversations are prepared and marked before training -> run megalite preprocess --chat, and give --loss-on answers
    sft*
--data, --valid-data and --split define the data -> write the prefixes after --data
    test-data-path *data-args-path per-dataset-sequences-path
an evaluation reads --eval-steps batches of the size of training from --valid-data or --split -> use these
    full-validation multiple-validation-sets validation-set-names start-eval-at-iter eval-*-batch-size
no batch is smaller than asked for -> give a --global-batch-size that --micro-batch-size divides
    decrease-batch-size-if-needed
the length of a run is counted in steps -> divide by --seq-len x --global-batch-size and \
give --train-steps, --warmup-steps or --lr-decay-steps
    train-tokens lr-*-tokens warmup
weight decay is not applied to norms and biases -> use --weight-decay
    do-norm-bias-weight-decay apply-wd-to-qk-layernorm
learning rates differ only between embedding, output layer and the rest -> use --decoupled-lr
    head-lr-mult
the final decay of wsd is linear -> drop it
    lr-wsd-decay-style=linear
the learning rate depends on the flags and the step, never on the checkpoint -> drop it
    use-checkpoint-opt-param-scheduler no-load-lr-state
a checkpoint is read as a whole, by its path -> drop it; --resume selects the checkpoint
    *ckpt* *-checkpoint use-*-checkpoint-args use-checkpoint-args load-tag
checkpoints are kept by number, not by distance -> use --keep-last
    save-retain-interval
a run stops at --train-steps, or with a checkpoint at SIGTERM -> let the scheduler send it before its time limit
    kill-switch-path adlr-autoresume*
a run stops at --train-steps -> give the step at which it should end as --train-steps
    exit-* skip-train
no step is left out in advance -> use --on-spike
    iterations-to-skip
the watchdog has one time limit -> use --watchdog-timeout SECONDS
    distributed-timeout-seconds-after-init
wandb reads it from its environment -> set WANDB_ENTITY
    wandb-entity
FP8 has its own recipes, without delayed scaling, for the blocks' products only -> use --fp8 and --fp8-keep-bf16
    fp8* first-last-layers-bf16 num-layers-at-*-in-bf16
4-bit training is not supported -> drop it, and use --precision bf16
    fp4* *kitchen* quant-recipe
matrices are orthogonalized whole, q, k, v, gate and up apart, at the size of AdamW's updates -> drop it
    muon-tp-mode=duplicated|distributed muon-no-split-qkv muon-scale-mode=spectral muon-extra-scale-factor=0.2 muon-*
muP has one recipe, the table in docs/mup.md; its base width is that of the tuned model -> use --mup-base-width
    use-mup mup-* scaling-recipe scaling-base-hidden-size
lion reads --beta1 and --beta2 -> use these
    lion-*
megalite trains on plain text only -> drop it
    rl-* grpo-* retro-*
"""

_TRAINER = {
    "--micro-batch-size": "train-batch-size",
    "--train-steps, which is epochs x samples / --global-batch-size": "epochs num-epochs num-train-epochs",
    "--compile": "torch-compile-backend torch-compile-mode",
    "--run-dir": "overwrite-output-dir logging-dir",
    "--resume": "ignore-data-skip",
    "--save-every": "save-strategy",
    "--eval-every": "eval-strategy evaluation-strategy do-eval",
    "--micro-batch-size, which evaluations use too": "per-device-eval-batch-size eval-batch-size",
    "--log-every": "logging-strategy",
    "drop it: the best checkpoint is the one of the lowest validation loss": "metric-for-best-model=eval_loss|loss "
    "greater-is-better=False|false",
    "--wandb-project or --tensorboard": "report-to",
    "--init-from-hf": "config-name",
    "--data, after megalite preprocess": "dataset-name dataset-config-name train-file text-column",
    "--valid-data, after megalite preprocess": "validation-file validation-split-percentage",
    "--zero and --tp": "fsdp-config",
    "--seed": "data-seed",
    "drop it: batches are read ahead in a thread": "dataloader-num-workers preprocessing-num-workers",
}
"""What to give -> names of the Hugging Face Trainer and its language-modeling script."""

_TORCHRUN = """nproc-per-node nnodes node-rank master-addr master-port standalone rdzv-backend rdzv-endpoint rdzv-id
    rdzv-conf max-restarts monitor-interval local-addr log-dir redirects tee role start-method no-python"""

_ROPE = ("--position-embedding-type rope", "--position rope", "--use-rotary-position-embeddings")
_NO_YARN = ("--rotary-scaling-factor 1.0", "--rotary-scaling-factor 1")
_NEUTRAL_BESIDE = {"no-position-embedding": _ROPE, "mscale": _NO_YARN, "mscale-all-dim": _NO_YARN}
"""Flag of Megatron-LM -> flags beside any of which it asks for nothing."""


def _give(option: str) -> str:
    return f"give {option}" if option.startswith("--") else option


def _of_megatron(row: Refusal) -> Refusal:
    if row.instead:
        return row._replace(why=f"is not an option here: {row.why}")
    return row._replace(why=f"has no effect here: {row.why}")


MEGATRON = [_of_megatron(row) for row in read_table(_NO_EFFECT + _MATTERS)]
"""Flags of Megatron-LM and Megatron-DeepSpeed; those in rows without a remedy can be ignored."""

TRAINER = [
    *(
        Refusal("is a name of the Hugging Face Trainer", _give(option), patterns_of(names))
        for option, names in _TRAINER.items()
    ),
    Refusal("is an option of torchrun", "write it before pretrain_gpt.py", patterns_of(_TORCHRUN)),
]
"""Names of the Hugging Face Trainer, and of torchrun, which starts it."""


def find_refusal(flag: str, known: Iterable[str]) -> Refusal | None:
    """Return the row of another tool's flag; None if it has none, or is a typo of one of `known`."""
    rows = [*MEGATRON, *TRAINER]
    if exact := next((row for row in rows if flag in row.patterns), None):
        return exact
    if difflib.get_close_matches(flag, list(known), n=1, cutoff=0.9):
        return None
    return next((row for row in rows if row.covers(flag)), None)


def accept(flags: Sequence[Flag], known: Collection[str], hint: Callable[[str], str]) -> list[Flag]:
    """Return the flags that are options here; drop those that request nothing, or that the user ignores.

    Args:
        flags: all flags of a command line.
        known: the flags that are options.
        hint: makes the remedy for an unknown flag.

    Raises:
        UserError: some flags are no options. One line for a single flag; for several, a line that counts them, a line
            for each that matters, and one that names those without effect.
    """
    flags, mistakes = trainer.rewrite(flags)
    options: list[Flag] = []
    given = {" ".join([f"--{flag}", *words]) for flag, words in flags}
    names = {flag for flag, _ in flags}
    harmless: dict[str, str] = {}
    for flag, words in flags:
        written = " ".join([f"--{flag}", *words])
        row = None if flag in known else find_refusal(flag, known)
        if row is not None and (row.accepts(flag, " ".join(words)) or given & {*_NEUTRAL_BESIDE.get(flag, ())}):
            continue
        if flag in NEEDS and NEEDS[flag] not in names:
            logger.info(f"{written}: has no effect without --{NEEDS[flag]}, as in Megatron-LM")
            continue
        if flag == "recompute-num-layers" and "--recompute-method uniform" in given:
            logger.info(f"{written}: each block keeps its input, and is recomputed by itself")
            continue
        if flag == "multi-latent-attention" and "qk-layernorm" not in names:
            mistakes[f"--{flag}"] = f"{written}: latents are always normalized here; give --qk-layernorm with it"
            continue
        if flag == "optimizer" and words == ["dist_muon"] and "muon-extra-scale-factor" not in names:
            why = "updates have 0.2 times the size that they have there without --muon-extra-scale-factor"
            mistakes[f"--{flag}"] = f"{written}: {why}; give it as 0.2, with a --lr for it, or --optimizer muon"
            continue
        if row is not None and not row.instead:
            harmless[f"--{flag}"] = f"{written}: {row.why}; drop it, or give --{IGNORE}"
        elif row is not None:
            mistakes[f"--{flag}"] = f"{written}: {row.why}; {row.instead}"
        elif flag not in known:
            mistakes[f"--{flag}"] = f"{written}: is an unknown flag; {hint(flag)}"
        elif flag == "profile" and not words:
            mistakes["--profile"] = "--profile: takes the steps to profile; give --profile 10:13 for steps 10 to 12"
        else:
            options.append((flag, words))
    if harmless and IGNORE in names:
        logger.info(f"ignored, as they have no effect here: {', '.join(harmless)}")
        harmless = {}
    if mistakes or harmless:
        raise UserError.from_message(_report(mistakes, harmless))
    return options


def _report(mistakes: dict[str, str], harmless: dict[str, str]) -> str:
    if len(mistakes) + len(harmless) == 1:
        return next(iter((mistakes | harmless).values()))
    names = ", ".join(harmless)
    if not mistakes:
        return f"{names}: have no effect here; drop them, or give --{IGNORE}"
    drop = f"; {len(harmless)} more have no effect here: drop them, or give --{IGNORE}" if harmless else ""
    lines = [f"{len(mistakes)} flags: must be changed, as listed below{drop}", *mistakes.values()]
    return "\n  ".join([*lines, f"no effect: {names}"] if harmless else lines)
