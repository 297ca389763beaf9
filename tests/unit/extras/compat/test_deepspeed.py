"""DeepSpeed's JSON and Accelerate's YAML as options: what is mapped, ignored and refused."""

from __future__ import annotations

import json
import logging
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import pretrain_gpt
from megalite.core.base.errors import UserError
from megalite.core.options.lr import learning_rate
from megalite.extras.compat.dialect import DIALECT
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config

parse = partial(cli.parse, dialect=DIALECT)
FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 500,
    "initial_scale_power": 12,
    "hysteresis": 3,
    "min_loss_scale": 2,
}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
COMMON = {
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "steps_per_print": 20,
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "wall_clock_breakdown": False,
}
STAGE2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
STAGE3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": 2e5,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ZERO_1 = {"bucket_size": 500_000_000, "overlap_grad_reduce": False, "overlap_param_gather": False}
"""What stage 1 and nothing else asks for."""
PINNED = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/scratch", "pin_memory": True, "buffer_count": 4, "fast_init": False}
NVME_PARAM = {"device": "nvme", "nvme_path": "/scratch", "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}
AIO = {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True}
USUAL: dict[str, dict[str, Any]] = {
    "zero1": {**COMMON, "fp16": FP16, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}},
    "zero2": {**COMMON, "optimizer": ADAMW, "scheduler": WARMUP, "zero_optimization": STAGE2},
    "zero3": {**COMMON, "optimizer": ADAMW, "scheduler": WARMUP, "zero_optimization": STAGE3},
    "cpu": {**COMMON, "zero_optimization": {**STAGE3, "offload_optimizer": PINNED, "offload_param": PINNED}},
    "nvme": {
        **COMMON,
        "aio": AIO,
        "zero_optimization": {**STAGE3, "offload_optimizer": NVME, "offload_param": NVME_PARAM},
    },
}
"""As the documentation of DeepSpeed and transformers, and their examples, write them."""


@pytest.fixture
def ds(tmp_path: Path):
    """ds(tree, flags...) -> the configuration of a run with this DeepSpeed file, on `world` ranks."""

    def read(tree: Any, *flags: str, world: int = 4) -> Config:
        path = tmp_path / "ds.json"
        path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
        return parse(["--deepspeed-config", str(path), *flags], world=world).config

    return read


def options(config: Config) -> dict[str, Any]:
    """What differs from a run without a file."""
    return {
        name: value
        for group, default in vars(Config()).items()
        for name, value in vars(getattr(config, group)).items()
        if value != getattr(default, name)
    }


def test_the_five_usual_files(ds: Any, caplog: pytest.LogCaptureFixture) -> None:
    common = {"global_batch_size": 32, "clip_grad": 0.5, "log_every": 20}
    scaler = {"loss_scale_window": 500, "initial_loss_scale": 4096.0, "hysteresis": 3, "min_loss_scale": 2.0}
    no_overlap = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    whole = {"zero": 3, "zero_whole_below": 200_000, "precision": "bf16", "save_model_every": 100}
    # "auto" leaves the rate and the lengths to the flags; the warm-up is DeepSpeed's all the same.
    trained = {"beta2": 0.999, "weight_decay": 0.0, "lr_decay": "constant", "warmup_shape": "deepspeed-log"}
    expected = {
        "zero1": common | scaler | no_overlap | {"bucket_size": 500_000_000},
        "zero2": common | trained | {"zero": 2, "precision": "bf16", "bucket_size": 200_000_000, "warmup_steps": 2},
        "zero3": common | trained | whole | {"warmup_steps": 2},
        "cpu": common | whole | {"offload": "optimizer+params"},
        "nvme": common | whole | {"offload": "optimizer+params", "offload_dir": "/scratch"},
    }
    for name, tree in USUAL.items():
        caplog.clear()
        assert options(ds(tree)) == expected[name], name
        ignored = [message for message in caplog.messages if "ignored, without effect here: " in message]
        assert len(ignored) == 1
        assert "wall_clock_breakdown" in ignored[0]
        assert "auto" not in ignored[0]


