"""Spellings of Megatron-LM: each acts as ours does or is refused by name, and docs/megatron.md lists them all."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.model.parameters import param_map
from megalite.core.options.lr import LR_DECAYS
from megalite.core.options.rates import describe_warmup, rates_at
from megalite.core.options.recompute import MODES, Extent
from megalite.core.options.rope import RopeScaling
from megalite.core.sharding import count_parameters
from megalite.extras.compat import megatron as aliases
from megalite.extras.compat import megatron_defaults, refusals, trainer
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.compat.table import Refusal, all_patterns
from megalite.runtime.options import cli
from megalite.runtime.options.fields import GROUP_OF, TYPES
from megalite.runtime.options.run import Config

parse = partial(cli.parse, dialect=DIALECT)
DOCS = Path(__file__).parents[4] / "docs" / "megatron.md"

# A value for each option that is not its default and that is valid beside defaults.
SAMPLE = {
    "tp": "2",
    "pp": "2",
    "vp": "2",
    "cp": "2",
    "cp_comm": "a2a",
    "zero": "0",
    "device": "cpu",
    "bucket_size": "7",
    "vocab_divisible_by": "64",
    "num_heads": "8",
    "num_kv_heads": "2",
    "head_dim": "32",
    "seq_len": "64",
    "norm": "layernorm",
    "norm_eps": "1e-3",
    "position": "learned",
    "rope_theta": "5e5",
    "rope_fraction": "0.5",
    "init_std": "0.1",
    "tokenizer": "T",
    "micro_batch_size": "2",
    "train_steps": "7",
    "recompute": "full",
    "pipeline_layout": "4",
    "lr_decay": "linear",
    "lr_decay_steps": "9",
    "wsd_decay_steps": "3",
    "warmup_steps": "5",
    "init_lr": "1e-5",
    "beta1": "0.8",
    "beta2": "0.7",
    "eps": "1e-6",
    "muon_ns_steps": "4",
    "run_dir": "R",
    "save_every": "4",
    "eval_every": "6",
    "eval_steps": "8",
    "log_every": "3",
    "weight_decay": "0.3",
    "weight_decay_ramp": "constant",
    "data": "P",
    "valid_data": "Q",
    "rope_linear_factor": "8",
    "window_pattern": "2",
    "max_minutes": "235",
    "ep": "2",
    "moe_topk": "3",
    "moe_dispatch": "allgather",
    "moe_ffn_size": "24",
    "moe_shared_ffn_size": "64",
    "qk_nope_head_dim": "48",
    "qk_rope_head_dim": "16",
}


def config(*argv: str) -> Config:
    return parse(list(argv)).config


def values(c: Config) -> dict[str, Any]:
    return {name: getattr(getattr(c, group), name) for name, group in GROUP_OF.items()}


EXPERTS, LATENTS = ("--num-experts", "8"), ("--kv-lora-rank", "24", "--v-head-dim", "32")


@pytest.mark.parametrize("theirs", aliases.RENAMED)
def test_renamed_flag_acts_as_ours(theirs: str) -> None:
    name = aliases.RENAMED[theirs]
    start: tuple[str, ...] = (
        EXPERTS if name == "ep" or name.startswith("moe_") else LATENTS if name.startswith("qk_") else ()
    )
    start = (f"--{aliases.NEEDS[theirs]}",) if theirs in aliases.NEEDS else start
    start = ("--arch", "llama", *start)  # without a family, a size in their words has their defaults too
    ours = config(*start, "--" + name.replace("_", "-"), SAMPLE[name])
    assert config(*start, f"--{theirs}", SAMPLE[name]) == ours != config(*start)
    assert config(*start, f"--{theirs.replace('-', '_')}={SAMPLE[name]}") == ours


@pytest.mark.parametrize("theirs", aliases.SWITCHES)
def test_switch_sets_what_it_says(theirs: str) -> None:
    says = aliases.SWITCHES[theirs]
    argv: list[str] = []
    for name, value in says.items():
        flag = name.replace("_", "-")
        dashes = {True: [f"--{flag}"], False: [f"--no-{flag}"]}
        argv += dashes[value] if TYPES[name] is bool else [f"--{flag}", str(value)]
    # Some are about a checkpoint, some about experts.
    experts = (*EXPERTS, "--ep", "2", "--moe-shared-ffn-size", "32") if any("moe_" in name for name in says) else ()
    start = ("--resume", "runs/other", *experts)
    assert config(*start, f"--{theirs}") == config(*start, *argv)
    with pytest.raises(UserError, match="takes no value"):
        config(f"--{theirs}", "1")


@pytest.mark.parametrize(
    ("flag", "theirs", "option", "value"),
    [
        ("normalization", "LayerNorm", "norm", "layernorm"),
        ("position-embedding-type", "learned_absolute", "position", "learned"),
        ("lr-decay-style", "WSD", "lr_decay", "wsd"),
        ("lr-decay-style", "inverse-square-root", "lr_decay", "inverse-square-root"),
        ("optimizer", "adam", "optimizer", "adamw"),
        ("optimizer", "dist_muon", "optimizer", "muon"),
        ("distributed-backend", "gloo", "device", "cpu"),
        ("data-parallel-sharding-strategy", "no_shard", "zero", 0),
        ("data-parallel-sharding-strategy", "optim", "zero", 1),
        ("recompute-granularity", "selective", "recompute", "selective"),
    ],
)
def test_values_as_they_spell_them(flag: str, theirs: str, option: str, value: Any) -> None:
    scale = ("--muon-extra-scale-factor", "0.2") if theirs == "dist_muon" else ()
    assert values(config(f"--{flag}", theirs, *scale))[option] == value


@pytest.mark.parametrize(
    ("argv", "option", "value"),
    [
        ("--num-layers 16 --pp 2 --num-layers-per-virtual-pipeline-stage 2", "vp", 4),
        ("--num-layers-per-virtual-pipeline-stage 1 --pp 2 --vp 2", "vp", 2),
        ("--train-samples 800 --global-batch-size 8", "train_steps", 100),
        ("--train-samples 1600 --lr-warmup-fraction 0.1", "warmup_steps", 20),
        ("--train-iters 1000 --lr-decay-iters 500 --lr-warmup-fraction 0.01", "warmup_steps", 5),
        ("--lr-warmup-samples 16", "warmup_steps", 2),
        ("--train-samples 1953125000 --global-batch-size 128", "train_steps", 15258789),
        ("--group-query-attention", "num_kv_heads", 1),
        ("--group-query-attention --num-query-groups 2", "num_kv_heads", 2),
        ("--num-query-groups 2 --group-query-attention", "num_kv_heads", 2),
        ("--window-size (127,0) --window-attn-skip-freq 4", "window", 128),
        ("--window-size=-1,0", "window", None),
        ("--use-rope-scaling --rope-scaling-factor 32", "rope_scaling", RopeScaling(factor=32.0)),
        ("--rope-scaling-factor 32", "rope_scaling", None),
        ("--distributed-timeout-minutes 2", "watchdog_timeout", 120.0),
        ("--zero-stage optim_grads_params --num-distributed-optimizer-instances 2", "zero_group", "dp/2"),
        ("--lr-decay-samples 800", "lr_decay_steps", 100),
        ("--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3", "mtp_loss_scaling_factor", 0.3),
        ("--mtp-num-layers 0 --mtp-loss-scaling-factor 0.3", "mtp_num_layers", 0),
        ("--lr-wsd-decay-samples 80", "wsd_decay_steps", 10),
        (
            "--weight-decay 0.01 --weight-decay-incr-style cosine --start-weight-decay 0.02 --end-weight-decay 0.3",
            "weight_decay",
            0.3,
        ),
        ("--end-weight-decay 0.3 --weight-decay 0.01", "weight_decay", 0.3),
        ("--linear-attention-freq 4 --experimental-attention-variant gated_delta_net", "linear_attention_freq", 4),
        ("--save R --load R", "resume", "latest"),
        ("--tensorboard-dir logs/events", "tensorboard", True),
        ("--save R --load R/checkpoints/step_00000010", "resume", "R/checkpoints/step_00000010"),
        ("--preset gpt2-124m --disable-bias-linear", "o_bias", False),
        ("--preset gpt2-124m --disable-bias-linear", "qkv_bias", False),
        ("--preset gpt2-124m --disable-bias-linear --add-qkv-bias", "qkv_bias", True),
        ("--preset gpt2-124m --add-qkv-bias --disable-bias-linear", "qkv_bias", True),
        ("--preset gpt2-124m --add-qkv-bias --disable-bias-linear", "mlp_bias", False),
        ("--preset gpt2-124m --untie-embeddings-and-output-weights", "tie_embeddings", False),
    ],
)
def test_flags_that_need_others_to_be_understood(argv: str, option: str, value: Any) -> None:
    assert values(config(*shlex.split(argv)))[option] == value


def test_ramp_is_theirs() -> None:
    """Sizes, number of steps, and what rates count, against a loop over the rule of Megatron-LM's ramp."""
    batch, start, increment, ramp, samples = 48, 16, 8, 300, 2000
    argv = f"--rampup-batch-size {start} {increment} {ramp} --train-samples {samples} --lr-warmup-samples 480"
    c = config(*argv.split(), "--global-batch-size", str(batch), "--lr-decay-samples=1920")
    share, consumed, sizes = ramp / ((batch - start) // increment), 0, []
    while True:
        size = batch if consumed > ramp else start + int(consumed / share) * increment
        if consumed + size > samples:
            break
        sizes.append(size)
        consumed += size
    assert c.train.train_steps == len(sizes)
    assert [c.train.batches.size(step) for step in range(1, len(sizes) + 1)] == sizes
    assert len(set(sizes)) == 5
    # 480 samples are ten full batches of warmup; theirs is one step behind.
    assert (c.optim.lr_by, c.optim.warmup_steps, c.optim.lr_decay_steps) == ("samples", 10, 40)
    assert rates_at(c.optim, c.train, 3)[0] == pytest.approx(c.optim.lr * sum(sizes[:3]) / 480)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        # Twenty iterations of half the samples, as the peak comes in Megatron-LM too.
        ("--rampup-batch-size 8 8 160 --lr-warmup-iters 10", "warm-up of 160 samples: 20 steps"),
        ("--rampup-batch-size 8 8 160 --lr-warmup-samples 161", "warm-up of 160 samples: 20 steps"),
        ("--rampup-batch-size 8 8 160 --lr-batch-size 8 --lr-warmup-samples 325", "warm-up of 320 samples: 30 steps"),
        ("--rampup-batch-size 8 8 160 --lr-batch-size 8 --lr-warmup-fraction 0.2", "warm-up of 288 samples: 28 steps"),
        ("--rampup-batch-size 8 8 16 --lr-warmup-iters 99", "warm-up of 1584 samples: 100 steps"),
        ("--rampup-batch-size 8 8 160 --lr-warmup-iters 99", "warm-up of 1584 samples: the 100 steps of the run end"),
        ("--lr-warmup-iters 101", "warm-up of 101 steps: the 100 steps of the run end within it"),
        ("--lr-warmup-iters 10", ""),
    ],
)
def test_a_warmup_by_samples_says_how_many_steps_it_takes(argv: str, line: str) -> None:
    c = config("--global-batch-size", "16", "--train-iters", "100", *argv.split())
    described = describe_warmup(c.optim, c.train)
    assert described.startswith(line)
    assert bool(described) == bool(line)


