#!/usr/bin/env bash
# A small mixture of experts and its dense twin on one CPU core, in minutes: the same text, the same order of samples, as
# many multiplications per token (2 of 16 experts of width 128, beside one MLP of width 256), and both curves in one
# picture. With several seeds, all their runs, one after another.
#
#   bash examples/moe_twin.sh [--out DIR] [--steps N] [--seeds "1 2 3"]
set -eu

usage() { sed -n '2,6p' "$0" | cut -c3-; }

out=runs/moe_twin steps=1000 seeds=1
while [ $# -gt 0 ]; do
    case $1 in
        --out) [ $# -ge 2 ] || { echo "error: --out requires a folder" >&2; exit 2; }; out=$2; shift 2 ;;
        --steps) [ $# -ge 2 ] || { echo "error: --steps requires a number" >&2; exit 2; }; steps=$2; shift 2 ;;
        --seeds) [ $# -ge 2 ] || { echo "error: --seeds requires numbers, such as \"1 2 3\"" >&2; exit 2; }; seeds=$2; shift 2 ;;
        -h|--help) usage; exit 0 ;;
        *) echo "error: $1: unknown option of this script; see --help" >&2; exit 2 ;;
    esac
done
case $out in /*) ;; *) out=$PWD/$out ;; esac
cd "$(dirname "$0")/.."
. examples/environment.sh
use_environment log,eval
mkdir -p "$out" || fail "--out $out: must be a folder this user can write; choose another"

say "text, tokenizer and tokens: this Python's standard library"
"$PYTHON" examples/corpus.py --out "$out/text.jsonl" --max-mb 10
"$PYTHON" -m megalite tokenizer --input "$out/text.jsonl" --vocab-size 1024 --out "$out/tokenizer" --overwrite
"$PYTHON" -m megalite preprocess --input "$out/text.jsonl" --tokenizer "$out/tokenizer" --out "$out/data/text" --overwrite

# train NAME SEED FLAGS...: what the twins share, and what they do not.
train() {
    local name=$1_$2 seed=$2; shift 2
    say "training $steps steps: $name"
    OMP_NUM_THREADS=1 "$PYTHON" -m megalite train --nproc 1 --device cpu --num-layers 4 --hidden-size 64 --num-heads 4 \
        --ffn-hidden-size 256 --seq-len 128 --data "$out/data/text" --split 90,10,0 --tokenizer "$out/tokenizer" \
        --micro-batch-size 16 --global-batch-size 16 --train-steps "$steps" --lr 5e-3 --min-lr 5e-4 --warmup-steps 20 \
        --eval-every $((steps / 4)) --eval-steps 16 --log-every 50 --seed "$seed" --run-dir "$out/$name" "$@"
}
runs=
for seed in $seeds; do
    train dense "$seed"
    train moe "$seed" --num-experts 16 --moe-topk 2 --moe-ffn-size 128 --moe-aux-loss-coeff 0.01
    runs="$runs $out/dense_$seed $out/moe_$seed"
done
say "drawing all curves: $out/loss.png"
# shellcheck disable=SC2086  # one word a run
"$PYTHON" -m megalite plot $runs --out "$out/loss.png" --x step
say "done: everything is in $out"
