"""`--accelerate-config FILE`: Accelerate's YAML as options.

Keys: accelerate/commands/config/config_args.py, and the dataclasses of plugins in accelerate/utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megalite.core.base.errors import UserError
from megalite.core.options.values import StrictLoader
from megalite.extras.compat.deepspeed import read_deepspeed, translate
from megalite.extras.compat.table import read_table
from megalite.extras.compat.tool_file import LIMIT, ToolFile, unreadable
from megalite.runtime.base.untrusted import read_regular, require_shallow
from megalite.runtime.options.fields import Layer

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

_REFUSALS = read_table("""
what it configures is for other devices, or for fp8, which has options of its own here -> drop it
    fp8_config fp8_config.* ipex_config ipex_config.* intel_cpu_config intel_cpu_config.* use_xpu use_mps_device
runs start from torchrun, Slurm or Kubernetes -> use LOCAL_MACHINE
    compute_environment="LOCAL_MACHINE"
all weights are sharded -> drop it
    fsdp_config.fsdp_ignored_modules
experts have megalite's own options -> use --num-experts and --ep
    deepspeed_config.deepspeed_moe_layer_cls_names megatron_lm_config.megatron_lm_num_experts=0|1|null
    megatron_lm_config.megatron_lm_expert_model_parallel_size=1|null
samples are shared by --cp -> use parallelism_config_cp_size, or --cp
    megatron_lm_config.megatron_lm_context_parallel_size=1|null
    parallelism_config.parallelism_config_sp_size=1|null
""")

_BLOCKS = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}

STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"zero": 3},
    "SHARD_GRAD_OP": {"zero": 3, "zero_keep": "backward"},
    "NO_SHARD": {"zero": 0},
    "HYBRID_SHARD": {"zero": 3, "zero_group": "node"},
    "HYBRID_SHARD_ZERO2": {"zero": 3, "zero_group": "node", "zero_keep": "backward"},
}
"""FSDP's strategies, which Accelerate numbers from 1."""


def read_accelerate(path: Path, flags: Layer, lower: Mapping[str, Any]) -> ToolFile:
    """Read an Accelerate configuration; `flags` and `lower` as for `ToolFile`.

    Raises:
        UserError: it cannot be read, is not YAML, or has keys that are refused.
    """
    try:
        tree = yaml.load(read_regular(path, LIMIT).decode(), Loader=StrictLoader)
        require_shallow(tree)
        file = ToolFile(path, tree, flags, lower) if isinstance(tree, dict) else None
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as e:
        raise unreadable(FLAG, path, e, "YAML") from None
    if file is None:
        raise UserError(f"{FLAG} {path}", "must hold 'name: value' lines", "make it with accelerate config")
    _run(file)
    kind = str(file.pop("distributed_type", "NO"))
    if kind in ("NO", "MULTI_CPU", "MULTI_GPU"):
        file.set("zero", 0, "distributed_type")
    elif kind == "FSDP":
        _fsdp(file)
    elif kind == "DEEPSPEED":
        _deepspeed(file)
    elif kind == "MEGATRON_LM":
        _megatron(file)
    else:
        rule = "must be NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED or MEGATRON_LM"
        file.refuse("distributed_type", kind, rule, "choose one of these")
    _parallelism(file)
    if not file.batch and "global_batch_size" not in file.flags:
        file.notes.append(
            "has no gradient_accumulation_steps: --global-batch-size stays as it is "
            f"({file.lower['global_batch_size']}). Accelerate trains on a batch of the script in one pass"
        )
    if "clip_grad" not in file.layer.keys() | file.flags.keys():
        file.notes.append(
            f"has no gradient_clipping: --clip-grad stays as it is ({file.lower['clip_grad']}). With Accelerate the "
            "script clips, or nobody does"
        )
    for other, block in _BLOCKS.items():
        if other != kind:
            file.drop(block, ignored=True)
            file.leaves.pop(block, None)
    file.check_remaining(_REFUSALS, _IGNORED.split())
    return file


def _run(file: ToolFile) -> None:
    precision = file.pop("mixed_precision")
    if precision == "fp8":
        file.refuse("mixed_precision", precision, "must be no, bf16 or fp16", "use bf16")
    elif precision is not None:
        # YAML reads a bare no as false.
        file.set("precision", {"no": "fp32", False: "fp32"}.get(precision, precision), "mixed_precision")
    if file.pop("use_cpu"):
        file.set("device", "cpu", "use_cpu")
    file.processes = file.pop_count("num_processes")
    if (steps := file.pop_count("gradient_accumulation_steps")) is not None:
        file.batch["accumulation"] = steps
    file.copy("gradient_clipping", "clip_grad")
    for key in ("dynamo_backend", "dynamo_config.dynamo_backend"):  # of 0.15, and today's
        backend = file.pop(key) or "NO"
        if str(backend).upper() == "INDUCTOR":
            file.set("compile", True, key)
        elif str(backend).upper() != "NO":
            file.refuse(key, backend, "must be INDUCTOR or NO", "use INDUCTOR")