def test_batch_size_schedule_in_tokens() -> None:
    c = config("--step-batch-size-schedule", "0:768 250B:1536 500B:3072", "--seq-length", "8192")
    first = -(-250 * 10**9 // 8192 // 768)
    assert c.train.batches.phases[:2] == ((0, 768), (first, 1536))
    assert c.train.global_batch_size == 3072
    # Ours counts steps, and so do the rates: samples are converted to steps.
    ours = config("--batch-size-schedule", "0:4 3:8", "--train-samples", "30", "--lr-warmup-samples", "20")
    assert (ours.train.train_steps, ours.optim.warmup_steps, ours.optim.lr_by) == (5, 4, "steps")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--rampup-batch-size a 8 300", "--rampup-batch-size a 8 300: must be a list of whole numbers"),
        ("--rampup-batch-size 16 7 300 --global-batch-size 48", "--global-batch-size 48 must be START plus"),
        ("--rampup-batch-size 1 1 300 --global-batch-size 1000000000000", "at most 10000 increments"),
        ("--step-batch-size-schedule 0:8,1x:16", "must be pairs START:SIZE in rising order"),
        ("--step-batch-size-schedule 0:0", "must have sizes of at least 1"),
        ("--step-batch-size-schedule 0:8 --global-batch-size 16", "--global-batch-size 16: must be the largest of"),
        ("--rampup-batch-size 16 8 300 --batch-size-schedule 0:4 --global-batch-size 48", "conflicts with it"),
        ("--rampup-batch-size 16 8 300 --lr-by steps --global-batch-size 48", "--lr-by steps conflicts with it"),
        ("--num-layers-per-virtual-pipeline-stage 0", "cannot be split into chunks of 0"),
        ("--num-layers-per-virtual-pipeline-stage x", "must be a whole number"),
        ("--pp 2 --vp 1 --num-layers-per-virtual-pipeline-stage 1", "--vp 1 conflicts with it"),
        ("--train-samples 801 --global-batch-size 0", "--global-batch-size 0: must be at least 1"),
        ("--window-size 127", "must be two whole numbers, LEFT,RIGHT"),
        ("--window-size 127,1", "attention is causal"),
        ("--lr-warmup-fraction 1.5", "must be between 0 and 1"),
        ("--num-distributed-optimizer-instances 0", "must be at least 1"),
        ("--experimental-attention-variant gated_delta_net", "gated_delta_net is the only variant here; give it with"),
        ("--linear-attention-freq 4 --experimental-attention-variant dsa", "gated_delta_net is the only variant here"),
        ("--multi-latent-attention --kv-lora-rank 512", "--multi-latent-attention: latents are always normalized here"),
        ("--optimizer dist_muon --tp 2", "--optimizer dist_muon: updates have 0.2 times the size"),
        (
            "--num-attention-heads 4 --qk-layernorm",
            "--qk-layernorm with --norm layernorm: queries and keys have RMSNorm",
        ),
        (
            "--seq-length 64 --num-experts 8 --moe-router-topk 6 --moe-router-num-groups 4 --moe-router-group-topk 3",
            "groups are chosen by their best 2 there, and by their best 1 here; give --moe-router-topk 3, or name",
        ),
        ("--kv-lora-rank 32 --mscale-all-dim 0.7", "--mscale-all-dim 0.7: is not an option here: YaRN is one option"),
        ("--lr-warmup-fraction nan", "must be between 0 and 1"),
        ("--load", "--load: takes one value"),
        ("--zero-stage 4", "--zero-stage 4: must be one of 0, 1, 2, 3"),
        ("--lr-decay-style steep", f"must be one of {', '.join(LR_DECAYS)}"),
        (
            "--train_batch_size 4",
            "--train-batch-size 4: is a name of the Hugging Face Trainer; give --micro-batch-size",
        ),
        ("--epochs 3", "give --train-steps, which is epochs x samples / --global-batch-size"),
        ("--nproc-per-node 8", "--nproc-per-node 8: is an option of torchrun; write it before pretrain_gpt.py"),
        ("--no-position-embedding --position learned", "--no-position-embedding: is not an option here"),
        ("--mscale-all-dim 1.0 --rope-scaling {factor: 8}", "--mscale-all-dim 1.0: is not an option here: YaRN"),
        ("--moe-token-drop-policy probs --moe-expert-capacity-factor 1.0", "--moe-expert-capacity-factor 1.0: is not"),
        ("--moe-router-pre-softmax 1", "--moe-router-pre-softmax 1: takes no value; write"),
        ("--optimizer sgd --beta1 0.5 --sgd-momentum 0.8", "--sgd-momentum 0.8: --beta1 0.5 conflicts with it"),
        (
            "--foo --lr 1 --bar",
            "--foo: is an unknown flag; see --help all\n  --bar: is an unknown flag; see",
        ),
    ],
)
def test_mistakes_are_reported_in_their_words(argv: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(shlex.split(argv))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("model: {num_attention_heads: 1}", "num_heads under model"),
        ("parallel: {overlap_moe_expert_parallel_comm: true}", "moe_overlap: true under parallel"),
        ("model: {use-distributed-optimizer: true}", "zero: 1 under parallel"),
    ],
)
def test_a_file_with_one_of_their_names_says_what_ours_is(tmp_path: Path, line: str, ours: str) -> None:
    (tmp_path / "c.yaml").write_text(line)
    with pytest.raises(UserError, match=f"is not an option of .*; write {ours}$"):
        parse(["--config", str(tmp_path / "c.yaml")])