def test_what_a_complete_file_trains(ds: Any) -> None:
    tree = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "Adam", "params": {"lr": 1, "betas": [0.8, 0.9], "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 5, "total_num_steps": 10},
        },
        "fp16": {"enabled": True, "loss_scale": 128, "consecutive_hysteresis": True},
        "communication_data_type": "bfp16",
        "zero_optimization": {"stage": 3, "mics_shard_size": 2},
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
        "tensor_parallel": {"autotp_size": 2},
        "pipeline": {"stages": 2},
        "tensorboard": {"enabled": True, "output_path": "x"},
        "wandb": {"enabled": True, "project": "p", "team": "t"},
    }
    config = ds(tree, world=16)
    got = options(config)
    layout = {"tp": 2, "pp": 2, "zero": 3, "zero_group": "2", "recompute": "full", "offload": "activations"}
    assert {name: got[name] for name in layout} == layout
    # 2 x 3 passes x dp 4.
    assert (got["micro_batch_size"], got["global_batch_size"], got["precision"]) == (2, 24, "fp16")
    assert (got["loss_scale"], got["consecutive_hysteresis"], got["grad_reduce_dtype"]) == (128.0, True, "bf16")
    assert (got["beta1"], got["beta2"], got["weight_decay"]) == (0.8, 0.9, 0.01)
    assert (got["tensorboard"], got["wandb_project"]) == (True, "p")
    rates = [learning_rate(n, config.optim, 99) for n in range(1, 13)]
    log = [0, 0, 0.04306766, 0.06826062, 0.08613531, 0.1]
    assert rates == pytest.approx([*log, 0.1, 0.08, 0.06, 0.04, 0.02, 0], abs=5e-9)


def test_cosine_ratios_are_of_the_rate_that_is_used(ds: Any) -> None:
    tree = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_min_ratio": 0.1}},
    }
    for flags, lr in (((), 1e-3), (("--lr", "2e-3"), 2e-3)):
        optim = ds(tree, "--train-steps", "60", "--warmup-steps", "9", *flags).optim
        assert (optim.lr, optim.init_lr, optim.min_lr) == pytest.approx((lr, 0.1 * lr, 1e-4 * lr))
        assert (optim.lr_decay, optim.lr_decay_steps, optim.warmup_steps) == ("cosine", 50, 9)


