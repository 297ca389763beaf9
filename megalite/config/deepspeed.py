"""`--deepspeed-config FILE`: DeepSpeed's JSON as options.

Keys and defaults: deepspeed/runtime/config.py, runtime/zero/config.py, and the pages on the JSON configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.config.deepspeed_keys import IGNORED, ONLY, UNSUPPORTED
from megalite.config.foreign import LIMIT, Reading, unreadable
from megalite.config.options import Layer
from megalite.errors import UserError
from megalite.foreign import read_regular, require_shallow

FLAG = "--deepspeed-config"

_ZERO = "zero_optimization"


def read_deepspeed(path: Path, flags: Layer, lower: Mapping[str, Any]) -> Reading:
    """Read a DeepSpeed configuration; `flags` and `lower` as of `Reading`.

    Raises:
        UserError: it cannot be read, is not JSON with unique keys, or has keys that mean nothing here.
    """
    try:
        tree = json.loads(read_regular(path, LIMIT).decode(), object_pairs_hook=_unique)
        require_shallow(tree)
        read = Reading(path, tree, flags, lower) if isinstance(tree, dict) else None
    except (OSError, ValueError, RecursionError) as e:
        raise unreadable(FLAG, path, e, "JSON") from None
    if read is None:
        raise UserError(f"{FLAG} {path}", "must hold a JSON object", "see DeepSpeed's documentation for the format")
    return translate(read)


def translate(read: Reading) -> Reading:
    """Translate the content of a configuration."""
    for name, key in (
        ("samples", "train_batch_size"),
        ("micro", "train_micro_batch_size_per_gpu"),
        ("accumulation", "gradient_accumulation_steps"),
    ):
        if (number := read.number(key)) is not None:
            read.batch[name] = number
    _optimizer(read)
    _scheduler(read)
    _precision(read)
    _zero(read)
    _offload(read)
    _recompute(read)
    _run(read)
    features = UNSUPPORTED.split()
    for block in features:
        on = [k for k, v in read.leaves.items() if k.startswith(f"{block}.") and k.endswith("enabled") and v is True]
        if on:
            read.refuse(on[0], True, "megalite has nothing like it", f"drop {block}")
    read.rest(ONLY, [*IGNORED.split(), *features, *(f"{block}.*" for block in features)])
    return read


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice")
    return dict(pairs)


def _optimizer(read: Reading) -> None:
    kind, key = read.take("optimizer.type"), "optimizer.params"
    if kind is None:
        return
    ours = {"adam": "adamw", "adamw": "adamw", "lamb": "lamb", "sgd": "sgd"}.get(str(kind).lower())
    if ours is None:
        read.refuse("optimizer.type", kind, "must be Adam, AdamW, Lamb or SGD", "choose one of these")
        read.drop("optimizer")
        return
    read.give("optimizer", ours, "optimizer.type")
    read.move(f"{key}.lr", "lr", 1e-3)
    for name, option, default in (
        ("weight_decay", "weight_decay", 0.0),
        ("momentum", "beta1", 0.0),
        ("eps", "eps", 1e-8),
    ):
        if name in ("weight_decay", "momentum" if ours == "sgd" else "eps"):
            # The Trainer fills in "auto" with the same value.
            read.give(option, read.take(f"{key}.{name}", default), f"{key}.{name}")
    if ours != "sgd":
        betas = read.take(f"{key}.betas", [0.9, 0.999], (list,))
        if len(betas) != 2:
            read.refuse(f"{key}.betas", betas, "must be two numbers", "correct the file")
            return
        for name, beta in zip(("beta1", "beta2"), betas):
            read.give(name, beta, f"{key}.betas")
    if read.value("weight_decay"):
        read.notes.append("DeepSpeed decays norms and biases too; here weight decay leaves them out")


def _scheduler(read: Reading) -> None:
    kind, key = read.take("scheduler.type"), "scheduler.params"
    if kind is None:
        return
    decays = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind not in decays:
        rule = f"must be {', '.join(decays)}"
        read.refuse("scheduler.type", kind, rule, "choose one of these, or drop the block and give --lr-decay")
        read.drop("scheduler")
        return
    read.give("lr_decay", decays[kind], "scheduler.type")
    read.give("warmup_shape", f"deepspeed-{read.take(f'{key}.warmup_type', 'log')}", f"{key}.warmup_type")
    read.move(f"{key}.warmup_num_steps", "warmup_steps", 1000)
    if read.value("warmup_steps") < 2:
        read.give("warmup_steps", 2, f"{key}.warmup_num_steps", default=True)
    if kind != "WarmupLR":
        read.move(f"{key}.total_num_steps", "lr_decay_steps")
    if kind == "WarmupCosineLR":
        for name, option, default in (("warmup_min_ratio", "init_lr", 0.0), ("cos_min_ratio", "min_lr", 1e-4)):
            ratio = read.take(f"{key}.{name}", default, (float, int))
            read.give(option, read.value("lr") * ratio, f"{key}.{name}")
        return
    low = read.take(f"{key}.warmup_min_lr", 0.0)
    read.give("init_lr", low, f"{key}.warmup_min_lr")
    read.give("min_lr", low, f"{key}.warmup_min_lr")
    if f"{key}.warmup_max_lr" not in read.auto:
        read.ignored += ["optimizer.params.lr"] if "lr" in read.layer else []
        read.move(f"{key}.warmup_max_lr", "lr", 1e-3)


def _precision(read: Reading) -> None:
    enabled = {kind: read.take(f"{kind}.enabled") for kind in ("fp16", "bf16", "bfloat16")}
    enabled["bf16"] = enabled.pop("bfloat16") or enabled["bf16"]
    if enabled["fp16"] and enabled["bf16"]:
        read.refuse("bf16.enabled", True, "fp16.enabled is true as well", "choose one of the two")
    on = next((kind for kind, value in enabled.items() if value), None)
    if on is not None or False in enabled.values():
        read.give("precision", on or "fp32", f"{on or 'fp16'}.enabled")
    scale, power = read.take("fp16.loss_scale", 0), read.take("fp16.initial_scale_power", 16)
    rest = {name: read.take(f"fp16.{name}", default) for name, default in _SCALER.items()}
    if on == "fp16" or "fp16.enabled" in read.auto:
        if scale:
            read.give("loss_scale", scale, "fp16.loss_scale")
        if isinstance(power, int) and 0 <= power < 100:
            read.give("initial_loss_scale", 2.0**power, "fp16.initial_scale_power", default=power == 16)
        else:
            read.refuse("fp16.initial_scale_power", power, "must be a whole number from 0 to 99", "correct the file")
        for name, value in rest.items():
            read.give(name, value, f"fp16.{name}", default=value == _SCALER[name])
    if (sent := read.take("communication_data_type")) is not None:
        if sent in ("fp16", "float16", "half"):
            read.refuse("communication_data_type", sent, "gradients are reduced in fp32 or bf16", "use bf16")
        else:
            names = {"float32": "fp32", "bfloat16": "bf16", "bfp16": "bf16"}
            read.give("grad_reduce_dtype", names.get(sent, sent), "communication_data_type")


_SCALER: dict[str, Any] = {
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1.0,
}


def _zero(read: Reading) -> None:
    read.move("tensor_parallel.autotp_size", "tp")
    read.move("pipeline.stages", "pp")
    if not read.has(_ZERO):
        read.notes.append("has no zero_optimization: --zero stays as it is (1 by default, the same numbers as stage 0)")
        return
    read.move(f"{_ZERO}.stage", "zero", 0)
    stage = read.value("zero")
    read.move(f"{_ZERO}.reduce_bucket_size", "bucket_size", 5e8)
    read.move(f"{_ZERO}.stage3_param_persistence_threshold", "zero_whole_below", 100_000)
    read.move(f"{_ZERO}.param_persistence_threshold", "zero_whole_below")
    overlap = read.take(f"{_ZERO}.overlap_comm")
    for option in ("overlap_grad_reduce", "overlap_param_gather"):
        read.give(option, stage == 3 if overlap is None else overlap, f"{_ZERO}.overlap_comm", default=overlap is None)
    for name in ("stage3_gather_16bit_weights", "stage3_gather_fp16_weights", "gather_16bit_weights"):
        if read.take(f"{_ZERO}.{name}_on_model_save"):
            # At the end of the run, as the Trainer does.
            read.give("save_model_every", read.value("train_steps"), f"{_ZERO}.{name}_on_model_save")
    for name, off in (("mics_shard_size", -1), ("zero_hpz_partition_size", 1)):
        size = read.take(f"{_ZERO}.{name}", off)
        if size != off and stage != 3:
            read.refuse(f"{_ZERO}.{name}", size, "applies to stage 3", "drop it")
        elif size != off:
            read.give("zero_group", str(size), f"{_ZERO}.{name}")
            if name.endswith("partition_size"):
                read.notes.append(f"{name}: gradients and optimizer states are sharded over these {size} ranks too")
    if stage >= 2 and read.value("pp") > 1:
        note = (
            f"stage {stage} with {read.value('pp')} pipeline stages reduces gradients after every micro-batch, and so "
        )
        read.notes.append(note + "sends m times as much with m of them (--zero-reduce step: once per step)")


def _offload(read: Reading) -> None:
    stage = read.value("zero")
    where = {name: read.take(f"{_ZERO}.{name}.device") or "none" for name in ("offload_optimizer", "offload_param")}
    paths = {name: read.take(f"{_ZERO}.{name}.nvme_path") for name in where}
    for name, device in where.items():
        if device not in ("cpu", "nvme", "none"):
            read.refuse(f"{_ZERO}.{name}.device", device, "must be cpu, nvme or none", "correct the file")
    if where["offload_param"] != "none" and stage != 3:
        read.refuse(f"{_ZERO}.offload_param.device", where["offload_param"], "requires stage 3", "drop it")
    elif where["offload_param"] != "none":
        read.give("offload", "optimizer+params", f"{_ZERO}.offload_param.device")
        if where["offload_optimizer"] == "none":
            read.notes.append("offload_param: here optimizer states leave the device too")
        if where["offload_param"] == "nvme":
            read.notes.append("offload_param nvme: weights stay in host memory, only optimizer states go to disk")
    elif where["offload_optimizer"] != "none":
        read.give("offload", "optimizer", f"{_ZERO}.offload_optimizer.device")
    if where["offload_optimizer"] == "nvme":
        if paths["offload_optimizer"] is None:
            read.refuse(f"{_ZERO}.offload_optimizer.device", "nvme", "requires nvme_path", "name a folder on that disk")
        else:
            read.give("offload_dir", paths["offload_optimizer"], f"{_ZERO}.offload_optimizer.nvme_path")


def _recompute(read: Reading) -> None:
    key = "activation_checkpointing"
    on_host = read.take(f"{key}.cpu_checkpointing")
    interval = read.take("pipeline.activation_checkpoint_interval", 0)
    if read.has(key) or interval:
        read.give("recompute", "full", key if read.has(key) else "pipeline.activation_checkpoint_interval")
    if on_host and "offload" in read.layer:
        rule = f"one kind of state is offloaded, and {read.layer['offload'].written} is given"
        read.refuse(f"{key}.cpu_checkpointing", True, rule, "drop one of the two")
    elif on_host:
        read.give("offload", "activations", f"{key}.cpu_checkpointing")


def _run(read: Reading) -> None:
    if "gradient_clipping" not in {*read.leaves, *read.auto}:
        note = (
            "has no gradient_clipping: --clip-grad stays as it is (1.0 by default). DeepSpeed clips at 1.0 from June "
        )
        read.notes.append(note + "2026 on, and did not clip before")
    read.move("gradient_clipping", "clip_grad")
    read.move("steps_per_print", "log_every")
    if read.take("tensorboard.enabled"):
        read.give("tensorboard", True, "tensorboard.enabled")
    project = read.take("wandb.project", "deepspeed")
    if read.take("wandb.enabled"):
        read.give("wandb_project", project, "wandb.project")
    if any(read.leaves.get(key) for key in ("wall_clock_breakdown", "flops_profiler.enabled", "comms_logger.enabled")):
        read.notes.append("profiles are made with --profile A:B")