def test_exchanges_of_experts_hidden_in_their_words() -> None:
    """The flags of a published MoE recipe: what is delayed there has no part in what is trained."""
    argv = "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    argv += " --overlap-moe-expert-parallel-comm --delay-wgrad-compute --ignore-megatron-flags"
    ours = "--num-experts 8 --moe-topk 2 --ep 2 --moe-overlap"
    assert config("--arch", "mixtral", *argv.split()) == config("--arch", "mixtral", *ours.split())


def test_flags_are_refused_by_name_or_ignored_where_they_have_no_effect() -> None:
    """Some of each sort; docs/megatron.md has them all."""
    for theirs in ("use-mcore-models", "num-workers", "no-rope-fusion", "log-throughput", "one-logger-project"):
        with pytest.raises(
            UserError, match=f"^--{theirs} 7: has no effect here: .*; drop it, or give --ignore-megatron"
        ):
            parse([f"--{theirs}", "7"])
        assert config(f"--{theirs}", "7", "--ignore-megatron-flags") == Config()
    for theirs in ("fp8-format", "use-torch-fsdp2", "rl-x", "retro-x", "no-load-lr-state"):
        with pytest.raises(UserError, match=f"^--{theirs} 7: is not an option here: .*; "):
            parse([f"--{theirs}", "7", "--ignore-megatron-flags"])