def test_a_warm_up_without_its_end_rises_to_the_rate_of_the_optimizer(
    ds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As in DeepSpeed 0.19; before a decay, it rises to 0.001."""
    tree = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "scheduler": {"type": "WarmupLR", "params": {}}}
    assert ds(tree).optim.lr == 1e-5
    assert any("rises to the optimizer's lr" in message for message in caplog.messages)
    params = {"total_num_steps": 50, "warmup_num_steps": 5}
    assert ds(tree | {"scheduler": {"type": "WarmupDecayLR", "params": params}}).optim.lr == 1e-3
    ratio = {**params, "warmup_min_ratio": 0.1}
    ds(tree | {"scheduler": {"type": "WarmupCosineLR", "params": ratio}})
    assert any("the first step has the rate of warmup_min_ratio" in message for message in caplog.messages)


def test_three_batch_sizes_must_multiply_up(ds: Any) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

    def batch(*sizes: int | None, flags: tuple[str, ...] = (), world: int = 4) -> tuple[int, int]:
        train = ds({key: size for key, size in zip(keys, sizes) if size}, *flags, world=world).train
        return train.global_batch_size, train.micro_batch_size

    assert batch(32, 4, None) == (32, 4)
    assert batch(32, None, 2) == (32, 4)
    assert batch(None, 4, 2) == (32, 4)
    assert batch(32, 4, 2) == (32, 4)
    assert batch(None, None, 2) == (8, 1)
    # What the file leaves out: one pass, as there, and not ours.
    assert batch(None, 4, None) == (16, 4)
    assert batch(32, None, None) == (32, 8)
    assert batch(None, 4, None, flags=("--global-batch-size", "64")) == (64, 4)
    assert batch(32, None, None, flags=("--micro-batch-size", "2")) == (32, 2)
    # dp, not the number of ranks.
    assert batch(32, 4, 4, flags=("--cp", "2")) == (32, 4)
    assert batch(None, 4, 2, flags=("--cp", "2", "--tp", "2", "--pp", "2"), world=16) == (16, 4)
    assert batch(32, 4, 4, flags=("--tp", "2")) == (32, 4)
    assert batch(32, 4, 8, flags=("--global-batch-size", "64")) == (64, 4)
    assert batch(32, 4, 2, flags=("--micro-batch-size", "2")) == (32, 2)
    with pytest.raises(
        UserError, match=r"train_batch_size 32: must be 4 x 8 accumulation steps x dp 4 = 128; drop one"
    ):
        batch(32, 4, 8)
    with pytest.raises(
        UserError, match=r"train_batch_size 30: must be a multiple of 1 x 2 accumulation steps x dp 4 = 8"
    ):
        batch(30, None, 2)


@pytest.mark.parametrize("name", ["fp16", "float16", "half"])
def test_gradients_that_a_file_sends_in_fp16_are_reduced_in_fp32(
    ds: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {"communication_data_type": name, "fp16": {"enabled": True}}
    assert ds(tree).train.grad_reduce_dtype == "fp32"
    (line,) = [message for message in caplog.messages if "communication_data_type" in message]
    assert f"communication_data_type {name}: gradients are reduced in fp32; --grad-reduce-dtype bf16" in line
    assert ds(tree, "--grad-reduce-dtype", "bf16").train.grad_reduce_dtype == "bf16"


def test_a_default_of_deepspeed_gives_way_to_what_accelerate_says(accelerate: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2}')
    block = {"deepspeed_config_file": str(tmp_path / "ds.json")}
    tree = {"distributed_type": "DEEPSPEED", "deepspeed_config": block}
    assert accelerate(tree).train.global_batch_size == 8
    assert accelerate({**tree, "gradient_accumulation_steps": 3}).train.global_batch_size == 24


def test_flags_win_and_the_log_says_so(ds: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = ds({"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}, "--zero", "1", "--clip-grad", "0.5")
    assert (config.parallel.zero, config.optim.clip_grad) == (1, 0.5)
    (line,) = [message for message in caplog.messages if "overrides" in message]
    assert line.startswith("--zero 1 overrides ")
    assert line.endswith("ds.json: zero_optimization.stage 2")


def test_what_auto_leaves_open_is_logged_with_the_value_that_is_used(ds: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The Trainer fills these in from its own arguments, which are not in the file: fp32 was used without a word."""
    tree = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "optimizer": ADAMW,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "offload_optimizer": PINNED, "reduce_bucket_size": "auto"},
    }
    assert ds(tree, "--lr", "1e-5").train.precision == "fp32"
    (line,) = [message for message in caplog.messages if '"auto"' in message]
    for used in ("--precision fp32 (bf16.enabled)", "--clip-grad 1.0 (gradient_clipping)", "--global-batch-size 8 ("):
        assert used in line
    assert "--lr " not in line
    caplog.clear()
    ds({**tree, "train_batch_size": 32}, "--precision", "bf16", "--clip-grad", "1")
    (line,) = [message for message in caplog.messages if '"auto"' in message]
    assert "--lr 0.0003 (optimizer.params.lr)" in line
    assert not re.search("precision|clip|batch", line)


