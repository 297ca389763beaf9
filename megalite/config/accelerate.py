"""`--accelerate-config FILE`: Accelerate's YAML as options.

Keys: accelerate/commands/config/config_args.py, and the dataclasses of plugins in accelerate/utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megalite.config.deepspeed import read_deepspeed, translate
from megalite.config.foreign import LIMIT, Reading, only_table, unreadable
from megalite.config.options import Layer, StrictLoader
from megalite.errors import UserError
from megalite.foreign import read_regular, require_shallow

FLAG = "--accelerate-config"

_IGNORED = """
    debug tpu_* commands command_file num_machines machine_rank main_process_ip main_process_port rdzv_backend
    same_network gpu_ids main_training_function mpirun_config mpirun_config.* enable_cpu_affinity downcast_bf16
    tpu_env use_cpu dynamo_config.* fsdp_config.fsdp_version fsdp_config.fsdp_state_dict_type
    fsdp_config.fsdp_auto_wrap_policy fsdp_config.fsdp_transformer_layer_cls_to_wrap
    fsdp_config.fsdp_min_num_params fsdp_config.fsdp_backward_prefetch
    fsdp_config.fsdp_backward_prefetch_policy fsdp_config.fsdp_forward_prefetch fsdp_config.fsdp_use_orig_params
    fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_cpu_ram_efficient_loading
    fsdp_config.fsdp_limit_all_gathers deepspeed_config.zero3_init_flag deepspeed_config.deepspeed_hostfile
    deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_inclusion_filter
    deepspeed_config.deepspeed_exclusion_filter megatron_lm_config.* parallelism_config.*
"""

_ONLY = only_table("""
runs start from torchrun, Slurm or Kubernetes -> use LOCAL_MACHINE
    compute_environment="LOCAL_MACHINE"
all weights are sharded -> drop it
    fsdp_config.fsdp_ignored_modules
mixtures of experts are not supported -> drop it
    deepspeed_config.deepspeed_moe_layer_cls_names megatron_lm_config.megatron_lm_num_experts=0|1|null
    megatron_lm_config.megatron_lm_expert_model_parallel_size=1|null
the sequence is sharded over tp only -> use 1
    megatron_lm_config.megatron_lm_context_parallel_size=1|null
    parallelism_config.parallelism_config_cp_size=1|null parallelism_config.parallelism_config_sp_size=1|null
""")

_BLOCKS = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}

_STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"zero": 3},
    "SHARD_GRAD_OP": {"zero": 3, "zero_keep": "backward"},
    "NO_SHARD": {"zero": 0},
    "HYBRID_SHARD": {"zero": 3, "zero_group": "node"},
    "HYBRID_SHARD_ZERO2": {"zero": 3, "zero_group": "node", "zero_keep": "backward"},
}
"""FSDP's strategies, which Accelerate numbers from 1."""


def read_accelerate(path: Path, flags: Layer, lower: Mapping[str, Any]) -> Reading:
    """Read an Accelerate configuration; `flags` and `lower` as of `Reading`.

    Raises:
        UserError: it cannot be read, is not YAML, or has keys that mean nothing here.
    """
    try:
        tree = yaml.load(read_regular(path, LIMIT).decode(), Loader=StrictLoader)
        require_shallow(tree)
        read = Reading(path, tree, flags, lower) if isinstance(tree, dict) else None
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as e:
        raise unreadable(FLAG, path, e, "YAML") from None
    if read is None:
        raise UserError(f"{FLAG} {path}", "must hold 'name: value' lines", "make it with accelerate config")
    _run(read)
    kind = str(read.take("distributed_type", "NO"))
    if kind in ("NO", "MULTI_CPU", "MULTI_GPU"):
        if "parallelism_config" not in tree:
            read.give("zero", 0, "distributed_type")
    elif kind == "FSDP":
        _fsdp(read)
    elif kind == "DEEPSPEED":
        _deepspeed(read)
    elif kind == "MEGATRON_LM":
        _megatron(read)
    else:
        rule = "must be NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED or MEGATRON_LM"
        read.refuse("distributed_type", kind, rule, "choose one of these")
    _parallelism(read)
    for other, block in _BLOCKS.items():
        if other != kind:
            read.drop(block, ignored=True)
            read.leaves.pop(block, None)
    read.rest(_ONLY, _IGNORED.split())
    return read