@pytest.mark.parametrize(
    "argv",
    [
        *(
            "--context-parallel-size 1",
            "--expert-model-parallel-size 1",
            "--attention-backend auto",
            "--rope-type rope",
            "--mscale 1.0",
            "--moe-token-drop-policy probs",
            "--moe-layer-freq 1",
            "--local-rank -1",
            "--moe-router-dtype fp32",
        ),
        *("--softmax-type vanilla", "--vocab-extra-ids 0", "--dataloader-type single", "--mtp-num-layers 0"),
        *("--lr-wsd-decay-style linear", "--num-distributed-optimizer-instances 1"),
        *(f"--{name}-dtype fp32" for name in ("exp-avg", "exp-avg-sq", "main-params", "main-grads")),
    ],
)
def test_a_value_that_asks_for_nothing_is_accepted(argv: str) -> None:
    assert config(*argv.split()) == Config()
    assert config(*argv.replace(" ", "=").split()) == Config()


@pytest.mark.parametrize(
    ("argv", "neutral"),
    [
        ("--position-embedding-type rope", "--no-position-embedding"),
        ("--use-rotary-position-embeddings", "--no-position-embedding"),
        ("--rotary-scaling-factor 1.0", "--mscale 0.7 --mscale-all-dim 1.0"),
        ("--resume runs/other", "--no-load-rng"),
    ],
)
def test_a_flag_that_asks_for_nothing_beside_another_is_accepted(argv: str, neutral: str) -> None:
    assert config(*argv.split(), *neutral.split()) == config(*neutral.split(), *argv.split()) == config(*argv.split())


