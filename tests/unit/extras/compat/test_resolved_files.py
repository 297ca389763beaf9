"""400 random files of DeepSpeed and Accelerate mean here what these tools make of them, field by field."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megalite.core.base.errors import UserError
from megalite.core.options.lr import learning_rate
from megalite.extras.compat.dialect import DIALECT
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config
from tests.unit.extras.compat.drawn_files import accelerate_file, deepspeed_file

SEEDS = range(200)


def ours(flag: str, path: Path, world: int) -> Config:
    words = [flag, str(path), "--mock-data", "--train-steps", "12", "--num-layers", "4", "--num-heads", "8"]
    return cli.parse([*words, "--seq-len", "256"], dialect=DIALECT, world=world).config


def different(got: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    return {name: (got[name], value) for name, value in expected.items() if got[name] != pytest.approx(value)}


def deepspeed_resolves(tree: dict[str, Any], world: int) -> dict[str, Any]:
    """Return the options that DeepSpeed's own classes make of a file. Raises AssertionError if it refuses the file."""
    import torch
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.runtime import config, lr_schedules

    tp = tree.get("tensor_parallel", {}).get("autotp_size", 1)
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: world // tp)
    ds = config.DeepSpeedConfig(json.loads(json.dumps(tree)), mpu=ranks)
    zero, scaler = ds.zero_config, ds.float16_config
    options: dict[str, Any] = {
        "global_batch_size": ds.train_batch_size,
        "micro_batch_size": ds.train_micro_batch_size_per_gpu,
        "accumulation": ds.gradient_accumulation_steps,
        "clip_grad": ds.gradient_clipping,
        "precision": "fp16" if scaler.enabled else "bf16" if ds.bfloat16_config.enabled else "fp32",
        "tp": max(1, ds.tensor_parallel_config.autotp_size),
    }
    if "zero_optimization" in tree:  # else stage 1 stays, which a note says
        cpu = {name: (block := getattr(zero, name)) is not None and block.device == "cpu" for name in
               ("offload_optimizer", "offload_param")}  # fmt: skip
        options |= {
            "zero": int(zero.stage),
            "bucket_size": int(zero.reduce_bucket_size),
            "overlap_grad_reduce": zero.overlap_comm,
            "zero_group": str(zero.zero_hpz_partition_size) if zero.zero_hpz_partition_size > 1 else "full",
            "offload": "optimizer+params"
            if cpu["offload_param"]
            else "optimizer"
            if cpu["offload_optimizer"]
            else "none",
        }
        if zero.stage == 3:
            options["zero_whole_below"] = int(zero.param_persistence_threshold)
    if scaler.enabled:
        options |= {
            "loss_scale": scaler.loss_scale or None,
            "initial_loss_scale": 2.0**scaler.initial_scale_power,
            "loss_scale_window": scaler.loss_scale_window,
            "hysteresis": scaler.hysteresis,
            "consecutive_hysteresis": scaler.consecutive_hysteresis,
            "min_loss_scale": scaler.min_loss_scale,
        }
    if ds.optimizer_name is None:
        return options
    name = ds.optimizer_name.lower()
    kind = {"adam": FusedAdam, "adamw": FusedAdam, "lamb": FusedLamb, "sgd": torch.optim.SGD}[name]
    defaults = {n: p.default for n, p in inspect.signature(kind.__init__).parameters.items()}
    params = defaults | (ds.optimizer_params or {})
    options |= {"optimizer": {"adam": "adamw"}.get(name, name), "weight_decay": params["weight_decay"]}
    if name == "sgd":
        options["beta1"] = params["momentum"]
    else:
        options |= {"beta1": params["betas"][0], "beta2": params["betas"][1], "eps": params["eps"]}
    if ds.scheduler_name is None:
        return options | {"lr": params["lr"]}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=params["lr"])
    scheduler, rates = getattr(lr_schedules, ds.scheduler_name)(optimizer, **ds.scheduler_params), []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    if "warmup_min_ratio" in ds.scheduler_params:
        rates[0] = params["lr"] * ds.scheduler_params["warmup_min_ratio"]  # 0 there, which a note says
    return options | {"rates": rates}