def test_monitoring_and_disabled_recomputation_of_files_that_are_pasted(
    ds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    disabled = {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    }
    monitors = {"tensorboard": {"enabled": False}, "csv_monitor": {"enabled": False}}
    tree = {
        **COMMON,
        "comms_config": {"comms_logger_enabled": False},
        "monitor_config": monitors,
        "zero_optimization": {**STAGE2, "aio": AIO},
        "activation_checkpointing": disabled,
    }
    assert ds(tree).train.recompute == "none"
    assert any("activation_checkpointing switches nothing on" in message for message in caplog.messages)
    (ignored,) = [message for message in caplog.messages if "ignored, without effect here: " in message]
    assert "zero_optimization.aio.queue_depth" in ignored
    assert "monitor_config.tensorboard.enabled" in ignored
    for switch in ({"partition_activations": True}, {"number_checkpoints": 4}):
        assert ds({**tree, "activation_checkpointing": {**disabled, **switch}}).train.recompute == "full"
    with pytest.raises(UserError, match="scratch files are read through the host"):
        ds({"zero_optimization": {"stage": 3, "aio": {"use_gds": True}}})


def test_zero_2_with_pipelines_is_accepted_with_its_cost(ds: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = ds({"zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}})
    assert (config.parallel.zero, config.parallel.pp) == (2, 2)
    assert any("reduces gradients after every micro-batch" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"zero_optimization": {"stge": 2}}, "unknown key; did you mean zero_optimization.stage?"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_decy": 0}}}, "did you mean optimizer.params.weight_decay?"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "adam_w_mode false: .*there is no L2; use true",
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}},
            'scheduler.type "OneCycle": must be WarmupLR',
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled true: fp16.enabled is true as well"),
        ({"gradient_allreduce_op": "sum"}, "gradients are those of the mean"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "write offload_optimizer with device cpu"),
        ({"zero_optimization": {"stage": 2, "offload_param": PINNED}}, 'offload_param.device "cpu": requires stage 3'),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "requires nvme_path"),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, "applies to stage 3"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "give --compress int8"),
        ({"train_batch_size": 0}, "train_batch_size 0: must be a whole number of at least 1"),
        ('{"gradient_clipping": 1, "gradient_clipping": 2}', "is not valid JSON: gradient_clipping is given twice"),
        ('# hjson\n{"steps_per_print": 3', "is not valid JSON"),
        ({"steps_per_print": float("nan")}, "steps_per_print NaN: must be a whole number"),
        ("[]", "must hold a JSON object"),
        (
            {"amp": {"enabled": True}, "oops": 1},
            r"2 keys of .*ds.json: must be changed, as listed below\n.*amp.*\n.*oops 1: ",
        ),
    ],
)
def test_what_has_no_meaning_here_is_refused(ds: Any, tree: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ds(tree)


def test_a_file_in_hjson(ds: Any) -> None:
    text = """\ufeff// from a page
    {
      "zero_optimization": {"stage": 2,}, /* as
      there */ "wandb": {"enabled": true, "project": "a // b, # c /* \\" ,}",},  # ours
      "optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.9, ],}},
    }
    # the end"""
    got = options(ds(text))
    assert (got["zero"], got["wandb_project"], got["beta1"], got["beta2"]) == (2, 'a // b, # c /* " ,}', 0.8, 0.9)


@pytest.mark.parametrize("text", ['{"' + '\\"' * 10**6 + "\\", "{" + "/*" * 10**6, '{"a": ' + "," * 10**6])
def test_a_broken_file_is_refused_at_once(ds: Any, text: str) -> None:
    with pytest.raises(UserError, match="is not valid JSON"):
        ds(text)


@pytest.mark.parametrize(
    ("tree", "expected", "told"),
    [
        ({"steps_per_print": float("inf")}, {}, "steps_per_print Infinity prints nothing there: --log-every stays as"),
        ({"zero_optimization": True}, ZERO_1, ""),
        ({"zero_optimization": False}, ZERO_1 | {"zero": 0}, ""),
    ],
)
def test_legal_spellings_of_old_files(
    ds: Any, tree: Any, expected: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert options(ds(tree)) == expected
    assert any(told in message for message in caplog.messages)


def test_a_disabled_feature_is_ignored(ds: Any, caplog: pytest.LogCaptureFixture) -> None:
    tree = {"elasticity": {"enabled": False, "min_gpus": 1}, "fp16": {"enabled": False}, "gradient_clipping": 1.0}
    assert options(ds(tree)) == {}
    assert any("elasticity.min_gpus" in message for message in caplog.messages)


# ------------------------------------------------------------------------------------------------------ Accelerate

# What `accelerate config` writes for one machine.
MACHINE = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
FSDP = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,
}


V0_15: dict[str, Any] = {
    **dict.fromkeys(("command_file", "commands", "main_process_ip", "main_process_port", "tpu_name", "tpu_zone")),
    **{f"{name}_config": {} for name in ("deepspeed", "fsdp", "megatron_lm", "fp8", "ipex")},
    "dynamo_backend": "NO",
    "gpu_ids": "all",
}
"""What `accelerate config` of 0.15 to 0.17 writes beside MACHINE, and empty blocks of later ones."""


def axes(**sizes: int) -> dict[str, int]:
    return {f"parallelism_config_{name}_size": size for name, size in sizes.items()}


@pytest.fixture
def accelerate(tmp_path: Path):
    """accelerate(tree, flags...) -> the configuration of a run with this Accelerate file, on `world` ranks."""

    def read(tree: dict[str, Any], *flags: str, world: int | None = 4) -> Config:
        path = tmp_path / "accelerate.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(MACHINE) | tree))
        return parse(["--accelerate-config", str(path), *flags], world=world).config

    return read


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}, {"zero": 0, "precision": "bf16"}),
        ({"distributed_type": "MULTI_GPU", "fsdp_config": {}, "mixed_precision": "no"}, {"zero": 0}),
        ({"distributed_type": "FSDP", "fsdp_config": FSDP}, {"zero": 3}),
        ({"distributed_type": "FSDP", "fsdp_config": {**FSDP, "fsdp_sharding_strategy": 1}}, {"zero": 3}),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
            {"zero": 3, "zero_keep": "backward"},
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, {"zero": 0}),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "5"}},
            {"zero": 3, "zero_keep": "backward", "zero_group": "node"},
        ),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {
                    "fsdp_version": 2,
                    "fsdp_reshard_after_forward": False,
                    "fsdp_offload_params": True,
                    "fsdp_activation_checkpointing": True,
                },
            },
            {"zero": 3, "zero_keep": "backward", "offload": "optimizer+params", "recompute": "full"},
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {
                    "zero_stage": 3,
                    "offload_optimizer_device": "cpu",
                    "offload_param_device": "none",
                    "gradient_accumulation_steps": 2,
                    "gradient_clipping": 0.5,
                    "zero3_init_flag": True,
                    "zero3_save_16bit_model": True,
                },
            },
            {"zero": 3, "offload": "optimizer", "clip_grad": 0.5, "bucket_size": 500_000_000, "save_model_every": 100},
        ),
        (
            {
                "distributed_type": "MEGATRON_LM",
                "megatron_lm_config": {
                    "megatron_lm_tp_degree": 2,
                    "megatron_lm_pp_degree": 2,
                    "megatron_lm_num_micro_batches": 4,
                    "megatron_lm_recompute_activations": True,
                    "megatron_lm_sequence_parallelism": False,
                    "megatron_lm_use_distributed_optimizer": False,
                },
            },
            {"tp": 2, "pp": 2, "global_batch_size": 4, "recompute": "selective", "sequence_parallel": False, "zero": 0},
        ),
        (
            {
                "parallelism_config": {
                    "parallelism_config_dp_replicate_size": 2,
                    "parallelism_config_dp_shard_size": 2,
                    "parallelism_config_tp_size": 1,
                    "parallelism_config_cp_size": 2,
                }
            },
            {"zero": 3, "zero_group": "4", "cp": 2},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": FSDP, "parallelism_config": axes(dp_shard=1, cp=2)},
            {"zero": 3, "cp": 2},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": FSDP, "parallelism_config": axes(dp_replicate=2, cp=2)},
            {"zero": 3, "zero_group": "2", "cp": 2},
        ),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
                "parallelism_config": axes(dp_replicate=4),
            },
            {"zero": 0},
        ),
        ({"parallelism_config": axes(tp=2)}, {"zero": 0, "tp": 2}),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": FSDP,
                "parallelism_config": axes(dp_shard=2, tp=2, cp=2),
                "gradient_accumulation_steps": 4,
                "num_processes": 8,
            },
            {"zero": 3, "tp": 2, "cp": 2},  # 8 samples, the default
        ),
        (V0_15 | {"distributed_type": "MULTI_GPU"}, {"zero": 0}),
        (V0_15 | {"distributed_type": "FSDP", "dynamo_backend": "INDUCTOR"}, {"zero": 3, "compile": True}),
        (
            V0_15 | {"distributed_type": "NO", "dynamo_config": {}, "parallelism_config": {}, "use_xpu": False},
            {"zero": 0},
        ),
        (
            {"dynamo_config": {"dynamo_backend": "INDUCTOR"}, "use_cpu": True, "gradient_accumulation_steps": 4},
            {"zero": 0, "compile": True, "device": "cpu", "global_batch_size": 16},
        ),
    ],
)
def test_files_of_accelerate(accelerate: Any, tree: dict[str, Any], expected: dict[str, Any]) -> None:
    assert options(accelerate(tree, world=tree.get("num_processes", 4))) == expected


