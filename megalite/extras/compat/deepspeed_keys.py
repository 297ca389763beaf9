"""Keys of DeepSpeed's JSON that are ignored, or accepted at some values only. docs/coming_from.md explains them."""

from __future__ import annotations

from megalite.extras.compat.table import read_table

UNSUPPORTED = """
    elasticity autotuning hybrid_engine eigenvalue progressive_layer_drop curriculum_learning data_efficiency
    quantize_training compression_training expert_parallel amp torch_autocast
"""
"""Features: their blocks are ignored where disabled, and refused where enabled."""

IGNORED = """
    prescale_gradients gradient_predivide_factor seq_parallel_communication_data_type
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather dataloader_drop_last
    memory_breakdown wall_clock_breakdown dump_state flops_profiler.* comms_logger.* csv_monitor.* comet.*
    tensorboard.* wandb.* checkpoint.* aio.* zero_optimization.aio zero_optimization.aio.*
    comms_config comms_config.* monitor_config monitor_config.*
    optimizer.legacy_fusion optimizer.params.torch_adam optimizer.params.fused
    fp16.auto_cast bf16.check_grad_overflow bf16.immediate_grad_update
    zero_optimization.allgather_partitions zero_optimization.reduce_scatter zero_optimization.contiguous_gradients
    zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.round_robin_gradients
    zero_optimization.grad_hooks zero_optimization.load_from_fp32_weights
    zero_optimization.ignore_unused_parameters zero_optimization.legacy_stage1
    zero_optimization.memory_efficient_linear zero_optimization.pipeline_loading_checkpoint
    zero_optimization.override_module_apply zero_optimization.log_trace_cache_warnings
    zero_optimization.enable_sanity_checks zero_optimization.elastic_checkpoint
    zero_optimization.allgather_bucket_size zero_optimization.sub_group_size
    zero_optimization.stage3_prefetch_bucket_size zero_optimization.prefetch_bucket_size
    zero_optimization.stage3_max_live_parameters zero_optimization.max_live_parameters
    zero_optimization.stage3_max_reuse_distance zero_optimization.max_reuse_distance
    zero_optimization.stage3_module_granularity_threshold zero_optimization.module_granularity_threshold
    zero_optimization.leaf_module zero_optimization.leaf_module.*
    zero_optimization.stage3_allgather_sequential zero_optimization.stage3_use_all_reduce_for_fetch_params
    zero_optimization.use_all_reduce_for_fetch_params
    zero_optimization.stage3_model_persistence_threshold zero_optimization.model_persistence_threshold
    zero_optimization.mics_hierarchical_params_gather
    zero_optimization.parameter_alignment zero_optimization.save_muon_momentum_buffer_in_memory
    zero_optimization.offload_optimizer.* zero_optimization.offload_param.*
    activation_checkpointing.* tensor_parallel.* pipeline.* compile.*
"""

REFUSALS = read_table("""
gradients are always accumulated by the step -> drop it
    managed_gradient_accumulation=true
gradients are those of the mean over the batch -> use mean
    gradient_allreduce_op="mean"
the gradient norm is always computed -> use true
    zero_optimization.compute_grad_norm=true
gradients of the embedding are dense -> drop it
    sparse_gradients
weight decay is decoupled (AdamW); there is no L2 -> use true
    optimizer.params.adam_w_mode=true
Adam's bias correction is always on -> use true
    optimizer.params.bias_correction=true
the optimizer has no such variant -> drop it
    optimizer.params.amsgrad optimizer.params.nesterov optimizer.params.dampening
    optimizer.params.max_coeff=null optimizer.params.min_coeff=null
the norm is clipped in the same way for every optimizer -> use gradient_clipping
    optimizer.params.max_grad_norm
moments, masters and gradients in bf16 are options -> use --moments-dtype, --master-dtype, --grad-dtype
    bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
masters and accumulated gradients are fp32 or bf16 -> drop it
    fp16.fp16_master_weights_and_grads data_types.grad_accum_dtype="fp32"|"float32"
another key replaced it -> write offload_optimizer with device cpu
    zero_optimization.cpu_offload zero_optimization.cpu_offload_use_pin_memory
another key replaced it -> write offload_param with device cpu
    zero_optimization.cpu_offload_param zero_optimization.cpu_offload_params
states and weights are offloaded whole -> use 1
    zero_optimization.offload_optimizer.ratio=1|1.0 zero_optimization.offload_param.ratio=1|1.0
megalite has nothing like it -> drop it
    zero_optimization.offload_optimizer.super_offload zero_optimization.zenflow zero_optimization.zenflow.*
weights are sent in their own data type -> drop it
    zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_nontrainable_weights
gradients are compressed with ZeRO-0 and 1 -> lower the stage and give --compress int8
    zero_optimization.zero_quantized_gradients zero_optimization.zeropp_loco_param
    zero_optimization.zeropp_loco_param.*
scratch files are read through the host -> drop it
    aio.use_gds zero_optimization.aio.use_gds
compilation is block by block -> drop it, and give --compile
    compile.deepcompile
the model knows how its layers are split -> drop it
    tensor_parallel.partition_config tensor_parallel.partition_config.*
attention is dense, or has a window -> drop it, or give --window
    sparse_attention sparse_attention.*
""")
