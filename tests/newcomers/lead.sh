# A lead who rents GPUs: which layout, how long, how much, will it fit, and the job for the queue. No GPU, and nothing runs.
set -eu
printf 'base: h100\ngpus: 64\nnvlink: 200\n' >ours.yaml
job="--preset llama-3-8b --global-batch-size 512 --precision bf16"
megalite plan $job --cluster ours.yaml --tokens 1e12 --price 2.5 >plan.txt
grep -q "GPU hours" plan.txt
grep -q "predicted, not measured" plan.txt
megalite plan $job --cluster h100:16 --json >plan.json
megalite plan explain $job --cluster h100:64 --tp 2 --pp 4 >explain.txt
# Without a batch size the plan says that it took the default.
megalite plan --preset llama-3-8b --cluster h100:16 2>&1 | grep -qi "batch"
megalite launch --emit slurm --nodes 8 --slots 8 --time-limit 1-00:00:00 --name llama -- -m pretrain_gpt $job --tp 2 --pp 4 \
    --mock-data --max-minutes 1400 >job.sbatch
bash -n job.sbatch
grep -q "scontrol requeue" job.sbatch
python -m torch.distributed.run --nproc-per-node 1 -m pretrain_gpt --preset tiny --mock-data --dry-run --device cpu >dry.txt 2>&1
grep -q "parameters" dry.txt
# What cannot be is refused before it is queued.
if megalite launch --emit slurm --nodes 8 --slots 8 -- -m pretrain_gpt $job --tp 3 --mock-data 2>refused.txt; then exit 1; fi
grep -q "^error: " refused.txt
python -c '
import json
plan = json.load(open("plan.json"))
best = plan[0]
assert best["fits"] and 0 < best["mem_gb"] < 80 and best["step_time_s"] > 0, best'