def resolved(config: Config, world: int) -> dict[str, Any]:
    """Return our options under the names above, and what follows from them."""
    values = {name: value for group in vars(config).values() for name, value in vars(group).items()}
    # Raises UserError as a run does, where the batch does not divide.
    passes = config.num_microbatches(world // (values["tp"] * values["cp"] * values["pp"]))
    rates = [learning_rate(step, config.optim, 12) for step in range(1, 13)]
    return values | {"accumulation": passes, "rates": rates}


def test_files_of_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (.ci/peers.sh tests with it)")
    from deepspeed.runtime import config

    # Its classes ask for the rank before they ask `mpu` for the number of ranks; there are no processes here.
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    refused = 0
    for seed in SEEDS:
        tree, world = deepspeed_file(seed)
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(tree))
        try:
            expected = deepspeed_resolves(tree, world)
        except AssertionError:
            refused += 1
            # Refused here too, unless it is for shares that are uneven, as they may be here.
            with contextlib.suppress(UserError):
                cfg = ours("--deepspeed-config", path, world)
                values = resolved(cfg, world)
                dp = world // (values["tp"] * values["cp"] * values["pp"])
                assert values["global_batch_size"] % (values["micro_batch_size"] * dp), f"seed {seed}: {tree}"
            continue
        got = resolved(ours("--deepspeed-config", path, world), world)
        assert different(got, expected) == {}, f"seed {seed}, {world} ranks: {json.dumps(tree)}"
    assert 5 < refused < 60


def accelerate_resolves(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the options that `accelerate launch` and Accelerate's own classes make of a file."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env
    from torch.distributed.fsdp import CPUOffloadPolicy

    args = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, *_ = _validate_launch_command(args)
    with monkeypatch.context() as patch:
        for name, value in prepare_multi_gpu_env(args).items():
            patch.setenv(name, value)
        mixed, dynamo = os.environ["ACCELERATE_MIXED_PRECISION"], os.environ["ACCELERATE_DYNAMO_BACKEND"]
        sizes = ParallelismConfig()
        fsdp = FullyShardedDataParallelPlugin() if "ACCELERATE_USE_FSDP" in os.environ else None
    options: dict[str, Any] = {
        "precision": {"no": "fp32"}.get(mixed, mixed),
        "compile": dynamo == "INDUCTOR",
        "tp": sizes.tp_size,
        "cp": sizes.cp_size,
        "processes": args.num_processes,
    }
    if fsdp is None:
        return options | {"zero": 0}
    stage, keep, group = 3, "none", "full"
    if fsdp.fsdp_version == 1:
        name = fsdp.sharding_strategy.name
        stage = 0 if name == "NO_SHARD" else 3
        keep = "backward" if name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2") else keep
        group = "node" if "HYBRID" in name else group
    elif not fsdp.reshard_after_forward:
        keep = "backward"
    if sizes.dp_replicate_size > 1:
        group = str(sizes.dp_shard_size * sizes.cp_size)
    offloaded = isinstance(fsdp.cpu_offload, CPUOffloadPolicy) or getattr(fsdp.cpu_offload, "offload_params", False)
    return options | {
        "zero": stage,
        "zero_keep": keep if stage == 3 else None,
        "zero_group": group if stage == 3 else None,
        "offload": "optimizer+params" if offloaded else "none",
        "recompute": "full" if fsdp.activation_checkpointing else "none",
    }


def test_files_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed (.ci/peers.sh tests with it)")
    for seed in SEEDS:
        tree, world = accelerate_file(seed)
        path = tmp_path / "accelerate.yaml"
        path.write_text(yaml.safe_dump(tree))
        expected = accelerate_resolves(path, monkeypatch)
        if expected["zero"] == 0 and expected.get("offload") == "optimizer+params":
            # NO_SHARD: weights that are not sharded stay on the device here.
            with pytest.raises(UserError, match="weights can be offloaded only if"):
                ours("--accelerate-config", path, world)
            continue
        got = resolved(ours("--accelerate-config", path, world), world) | {"processes": world}
        expected = {name: value for name, value in expected.items() if value is not None}
        assert different(got, expected) == {}, f"seed {seed}, {world} ranks: {tree}"