def _run(read: Reading) -> None:
    precision = read.take("mixed_precision")
    if precision == "fp8":
        read.refuse("mixed_precision", precision, "must be no, bf16 or fp16", "use bf16")
    elif precision is not None:
        # YAML reads a bare no as false.
        read.give("precision", {"no": "fp32", False: "fp32"}.get(precision, precision), "mixed_precision")
    if read.take("use_cpu"):
        read.give("device", "cpu", "use_cpu")
    read.processes = read.number("num_processes")
    if (steps := read.number("gradient_accumulation_steps")) is not None:
        read.batch["accumulation"] = steps
    read.move("gradient_clipping", "clip_grad")
    backend = read.take("dynamo_config.dynamo_backend", "NO")
    if str(backend).upper() == "INDUCTOR":
        read.give("compile", True, "dynamo_config.dynamo_backend")
    elif backend is not False and str(backend).upper() != "NO":
        read.refuse("dynamo_config.dynamo_backend", backend, "must be INDUCTOR or NO", "use INDUCTOR")


def _fsdp(read: Reading) -> None:
    key, options = "fsdp_config.fsdp_sharding_strategy", {"zero": 3}
    for name in (key, "fsdp_config.fsdp_reshard_after_forward"):
        given = read.take(name)
        if given is None:
            continue
        strategy = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(str(given).upper(), str(given).upper())
        numbered = dict(zip("12345", _STRATEGIES))
        strategy = numbered.get(strategy, strategy)
        if strategy not in _STRATEGIES:
            read.refuse(name, given, f"must be one of {', '.join(_STRATEGIES)}", "choose one of these")
            continue
        key, options = name, _STRATEGIES[strategy]
    for option, value in options.items():
        read.give(option, value, key)
    if read.take("fsdp_config.fsdp_offload_params"):
        read.give("offload", "optimizer+params", "fsdp_config.fsdp_offload_params")
    if read.take("fsdp_config.fsdp_activation_checkpointing"):
        read.give("recompute", "full", "fsdp_config.fsdp_activation_checkpointing")


def _deepspeed(read: Reading) -> None:
    """The block as the DeepSpeed file that Accelerate makes of it, or the file that it names."""
    key = "deepspeed_config"
    if (file := read.take(f"{key}.deepspeed_config_file")) is not None:
        theirs = read_deepspeed(Path(str(file)), read.flags, read.lower)
    else:
        zero: dict[str, Any] = {"stage": read.take(f"{key}.zero_stage", 2)}
        for name in ("offload_optimizer", "offload_param"):
            device = read.take(f"{key}.{name}_device", "none")
            path = read.take(f"{key}.{name}_nvme_path")
            zero[name] = {"device": device, **({"nvme_path": path} if path not in (None, "none") else {})}
        zero["stage3_gather_16bit_weights_on_model_save"] = read.take(f"{key}.zero3_save_16bit_model", False)
        tree: dict[str, Any] = {"zero_optimization": zero}
        for name in ("gradient_accumulation_steps", "gradient_clipping"):
            tree[name] = read.take(f"{key}.{name}", "auto")
        theirs = translate(Reading(read.path, tree, read.flags, read.lower))
    read.layer |= theirs.layer
    read.batch |= theirs.batch
    read.by_default |= theirs.by_default
    read.notes += theirs.notes
    read.ignored += theirs.ignored


def _megatron(read: Reading) -> None:
    key = "megatron_lm_config.megatron_lm_"
    read.move(f"{key}tp_degree", "tp")
    read.move(f"{key}pp_degree", "pp")
    read.move(f"{key}sequence_parallelism", "sequence_parallel")
    read.move(f"{key}gradient_clipping", "clip_grad")
    if read.take(f"{key}recompute_activations"):
        read.give("recompute", "selective", f"{key}recompute_activations")
    read.move(f"{key}recompute_granularity", "recompute")
    if (sharded := read.take(f"{key}use_distributed_optimizer")) is not None:
        read.give("zero", 1 if sharded else 0, f"{key}use_distributed_optimizer")
    if (count := read.number(f"{key}num_micro_batches")) is not None:
        read.batch["accumulation"] = count
    if (layers := read.number(f"{key}num_layers_per_virtual_pipeline_stage")) is not None:
        total, pp = read.value("num_layers"), read.value("pp")
        if pp < 1 or total % (pp * layers.value):
            rule = f"--num-layers {total} over {pp} stages cannot be split into chunks of {layers.value}"
            read.refuse(f"{key}num_layers_per_virtual_pipeline_stage", layers.value, rule, "give --vp")
        else:
            read.give("vp", total // (pp * layers.value), f"{key}num_layers_per_virtual_pipeline_stage")


def _parallelism(read: Reading) -> None:
    key = "parallelism_config.parallelism_config_"
    copies, shards = read.number(f"{key}dp_replicate_size"), read.number(f"{key}dp_shard_size")
    if shards is not None and shards.value > 1:
        read.give("zero", 3, f"{key}dp_shard_size")
        if copies is not None and copies.value > 1:
            read.give("zero_group", str(shards.value), f"{key}dp_shard_size")
    elif copies is not None:
        read.give("zero", 0, f"{key}dp_replicate_size")
    read.move(f"{key}tp_size", "tp")