def test_what_a_script_of_accelerate_would_say(accelerate: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its passes and its clipping: neither is in the file."""
    accelerate({"gradient_accumulation_steps": 4, "gradient_clipping": 0.5})
    assert "stays as it is" not in caplog.text
    accelerate({})
    assert "--global-batch-size stays as it is (8)" in caplog.text
    assert "--clip-grad stays as it is (1.0)" in caplog.text


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"distributed_type": "XLA"}, 'distributed_type "XLA": must be NO'),
        ({"mixed_precision": "fp8"}, 'mixed_precision "fp8": must be no, bf16 or fp16'),
        ({"num_proceses": 4}, "num_proceses 4: is an unknown key; did you mean num_processes?"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_ignored_modules": "x"}}, "all weights are sharded"),
        ({"parallelism_config": {"parallelism_config_sp_size": 2}}, "use parallelism_config_cp_size, or --cp"),
        ({"dynamo_config": {"dynamo_backend": "EAGER"}}, "must be INDUCTOR or NO"),
        ({"dynamo_backend": "EAGER"}, 'dynamo_backend "EAGER": must be INDUCTOR or NO'),
        ({"fp8_config": {"backend": "TE"}}, 'fp8_config.backend "TE": what it configures is for other devices, or for'),
        ({"use_xpu": True}, "use_xpu true: what it configures is for other devices"),
    ],
)
def test_what_accelerate_cannot_ask_for(accelerate: Any, tree: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        accelerate(tree)


def test_the_number_of_processes_is_checked_where_ranks_start(accelerate: Any) -> None:
    with pytest.raises(UserError, match=r"num_processes 4: there are 2 of them; start 4, or correct the file"):
        accelerate({}, world=2)
    with pytest.raises(UserError, match=r"num_processes 4: there is 1 of them"):
        accelerate({}, world=None)
    assert accelerate({"gradient_accumulation_steps": 2}, "--dry-run", world=None).train.global_batch_size == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"scheduler": {"type": ["WarmupLR"]}}', "must be one value"),
        ('{"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": "0.1"}}}', "must be float"),
        ('{"tensor_parallel": {"autotp_size": 0}, "gradient_accumulation_steps": 2}', "--tp 0: must be at least 1"),
        ('{"a": ' * 900 + "1" + "}" * 900, "nested in more than 64 levels"),
        (" " * (5 << 20), "has more than 4194304 bytes"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        parse(["--deepspeed-config", str(path), "--mock-data"], world=1)


def test_a_dry_run_is_of_the_ranks_that_the_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(MACHINE)
    words = ["--accelerate-config", str(path), "--mock-data", "--vocab-size", "64", "--device", "cpu", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
    pretrain_gpt.main()
    assert "4 ranks = dp 4 x" in capsys.readouterr().out
    for flag in ("--pp", "--pipeline-model-parallel-size"):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words, flag, "3"])
        with pytest.raises(UserError, match=f"^--tp 1 {flag} 3 on 4 ranks: .*, or change --tp or {flag}$"):
            pretrain_gpt.main()


def test_what_gives_way_to_a_chosen_layout_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}')
    monkeypatch.setattr(logging.getLogger("megalite"), "propagate", True)
    parsed = parse(["--deepspeed-config", str(path), "--layout", "auto", "--mock-data"], world=4)
    assert (parsed.config.parallel.tp, parsed.config.parallel.zero) == (1, 1)
    (text,) = [r.getMessage() for r in caplog.records if "--layout auto" in r.getMessage()]
    assert {"tp", "zero"} <= set(re.findall(r"\w+", text))