def test_the_local_rank_that_a_launcher_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed.launch and deepspeed write it before the words of the script, where nobody can drop it."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert config("--local-rank=3", "--tp", "2") == config("--local_rank=3", "--tp", "2") == config("--tp", "2")
    for flags in (["--local_rank=1"], ["--local_rank=1", "--ignore-megatron-flags"]):
        with pytest.raises(UserError, match="--local-rank 1: .* LOCAL_RANK, which differs"):
            config(*flags)


SIGMOID = "--num-experts 8 --moe-router-score-function sigmoid --moe-router-pre-softmax"


@pytest.mark.parametrize(
    ("argv", "same", "line"),
    [
        ("--num-query-groups 2", "", "--num-query-groups 2: has no effect without --group-query-attention"),
        ("--rope-scaling-factor 32", "", "--rope-scaling-factor 32: has no effect without --use-rope-scaling"),
        ("--sgd-momentum 0.5", "", "--sgd-momentum 0.5: has no effect with --optimizer adamw"),
        ("--optimizer sgd --adam-beta1 0.5", "--optimizer sgd", "--adam-beta1 0.5: has no effect with --optimizer sgd"),
        (SIGMOID, SIGMOID[:-25], "--moe-router-pre-softmax: has no effect on sigmoid scores"),
        # Where they have an effect, there is nothing to say.
        ("--arch llama --num-key-value-heads 2", "--num-kv-heads 2", ""),
        ("--optimizer sgd --adam-beta1 0.5 --sgd-momentum 0.8", "--optimizer sgd --beta1 0.8", "--adam-beta1 0.5: has"),
        ("--sgd-momentum 0.8 --optimizer sgd", "--optimizer sgd --beta1 0.8", ""),
        (f"{SIGMOID} --moe-topk 1", f"{SIGMOID[:-25]} --moe-topk 1 --no-moe-renormalize", ""),
    ],
)
def test_a_flag_without_the_one_that_it_needs(
    argv: str, same: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Megatron-LM ignores it, so that the model was another one here."""
    with caplog.at_level("INFO"):
        assert config(*argv.split()) == config(*same.split())
    told = [message for message in caplog.messages if "has no effect" in message]
    assert len(told) == bool(line)
    assert all(message.startswith(line) and message.endswith("as in Megatron-LM") for message in told)


def test_scores_of_sigmoids_are_those_of_megatron() -> None:
    """The weights of the chosen experts, with --moe-router-pre-softmax and without, against megatron-core's router."""
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    for function, topk, before in itertools.product(("softmax", "sigmoid"), (1, 2, 4), (False, True)):
        words = f"--num-experts 8 --moe-router-score-function {function} --moe-router-topk {topk}"
        weights, _ = utils.topk_routing_with_score_function(
            logits, topk, use_pre_softmax=before, score_function=function
        )
        argv = [*words.split(), *(["--moe-router-pre-softmax"] if before else [])]
        if topk == 1 and not before:
            with pytest.raises(UserError, match="renormalized"):  # told, with what to give
                config(*argv)
            continue
        ours = logits.softmax(-1) if function == "softmax" else logits.sigmoid()
        ours = ours * (weights != 0)
        if config(*argv).model.moe_renormalize:
            ours = ours / ours.sum(-1, keepdim=True)
        torch.testing.assert_close(weights, ours)


def test_ignored_flags_are_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        config(*shlex.split("--ignore-megatron-flags --use-mcore-models --log-throughput --tp 1 --num-workers 2"))
    (line,) = caplog.messages
    assert line.split(": ")[1] == "--use-mcore-models, --log-throughput, --num-workers"


@pytest.mark.parametrize("typo", ["log-evry", "wandb-projct", "recompute-granularty", "no-save-every", "zero-stag"])
def test_a_typo_of_an_option_is_not_taken_for_a_flag_that_is_refused(typo: str) -> None:
    with pytest.raises(UserError, match=f"--{typo} 1: is an unknown flag; did you mean --"):
        parse([f"--{typo}", "1"])


def test_all_refusals_of_a_script_are_reported_at_once() -> None:
    """Those that matter have a line each; a bare --profile, and a value that is missing, hide nothing."""
    script = "--tp 2 --use-mcore-models --profile --bf16 --fo 3 --eod-mask-loss --lr --num-workers 2 --epochs 3"
    with pytest.raises(UserError) as caught:
        parse(shlex.split(script))
    head, *lines, last = str(caught.value).splitlines()
    assert head.startswith("4 flags: ")
    assert "; 2 more have no effect here" in head
    starts = (
        "  --profile: takes",
        "  --fo 3: is an unknown flag; ",
        "  --eod-mask-loss: is not",
        "  --epochs 3: is a name of",
    )
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts))
    assert last == "  no effect: --use-mcore-models, --num-workers"


def test_tables_do_not_contradict_each_other() -> None:
    named = all_patterns([*refusals.MEGATRON, *refusals.TRAINER])
    theirs = [*aliases.RENAMED, *aliases.SWITCHES, *aliases.COMPUTED, *named]
    theirs += [*trainer.RENAMED, *trainer.SWITCHES, *trainer.COMPUTED]
    assert [flag for flag in set(theirs) if theirs.count(flag) > 1] == []
    ours = {name.replace("_", "-") for name in GROUP_OF}
    assert not ours & set(theirs)
    assert "*" not in named
    assert set(aliases.RENAMED.values()) <= set(GROUP_OF)


