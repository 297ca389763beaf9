#!/usr/bin/env bash
# A small mixture of experts and its dense twin on one CPU core, in minutes: the same text, the same order of samples, as
# many multiplications per token (2 of 8 experts of width 256, beside one MLP of width 512), and both curves in one picture.
#
#   bash examples/moe_twin.sh [--out DIR] [--steps N]
set -eu

usage() { sed -n '2,5p' "$0" | cut -c3-; }

out=runs/moe_twin steps=400
while [ $# -gt 0 ]; do
    case $1 in
        --out) [ $# -ge 2 ] || { echo "error: --out requires a folder" >&2; exit 2; }; out=$2; shift 2 ;;
        --steps) [ $# -ge 2 ] || { echo "error: --steps requires a number" >&2; exit 2; }; steps=$2; shift 2 ;;
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

# train NAME FLAGS...: what the twins share, and what they do not.
train() {
    local name=$1; shift
    say "training $steps steps: $name"
    OMP_NUM_THREADS=1 "$PYTHON" -m megalite train --nproc 1 --device cpu --num-layers 4 --hidden-size 128 --num-heads 4 \
        --ffn-hidden-size 512 --seq-len 128 --data "$out/data/text" --split 90,10,0 --tokenizer "$out/tokenizer" \
        --micro-batch-size 16 --global-batch-size 16 --train-steps "$steps" --lr 3e-3 --min-lr 3e-4 --warmup-steps 20 \
        --eval-every $((steps / 4)) --eval-steps 16 --log-every 20 --run-dir "$out/$name" "$@"
}
train dense
train moe --num-experts 8 --moe-topk 2 --moe-ffn-size 256 --moe-aux-loss-coeff 0.01
say "drawing both curves: $out/loss.png"
"$PYTHON" -m megalite plot "$out/dense" "$out/moe" --out "$out/loss.png" --x step
say "done: everything is in $out"
