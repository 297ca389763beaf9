# A DeepSpeed user: what a ds_config.json becomes, and what is refused. docs/their_file.md trains with one.
set -euo pipefail
cat >ds_config.json <<'JSON'
{
  // of a tutorial
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 2,
  "gradient_clipping": 1.0,
  "steps_per_print": 10,
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 2, "total_num_steps": 8}},
  "zero_optimization": {"stage": 2, "overlap_comm": true, "contiguous_gradients": true, "reduce_bucket_size": 5e8},
}
JSON
model="--preset tiny --mock-data --seq-len 64 --device cpu"
torchrun --nproc_per_node 2 -m pretrain_gpt $model --deepspeed-config ds_config.json --print-config >config.yaml
python -c '
import yaml
cfg = yaml.safe_load(open("config.yaml"))
assert cfg["parallel"]["zero"] == 2 and cfg["train"]["micro_batch_size"] == 2 and cfg["train"]["global_batch_size"] == 8, cfg
assert cfg["optim"]["lr"] == 3e-4 and cfg["optim"]["weight_decay"] == 0.1 and cfg["train"]["precision"] == "bf16", cfg'
run="torchrun --nproc_per_node 2 -m pretrain_gpt $model --run-dir run"
# What has no counterpart is refused by its name in the file.
sed -i 's/"steps_per_print": 10/"sparse_attention": {"mode": "fixed"}/' ds_config.json
if $run --deepspeed-config ds_config.json 2>refused.txt; then exit 1; fi
grep -q "error: .*sparse_attention" refused.txt