TODAY = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "tie_embeddings": False, "hidden_dropout": 0.0}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        # A size in their words, and nothing of a family: their defaults.
        (
            "--num-attention-heads 4",
            megatron_defaults.TRAINED
            | {"arch": "gpt2", "ffn_hidden_size": 1024, "num_kv_heads": 4, "zero": 1, "global_batch_size": 1},
        ),
        (
            "--seq-length 128 --hidden-dropout 0 --adam-beta2 0.95",
            {"position": "learned", "hidden_dropout": 0, "beta2": 0.95},
        ),
        # --swiglu has a width that is rounded down: 8/3 * 256 = 682.7.
        (
            "--kv-channels 64 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear",
            {"arch": "llama", "ffn_hidden_size": 640, "mlp_bias": False, "tie_embeddings": True, "rope_fraction": 1.0},
        ),
        ("--seq-length 128 --swiglu --ffn-hidden-size 100", {"ffn_hidden_size": 100}),
        ("--seq-length 128 --position-embedding-type rope", {"arch": "gpt_neox", "parallel_residual": False}),
        ("--num-attention-heads 4 --optimizer lion", {"beta2": 0.95}),
        (
            "--num-attention-heads 4 --optimizer muon --micro-batch-size 2",
            {"muon_momentum": 0.9, "global_batch_size": 2},
        ),
        (
            "--seq-length 64 --rampup-batch-size 2 2 8 --global-batch-size 4",
            {"global_batch_size": 4, "lr_by": "samples"},
        ),
        ("--seq-length 64 --valid-data P --data Q", {"split": "99,1,0", "position": "learned"}),
        (
            "--seq-length 64 --normalization RMSNorm --swiglu --use-rotary-position-embeddings --disable-bias-linear "
            "--qk-layernorm",
            {"arch": "qwen3", "qk_norm": "head"},
        ),
        ("--num-attention-heads 4 --no-bias-gelu-fusion", {"activation": "gelu"}),
        ("--num-attention-heads 4 --disable-bias-linear", {"activation": "gelu", "mlp_bias": False}),
        (
            "--seq-length 128 --multi-latent-attention --qk-layernorm --position-embedding-type rope",
            {"kv_lora_rank": 32, "qk_norm": "none", "qk_nope_head_dim": 128},
        ),
        ("--num-attention-heads 4 --no-bias-gelu-fusion --openai-gelu", {"activation": "gelu_tanh"}),
        ("--num-attention-heads 4 --no-bias-gelu-fusion --swiglu", {"activation": "swiglu"}),
        # Our words alone, or a family: ours.
        ("--num-heads 4 --seq-len 128", TODAY),
        ("--no-bias-gelu-fusion", TODAY),
        ("--arch llama --num-attention-heads 4 --seq-length 128", TODAY),
        ("--preset llama-3.2-1b --seq-length 128", TODAY | {"tie_embeddings": True}),
    ],
)
def test_what_a_command_in_their_words_leaves_out(
    argv: str, expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        c = config(*argv.split())
    assert {name: values(c)[name] for name in expected} == expected
    told = [line for line in caplog.messages if "as in Megatron-LM, --" in line]
    assert len(told) == (expected.get("hidden_dropout") != 0.0 or "--hidden-dropout" in argv)
    assert all("--eval-every 0 (there 1000)" in line and "--no-tie" not in line for line in told)


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        # As Megatron-LM's examples/gpt3 has them; counts are those of Narayanan et al. 2021, equation 2, with biases of
        # norms: V h + S h + 12 L h^2 + 13 L h + 2 h.
        ("--num-layers 24 --hidden-size 1024 --num-attention-heads 16", 24 * (12 * 1024**2 + 13 * 1024) + 53250 * 1024),
        (
            "--num-layers 96 --hidden-size 12288 --num-attention-heads 96",
            96 * (12 * 12288**2 + 13 * 12288) + 53250 * 12288,
        ),
    ],
)
def test_the_scripts_of_gpt_count_as_there(sizes: str, parameters: int) -> None:
    words = f"{sizes} --seq-length 2048 --max-position-embeddings 2048 --attention-backend auto --vocab-size 51200"
    model = config(*words.split(), "--micro-batch-size", "1", "--tensor-model-parallel-size", "8").model
    assert (model.arch, model.position, model.norm, model.activation) == ("gpt2", "learned", "layernorm", "gelu_tanh")
    assert (model.tie_embeddings, model.qkv_bias, model.hidden_dropout) == (True, True, 0.1)
    assert count_parameters(param_map(model)) == parameters
    if model.num_layers == 96:
        assert parameters / 1e9 == pytest.approx(174.6, abs=0.05)


def test_no_iterations_of_evaluation_are_none() -> None:
    run = config("--eval-iters", "0", "--eval-interval", "5").run
    assert (run.eval_steps, run.eval_every, run.evaluates) == (0, 5, False)


