"""`--deepspeed-config FILE`: DeepSpeed's JSON, or Hjson, as options.

Keys and defaults: deepspeed/runtime/config.py, runtime/zero/config.py, and the pages on the JSON configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.extras.compat.deepspeed_keys import IGNORED, REFUSALS, UNSUPPORTED
from megalite.extras.compat.hjson import read_hjson
from megalite.extras.compat.tool_file import LIMIT, ToolFile, unreadable
from megalite.runtime.base.untrusted import read_regular, require_shallow
from megalite.runtime.options.fields import Layer, OptionValue

FLAG = "--deepspeed-config"

_ZERO = "zero_optimization"
_BATCH = {
    "train_batch_size": "samples",
    "train_micro_batch_size_per_gpu": "micro",
    "gradient_accumulation_steps": "accumulation",
}
"""Keys of the batch -> names in `ToolFile.batch`."""


def read_deepspeed(path: Path, flags: Layer, lower: Mapping[str, Any]) -> ToolFile:
    """Read a DeepSpeed configuration; `flags` and `lower` as for `ToolFile`.

    Raises:
        UserError: it cannot be read, is no Hjson with unique keys, or has keys that are refused.
    """
    try:
        tree = read_hjson(read_regular(path, LIMIT).decode("utf-8-sig"))
        require_shallow(tree)
        file = ToolFile(path, tree, flags, lower) if isinstance(tree, dict) else None
    except (OSError, ValueError, RecursionError) as e:
        raise unreadable(FLAG, path, e, "JSON") from None
    if file is None:
        raise UserError(f"{FLAG} {path}", "must hold a JSON object", "see DeepSpeed's documentation for the format")
    return translate(file)


def translate(file: ToolFile) -> ToolFile:
    """Translate the content of a configuration."""
    for key, name in _BATCH.items():
        if (number := file.pop_count(key)) is not None:
            file.batch[name] = number
    if len(file.batch) == 1 and "accumulation" not in file.batch and not file.auto & _BATCH.keys():
        written = f"{file.path}: gradient_accumulation_steps 1 (DeepSpeed's default)"
        file.batch["accumulation"] = OptionValue(1, written)
        file.by_default.add("accumulation")
    if isinstance(on := file.leaves.get(_ZERO), bool):  # of its first versions
        file.leaves[f"{_ZERO}.stage"] = int(file.leaves.pop(_ZERO))
        file.blocks.add(_ZERO)
    _optimizer(file)
    _scheduler(file)
    _precision(file)
    _zero(file)
    _offload(file)
    _recompute(file)
    _run(file)
    _log_auto(file)
    features = UNSUPPORTED.split()
    for block in features:
        on = [k for k, v in file.leaves.items() if k.startswith(f"{block}.") and k.endswith("enabled") and v is True]
        if on:
            file.refuse(on[0], True, "megalite has nothing like it", f"drop {block}")
    file.check_remaining(REFUSALS, [*IGNORED.split(), *features, *(f"{block}.*" for block in features)])
    return file


def _optimizer(file: ToolFile) -> None:
    kind, key = file.pop("optimizer.type"), "optimizer.params"
    if kind is None:
        return
    ours = {"adam": "adamw", "adamw": "adamw", "lamb": "lamb", "sgd": "sgd"}.get(str(kind).lower())
    if ours is None:
        file.refuse("optimizer.type", kind, "must be Adam, AdamW, Lamb or SGD", "choose one of these")
        file.drop("optimizer")
        return
    file.set("optimizer", ours, "optimizer.type")
    file.copy(f"{key}.lr", "lr", 1e-3)
    for name, option, default in (
        ("weight_decay", "weight_decay", 0.0),
        ("momentum", "beta1", 0.0),
        ("eps", "eps", 1e-8),
    ):
        if name in ("weight_decay", "momentum" if ours == "sgd" else "eps"):
            # The Trainer fills in "auto" with the same value.
            file.set(option, file.pop(f"{key}.{name}", default), f"{key}.{name}")
    if ours != "sgd":
        betas = file.pop(f"{key}.betas", [0.9, 0.999], (list,))
        if len(betas) != 2:
            file.refuse(f"{key}.betas", betas, "must be two numbers", "correct the file")
            return
        for name, beta in zip(("beta1", "beta2"), betas):
            file.set(name, beta, f"{key}.betas")
    if file.value("weight_decay"):
        file.notes.append("DeepSpeed decays norms and biases too; here weight decay leaves them out")


def _scheduler(file: ToolFile) -> None:
    kind, key = file.pop("scheduler.type"), "scheduler.params"
    if kind is None:
        return
    decays = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind not in decays:
        rule = f"must be {', '.join(decays)}"
        file.refuse("scheduler.type", kind, rule, "choose one of these, or drop the block and give --lr-decay")
        file.drop("scheduler")
        return
    file.set("lr_decay", decays[kind], "scheduler.type")
    file.set("warmup_shape", f"deepspeed-{file.pop(f'{key}.warmup_type', 'log')}", f"{key}.warmup_type")
    file.copy(f"{key}.warmup_num_steps", "warmup_steps", 1000)
    if file.value("warmup_steps") < 2:
        file.set("warmup_steps", 2, f"{key}.warmup_num_steps", default=True)
    if kind != "WarmupLR":
        file.copy(f"{key}.total_num_steps", "lr_decay_steps")
    if kind == "WarmupCosineLR":
        for name, option, default in (("warmup_min_ratio", "init_lr", 0.0), ("cos_min_ratio", "min_lr", 1e-4)):
            ratio = file.pop(f"{key}.{name}", default, (float, int))
            file.set(option, file.value("lr") * ratio, f"{key}.{name}")
            if name == "warmup_min_ratio" and ratio:
                file.notes.append("the first step has the rate of warmup_min_ratio; there it has the rate 0")
        return
    low = file.pop(f"{key}.warmup_min_lr", 0.0)
    file.set("init_lr", low, f"{key}.warmup_min_lr")
    file.set("min_lr", low, f"{key}.warmup_min_lr")
    if f"{key}.warmup_max_lr" in file.leaves or (kind == "WarmupDecayLR" and f"{key}.warmup_max_lr" not in file.auto):
        file.ignored += ["optimizer.params.lr"] if "lr" in file.layer else []
        file.copy(f"{key}.warmup_max_lr", "lr", 1e-3)
    elif f"{key}.warmup_max_lr" not in file.auto:
        file.notes.append(
            "WarmupLR without warmup_max_lr rises to the optimizer's lr, as today there; to 0.001 in old ones"
        )


def _precision(file: ToolFile) -> None:
    enabled = {kind: file.pop(f"{kind}.enabled") for kind in ("fp16", "bf16", "bfloat16")}
    enabled["bf16"] = enabled.pop("bfloat16") or enabled["bf16"]
    if enabled["fp16"] and enabled["bf16"]:
        file.refuse("bf16.enabled", True, "fp16.enabled is true as well", "choose one of the two")
    on = next((kind for kind, value in enabled.items() if value), None)
    if on is not None or False in enabled.values():
        file.set("precision", on or "fp32", f"{on or 'fp16'}.enabled")
    scale, power = file.pop("fp16.loss_scale", 0), file.pop("fp16.initial_scale_power", 16)
    scaler = {name: file.pop(f"fp16.{name}", default) for name, default in _SCALER.items()}
    if on == "fp16" or "fp16.enabled" in file.auto:
        if scale:
            file.set("loss_scale", scale, "fp16.loss_scale")
        if isinstance(power, int) and 0 <= power < 100:
            file.set("initial_loss_scale", 2.0**power, "fp16.initial_scale_power", default=power == 16)
        else:
            file.refuse("fp16.initial_scale_power", power, "must be a whole number from 0 to 99", "correct the file")
        for name, value in scaler.items():
            file.set(name, value, f"fp16.{name}", default=value == _SCALER[name])
    if (sent := file.pop("communication_data_type")) is not None:
        if sent in ("fp16", "float16", "half"):
            file.set("grad_reduce_dtype", "fp32", "communication_data_type")
            file.notes.append(
                f"communication_data_type {sent}: gradients are reduced in fp32; --grad-reduce-dtype bf16 halves that"
            )
        else:
            names = {"float32": "fp32", "bfloat16": "bf16", "bfp16": "bf16"}
            file.set("grad_reduce_dtype", names.get(sent, sent), "communication_data_type")


_SCALER: dict[str, Any] = {
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1.0,
}


def _zero(file: ToolFile) -> None:
    file.copy("tensor_parallel.autotp_size", "tp")
    file.copy("pipeline.stages", "pp")
    if not file.has(_ZERO):
        file.notes.append("has no zero_optimization: --zero stays as it is (1 by default, the same numbers as stage 0)")
        return
    file.copy(f"{_ZERO}.stage", "zero", 0)
    stage = file.value("zero")
    file.copy(f"{_ZERO}.reduce_bucket_size", "bucket_size", 5e8)
    file.copy(f"{_ZERO}.stage3_param_persistence_threshold", "zero_whole_below", 100_000)
    file.copy(f"{_ZERO}.param_persistence_threshold", "zero_whole_below")
    overlap = file.pop(f"{_ZERO}.overlap_comm")
    for option in ("overlap_grad_reduce", "overlap_param_gather"):
        file.set(option, stage == 3 if overlap is None else overlap, f"{_ZERO}.overlap_comm", default=overlap is None)
    for name in ("stage3_gather_16bit_weights", "stage3_gather_fp16_weights", "gather_16bit_weights"):
        if file.pop(f"{_ZERO}.{name}_on_model_save"):
            # At the end of the run, as the Trainer does.
            file.set("save_model_every", file.value("train_steps"), f"{_ZERO}.{name}_on_model_save")
    for name, off in (("mics_shard_size", -1), ("zero_hpz_partition_size", 1)):
        size = file.pop(f"{_ZERO}.{name}", off)
        if size != off and stage != 3:
            file.refuse(f"{_ZERO}.{name}", size, "applies to stage 3", "drop it")
        elif size != off:
            file.set("zero_group", str(size), f"{_ZERO}.{name}")
            if name.endswith("partition_size"):
                file.notes.append(f"{name}: gradients and optimizer states are sharded over these {size} ranks too")
    if stage >= 2 and file.value("pp") > 1:
        file.notes.append(
            f"stage {stage} with {file.value('pp')} pipeline stages reduces gradients after every micro-batch, which "
            "sends m times as much with m of them (--zero-reduce step: once per step)"
        )


def _offload(file: ToolFile) -> None:
    stage = file.value("zero")
    where = {name: file.pop(f"{_ZERO}.{name}.device") or "none" for name in ("offload_optimizer", "offload_param")}
    paths = {name: file.pop(f"{_ZERO}.{name}.nvme_path") for name in where}
    for name, device in where.items():
        if device not in ("cpu", "nvme", "none"):
            file.refuse(f"{_ZERO}.{name}.device", device, "must be cpu, nvme or none", "correct the file")
    if where["offload_param"] != "none" and stage != 3:
        file.refuse(f"{_ZERO}.offload_param.device", where["offload_param"], "requires stage 3", "drop it")
    elif where["offload_param"] != "none":
        file.set("offload", "optimizer+params", f"{_ZERO}.offload_param.device")
        if where["offload_optimizer"] == "none":
            file.notes.append("offload_param: here optimizer states leave the device too")
        if where["offload_param"] == "nvme":
            file.notes.append("offload_param nvme: weights stay in host memory, only optimizer states go to disk")
    elif where["offload_optimizer"] != "none":
        file.set("offload", "optimizer", f"{_ZERO}.offload_optimizer.device")
    if where["offload_optimizer"] == "nvme":
        if paths["offload_optimizer"] is None:
            file.refuse(f"{_ZERO}.offload_optimizer.device", "nvme", "requires nvme_path", "name a folder on that disk")
        else:
            file.set("offload_dir", paths["offload_optimizer"], f"{_ZERO}.offload_optimizer.nvme_path")


def _recompute(file: ToolFile) -> None:
    key = "activation_checkpointing"
    # The block of DeepSpeed says how models recompute that do; only what it switches on says that one should.
    switches = ("partition_activations", "contiguous_memory_optimization", "number_checkpoints", "cpu_checkpointing")
    asked = [f"{key}.{name}" for name in switches if file.leaves.get(f"{key}.{name}")]
    on_host = file.pop(f"{key}.cpu_checkpointing")
    if file.pop("pipeline.activation_checkpoint_interval", 0):
        asked.append("pipeline.activation_checkpoint_interval")
    if asked:
        file.set("recompute", "full", asked[0])
    elif file.has(key):
        file.notes.append(f"{key} switches nothing on: nothing is recomputed (--recompute full does)")
    if on_host and "offload" in file.layer:
        rule = f"one kind of state is offloaded, and {file.layer['offload'].written} is given"
        file.refuse(f"{key}.cpu_checkpointing", True, rule, "drop one of the two")
    elif on_host:
        file.set("offload", "activations", f"{key}.cpu_checkpointing")


_AUTO = {
    "bf16.enabled": "precision",
    "fp16.enabled": "precision",
    "optimizer.params.lr": "lr",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas": "beta2",
    "optimizer.params.eps": "eps",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "gradient_clipping": "clip_grad",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "train_batch_size": "global_batch_size",
}
"""Keys that the Trainer fills in where they are "auto", and the options that decide here."""


def _log_auto(file: ToolFile) -> None:
    """Say what is used in place of "auto": with the Trainer, arguments that are not in this file decide."""
    open_ = {option: key for key, option in reversed(_AUTO.items()) if key in file.auto}
    if file.batch:
        # Two of the three numbers of a batch give the third.
        open_ = {option: key for option, key in open_.items() if "batch" not in option}
    left = {option: key for option, key in open_.items() if option not in file.flags and option not in file.layer}
    if left:
        used = (f"--{option.replace('_', '-')} {file.lower[option]} ({key})" for option, key in left.items())
        file.notes.append(f'"auto" and not given as options, so the default is used: {", ".join(used)}')


def _run(file: ToolFile) -> None:
    if "gradient_clipping" not in {*file.leaves, *file.auto}:
        file.notes.append(
            "has no gradient_clipping: --clip-grad stays as it is (1.0 by default). DeepSpeed clips at 1.0 from June "
            "2026 on, and did not clip before"
        )
    file.copy("gradient_clipping", "clip_grad")
    if file.leaves.get("steps_per_print") == math.inf:
        file.pop("steps_per_print")
        file.notes.append("steps_per_print Infinity prints nothing there: --log-every stays as it is")
    file.copy("steps_per_print", "log_every")
    if file.pop("tensorboard.enabled"):
        file.set("tensorboard", True, "tensorboard.enabled")
    project = file.pop("wandb.project", "deepspeed")
    if file.pop("wandb.enabled"):
        file.set("wandb_project", project, "wandb.project")
    if any(file.leaves.get(key) for key in ("wall_clock_breakdown", "flops_profiler.enabled", "comms_logger.enabled")):
        file.notes.append("profiles are made with --profile A:B")
