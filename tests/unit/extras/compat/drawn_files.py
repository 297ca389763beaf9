"""Random DeepSpeed and Accelerate files that a person could have, of one seed each."""

from __future__ import annotations

import random
from typing import Any

Tree = dict[str, Any]


def deepspeed_file(seed: int) -> tuple[Tree, int]:
    """Return a configuration and a number of ranks."""
    draw = random.Random(seed)

    def some(tree: Tree, likely: float = 0.5) -> Tree:
        return {name: value for name, value in tree.items() if draw.random() < likely}

    world, tp = draw.choice([1, 2, 4, 8]), draw.choice([1, 1, 2])
    tp = min(tp, world)
    micro, passes = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3, 8])
    off = draw.choice([0] * 9 + [1])  # one of ten does not fit
    sizes = {
        "train_batch_size": micro * passes * (world // tp) + off,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": passes,
    }
    given = draw.choice([*[(0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,)]])
    tree: Tree = {name: sizes[name] for n, name in enumerate(sizes) if n in given}
    if tp > 1:
        tree["tensor_parallel"] = {"autotp_size": tp}
    tree |= some({"gradient_clipping": draw.choice([0.0, 0.5, 1.0, 2]), "steps_per_print": draw.choice([1, 10, 2000])})
    kind = draw.choice(["Adam", "AdamW", "adamw", "Lamb", "SGD", None])
    if kind is not None:
        betas = {"betas": draw.choice([[0.9, 0.95], [0.8, 0.999]]), "eps": draw.choice([1e-8, 1e-6])}
        params = {"lr": draw.choice([1e-3, 3e-4, 1e-5]), "weight_decay": draw.choice([0, 0.01, 0.1])}
        tree["optimizer"] = {
            "type": kind,
            "params": some(params | ({"momentum": 0.9} if kind == "SGD" else betas), 0.7),
        }
    steps, total = draw.choice([2, 4, 5]), draw.choice([8, 11])
    shape = {"warmup_num_steps": steps, "warmup_type": draw.choice(["log", "linear"])}
    low, high = {"warmup_min_lr": draw.choice([0, 1e-5])}, {"warmup_max_lr": draw.choice([1e-3, 2e-4])}
    schedules: dict[str, Tree] = {
        "WarmupLR": some(shape | low | high, 0.7),
        "WarmupDecayLR": {"total_num_steps": total, "warmup_num_steps": steps, **some(shape | low | high, 0.7)},
        "WarmupCosineLR": {
            "total_num_steps": total,
            "warmup_num_steps": steps,
            **some({"warmup_type": shape["warmup_type"], "cos_min_ratio": 0.1, "warmup_min_ratio": 0.2}, 0.7),
        },
    }
    if kind is not None and draw.random() < 0.6:
        name = draw.choice(sorted(schedules))
        tree["scheduler"] = {"type": name, "params": schedules[name]}
    scaler = {"loss_scale": draw.choice([0, 128]), "initial_scale_power": 12, "loss_scale_window": 500}
    scaler |= {"hysteresis": 3, "min_loss_scale": 2, "consecutive_hysteresis": True}
    precision: Tree = draw.choice([{}, {"bf16": {"enabled": True}}, {"bfloat16": {"enabled": True}}, {"fp16": {}}])
    tree |= (
        {"fp16": {"enabled": draw.choice([True, True, False]), **some(scaler)}} if "fp16" in precision else precision
    )
    if draw.random() < 0.8:
        stage = draw.choice([0, 1, 2, 3])
        zero: Tree = some(
            {
                "reduce_bucket_size": draw.choice([5e7, 200000000]),
                "overlap_comm": draw.random() < 0.5,
                "reduce_scatter": True,
            }
        )
        if draw.random() < 0.9:
            zero["stage"] = stage
        if zero.get("stage") == 3:
            zero |= some({"stage3_param_persistence_threshold": draw.choice([1e4, 0]), "sub_group_size": 1e9})
            zero |= some({"zero_hpz_partition_size": 2} if world // tp % 2 == 0 else {}, 0.3)
            zero |= some({"offload_param": {"device": draw.choice(["cpu", "none"])}}, 0.3)
        if zero.get("stage", 0) > 0:
            zero |= some({"offload_optimizer": {"device": draw.choice(["cpu", "none"]), "pin_memory": True}}, 0.3)
        tree["zero_optimization"] = zero
    return tree, world


def accelerate_file(seed: int) -> tuple[Tree, int]:
    """Return a configuration of a run with DDP or FSDP, and a number of ranks."""
    draw = random.Random(seed)

    def maybe(name: str, *values: Any) -> Tree:
        return {name: draw.choice(values)} if draw.random() < 0.5 else {}

    kind = draw.choice(["MULTI_GPU", "FSDP", "FSDP", "FSDP"])
    tree: Tree = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_machines": 1,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "main_training_function": "main",
        **maybe("mixed_precision", "no", "bf16", "fp16"),
        **maybe("dynamo_config", {"dynamo_backend": "INDUCTOR"}, {"dynamo_backend": "NO"}),
    }
    sizes = {"dp_replicate": 1, "dp_shard": draw.choice([2, 4]), "tp": 1, "cp": 1}
    if kind == "FSDP":
        version = draw.choice([1, 2, None])
        strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", 1, 2, 3, 4, 5]
        how = {"fsdp_reshard_after_forward": draw.choice([True, False])}
        fsdp: Tree = how if version == 2 else {"fsdp_sharding_strategy": draw.choice(strategies)}
        fsdp = fsdp if draw.random() < 0.8 else {}
        # What Accelerate's class of version 1 asks of the device, which a machine of the tests has not.
        fsdp |= {"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": False} if version != 2 else {}
        fsdp |= {} if version is None else {"fsdp_version": version}
        fsdp |= maybe("fsdp_offload_params", True, False) | maybe("fsdp_activation_checkpointing", True, False)
        fsdp |= maybe("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
        tree["fsdp_config"] = fsdp
        if version == 2 and draw.random() < 0.7:
            sizes |= {name: draw.choice([1, 1, 2]) for name in ("dp_replicate", "tp", "cp")}
            tree["parallelism_config"] = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    world = 1
    for size in sizes.values():
        world *= size
    return tree | {"num_processes": world}, world