def test_the_model_of_a_command_in_their_words_is_read_back(tmp_path: Path) -> None:
    c = config("--num-attention-heads", "4", "--seq-length", "64")
    (tmp_path / "config.yaml").write_text(cli.to_yaml(c))
    assert parse(["--config", str(tmp_path / "config.yaml")]).config == c
    # A file that names a family has its defaults, whatever the flags are called.
    assert parse(["--config", str(tmp_path / "config.yaml"), "--seq-length", "32"]).config.model.tie_embeddings


@pytest.mark.parametrize(
    ("pattern", "dense"),
    [
        ("2", (1, 3, 5)),
        ("1", ()),
        ("7", (1, 2, 3, 4, 5)),
        ("[0]*2+[1]*4", (0, 1)),
        ("([0]*1+[1]*5)", (0,)),
        ("3*[0,1]", (0, 2, 4)),
        ("[1, 0, 1, 1, 0, 0]", (1, 4, 5)),
        *(
            (wrong, None)
            for wrong in ("0", "[0,1]", "[2]*6", "[0]*10**9", "x", "[0]*6.0", "[]", "__import__('os')", "[[0]]*6")
        ),
    ],
)
def test_which_layers_have_experts(pattern: str, dense: tuple[int, ...] | None) -> None:
    command = ["--arch", "mixtral", "--num-experts", "4", "--num-layers", "6", "--moe-layer-freq", pattern]
    if dense is None:
        with pytest.raises(UserError, match="must be a number, or a list of 6 zeros and ones"):
            parse(command)
    else:
        assert parse(command).config.model.moe_dense_layers == dense


def test_stages_and_smoothing_by_their_other_names() -> None:
    ours, others = (config("--stage", stage) for stage in ("lm", "sft"))
    assert ours == others == config("--stage", "pretrain")
    assert config("--stage", "dpo", "--dpo-label-smoothing", "0.1").train.dpo_smoothing == 0.1
    assert config("--stage", "reward", "--center-rewards-coefficient", "0.01").train.reward_center == 0.01