def _fsdp(file: ToolFile) -> None:
    key, options = "fsdp_config.fsdp_sharding_strategy", {"zero": 3}
    for name in (key, "fsdp_config.fsdp_reshard_after_forward"):
        given = file.pop(name)
        if given is None:
            continue
        strategy = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(str(given).upper(), str(given).upper())
        numbered = dict(zip("12345", STRATEGIES))
        strategy = numbered.get(strategy, strategy)
        if strategy not in STRATEGIES:
            file.refuse(name, given, f"must be one of {', '.join(STRATEGIES)}", "choose one of these")
            continue
        key, options = name, STRATEGIES[strategy]
    for option, value in options.items():
        file.set(option, value, key)
    if file.pop("fsdp_config.fsdp_offload_params"):
        file.set("offload", "optimizer+params", "fsdp_config.fsdp_offload_params")
    if file.pop("fsdp_config.fsdp_activation_checkpointing"):
        file.set("recompute", "full", "fsdp_config.fsdp_activation_checkpointing")


def _deepspeed(file: ToolFile) -> None:
    """Translate the block as the DeepSpeed file that Accelerate makes of it, or the file that it names."""
    key = "deepspeed_config"
    if (named := file.pop(f"{key}.deepspeed_config_file")) is not None:
        theirs = read_deepspeed(Path(str(named)), file.flags, file.lower)
    else:
        zero: dict[str, Any] = {"stage": file.pop(f"{key}.zero_stage", 2)}
        for name in ("offload_optimizer", "offload_param"):
            device = file.pop(f"{key}.{name}_device", "none")
            path = file.pop(f"{key}.{name}_nvme_path")
            zero[name] = {"device": device, **({"nvme_path": path} if path not in (None, "none") else {})}
        zero["stage3_gather_16bit_weights_on_model_save"] = file.pop(f"{key}.zero3_save_16bit_model", False)
        tree: dict[str, Any] = {"zero_optimization": zero}
        for name in ("gradient_accumulation_steps", "gradient_clipping"):
            tree[name] = file.pop(f"{key}.{name}", "auto")
        theirs = translate(ToolFile(file.path, tree, file.flags, file.lower))
    file.layer |= theirs.layer
    # What the file leaves out has no say over what this one gives.
    implied = theirs.by_default & file.batch.keys()
    file.batch |= {name: number for name, number in theirs.batch.items() if name not in implied}
    file.by_default |= theirs.by_default
    file.notes += theirs.notes
    file.ignored += theirs.ignored


def _megatron(file: ToolFile) -> None:
    key = "megatron_lm_config.megatron_lm_"
    file.copy(f"{key}tp_degree", "tp")
    file.copy(f"{key}pp_degree", "pp")
    file.copy(f"{key}sequence_parallelism", "sequence_parallel")
    file.copy(f"{key}gradient_clipping", "clip_grad")
    if file.pop(f"{key}recompute_activations"):
        file.set("recompute", "selective", f"{key}recompute_activations")
    file.copy(f"{key}recompute_granularity", "recompute")
    if (sharded := file.pop(f"{key}use_distributed_optimizer")) is not None:
        file.set("zero", 1 if sharded else 0, f"{key}use_distributed_optimizer")
    if (count := file.pop_count(f"{key}num_micro_batches")) is not None:
        file.batch["accumulation"] = count
    if (layers := file.pop_count(f"{key}num_layers_per_virtual_pipeline_stage")) is not None:
        total, pp = file.value("num_layers"), file.value("pp")
        if pp < 1 or total % (pp * layers.value):
            rule = f"--num-layers {total} over {pp} stages cannot be split into chunks of {layers.value}"
            file.refuse(f"{key}num_layers_per_virtual_pipeline_stage", layers.value, rule, "give --vp")
        else:
            file.set("vp", total // (pp * layers.value), f"{key}num_layers_per_virtual_pipeline_stage")


def _parallelism(file: ToolFile) -> None:
    """Translate the sizes of the mesh; weights are sharded over dp_shard and cp together, within each replica."""
    key = "parallelism_config.parallelism_config_"
    if not any(name.startswith(key) for name in file.leaves):
        return
    copies, shards = (file.pop_count(f"{key}{name}_size") for name in ("dp_replicate", "dp_shard"))
    file.copy(f"{key}tp_size", "tp")
    file.copy(f"{key}cp_size", "cp")
    over = (shards.value if shards else 1) * file.value("cp")
    if over > 1:
        name = "cp_size" if shards is None or shards.value == 1 else "dp_shard_size"
        file.set("zero", 3, f"{key}{name}")
        if copies is not None and copies.value > 1:
            file.set("zero_group", str(over), f"{key}{name}")
    elif copies is not None and copies.value > 1:
        file.set("zero", 0, f"{key}dp_replicate_size")
        for option in ("zero_keep", "zero_group"):
            file.layer.pop(option, None)