def test_recomputed_layers_in_their_words() -> None:
    full = ["--num-layers", "8", "--pp", "2", "--recompute-granularity", "full", "--recompute-method"]
    for method, layers, here in (("block", "1", "full:1/4"), ("block", "4", "full"), ("uniform", "2", "full")):
        assert config(*full, method, "--recompute-num-layers", layers).train.recompute == here
    extent = MODES["full:1/4"].extent
    assert [sum(extent(i) == Extent.BLOCK for i in stage) for stage in (range(4), range(4, 8))] == [1, 1]
    selective = config("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
    assert selective.train.recompute == "selective"
    with pytest.raises(UserError, match="--recompute-num-layers 1: requires --recompute-granularity full"):
        config("--recompute", "selective", "--recompute-method", "block", "--recompute-num-layers", "1")
    assert config("--recompute-method", "block", "--recompute-num-layers", "1").train.recompute == "none"
    assert config("--recompute-activations", "--recompute-num-layers", "1").train.recompute == "selective"


def test_experts_in_their_words() -> None:
    theirs = "--arch llama --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    theirs += " --tensor-model-parallel-size 2 --num-experts 8"
    theirs += " --moe-router-topk 3 --moe-ffn-hidden-size 32 --moe-router-pre-softmax --moe-aux-loss-coeff 0.01"
    theirs += " --moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate"
    ours = "--ep 4 --etp 1 --tp 2 --num-experts 8 --moe-topk 3 --moe-ffn-size 32 --no-moe-renormalize"
    ours += " --moe-aux-loss-coeff 0.01 --moe-shared-ffn-size 64 --moe-shared-gate"
    assert config(*theirs.split()) == config(*ours.split())
    assert config("--num-experts", "8", "--tp", "2", "--expert-tensor-parallel-size", "2").parallel.etp == "tp"
    with pytest.raises(UserError, match="--expert-tensor-parallel-size 2: experts are whole or cut over all of --tp 4"):
        config("--num-experts", "8", "--tp", "4", "--expert-tensor-parallel-size", "2")


def test_blooms_script() -> None:
    """Of Megatron-DeepSpeed."""
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    for alibi in ("--position-embedding-type alibi", "--use-alibi-position-embeddings"):
        model = config(*f"{sizes} {alibi} --embed-layernorm".split()).model
        assert (model.position, model.embedding_norm) == ("alibi", True)
    with pytest.raises(UserError, match="--embed-layernorm with --position learned: positions are added after"):
        config(*f"{sizes} --max-position-embeddings 32 --embed-layernorm".split())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--num-attention-heads 7 --hidden-size 64", "--hidden-size 64: must be divisible by --num-attention-heads 7;"),
        ("--num-heads 7 --hidden-size 64", "--hidden-size 64: must be divisible by --num-heads 7;"),
        ("--save-interval -3", "--save-interval -3: must be at least 0"),
        ("--lr-warmup-init -1", "--lr-warmup-init -1.0: must be at least 0"),
        ("--seq-length 8 --profile x:--seq-len/y", "--profile x:--seq-len/y: must be A:B"),
    ],
)
def test_errors_are_in_the_words_that_were_given(line: str, told: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(line.split())
    assert str(raised.value).startswith(told)


# ------------------------------------------------------------------------------------------------ docs/megatron.md


def flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def ours(switch: dict[str, Any]) -> str:
    """`--x value`, `--x` or `--no-x` for each option."""
    shown = []
    for name, value in switch.items():
        on = "" if value is True else "no-"
        dashed = name.replace("_", "-")
        shown.append(f"`--{on}{dashed}`" if TYPES[name] is bool else f"`--{dashed} {value}`")
    return " ".join(shown) or "nothing: random numbers follow from the seed, and are in no checkpoint"


def renamed_table() -> list[str]:
    rows = ["| Megatron-LM, Megatron-DeepSpeed | here |", "|---|---|"]
    for theirs, name in aliases.RENAMED.items():
        spelled = ", ".join(f"`{a}` = `{b}`" for a, b in aliases.VALUES.get(name, {}).items())
        needs = f" with `--{aliases.NEEDS[theirs]}`, else nothing" if theirs in aliases.NEEDS else ""
        rows.append(f"| `--{theirs}` | {flag(name)}{f' ({spelled})' if spelled else ''}{needs} |")
    rows += [f"| `--{theirs}` | {ours(switch)} |" for theirs, switch in aliases.SWITCHES.items()]
    return rows


def defaults_table() -> list[str]:
    rows = ["| option | theirs | here | in a command in their words |", "|---|---|---|---|"]
    for table, whose in ((megatron_defaults.TRAINED, "theirs"), (megatron_defaults.KEPT, "ours")):
        for name, theirs in table.items():
            default = next(f.default for f in dataclasses.fields(getattr(Config(), GROUP_OF[name])) if f.name == name)
            assert default != theirs
            shown = [("on" if x else "off") if TYPES[name] is bool else str(x) for x in (theirs, default)]
            rows.append(f"| {flag(name)} | {' | '.join(shown)} | {whose} |")
    return rows


def trainer_table() -> list[str]:
    rows = ["| Hugging Face Trainer | here |", "|---|---|"]
    for theirs, name in trainer.RENAMED.items():
        spelled = ", ".join(f"`{a}` = `{b}`" for a, b in trainer.VALUES.get(name, {}).items())
        rows.append(f"| `--{theirs}` | {flag(name)}{f' ({spelled})' if spelled else ''} |")
    for theirs, switch in trainer.SWITCHES.items():
        rows.append(f"| `--{theirs}` | {ours(switch) if switch else 'nothing: training is all it does'} |")
    return rows


def refused_table() -> list[str]:
    rows = ["| refused | because | instead |", "|---|---|---|"]
    for entry in refusals.MEGATRON:
        if entry.instead:
            why = entry.why.removeprefix("is not an option here: ")
            rows.append(f"| {flags_of(entry)} | {why} | {entry.instead} |")
    return rows


def no_effect_table() -> list[str]:
    rows = ["| no effect | because |", "|---|---|"]
    for entry in refusals.MEGATRON:
        if not entry.instead:
            rows.append(f"| {flags_of(entry)} | {entry.why.removeprefix('has no effect here: ')} |")
    return rows


def others_table() -> list[str]:
    rows = ["| Hugging Face Trainer, torchrun | here |", "|---|---|"]
    return rows + [f"| {flags_of(entry)} | {entry.instead} |" for entry in refusals.TRAINER]


def flags_of(entry: Refusal) -> str:
    return " ".join(f"`--{flag}`{f' (except {off[0]})' if off else ''}" for flag, off in entry.patterns.items())


def with_tables(text: str) -> str:
    """The document with the tables between its `<!-- NAME -->` and `<!-- end -->` marks made anew."""
    tables = {"renamed": renamed_table, "defaults": defaults_table, "refused": refused_table}
    for name, table in (
        tables | {"no effect": no_effect_table, "trainer": trainer_table, "others": others_table}
    ).items():
        before, rest = text.split(f"<!-- {name} -->\n")
        _, after = rest.split("<!-- end -->", 1)
        text = "\n".join([f"{before}<!-- {name} -->", *table(), f"<!-- end -->{after}"])
    return text


def test_the_two_commands_of_the_document_are_the_same_run() -> None:
    blocks = [
        block.split("```")[0].replace("\\\n", " ") for block in DOCS.read_text(encoding="utf-8").split("```bash\n")[1:]
    ]
    theirs, ours = [shlex.split(block.split("pretrain_gpt.py ")[1]) for block in blocks[:2]]
    assert "--tp" in ours
    assert "--tp" not in theirs
    assert config(*theirs) == config(*ours)


def test_the_document_lists_every_flag() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text == with_tables(text), f"run: python {Path(__file__).name} --write"
    for computed in aliases.COMPUTED:
        assert f"`--{computed}" in text


if __name__ == "__main__" and "--write" in sys.argv:
    DOCS.write_text(with_tables(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
