#!/usr/bin/env bash
# megalite's main job on a CPU, from text to a trained model: real text -> tokenizer -> tokens -> training on four
# processes (tensor parallel 2 x pipeline parallel 2) -> loss curve -> Hugging Face export -> generated text.
#
#   bash examples/quickstart.sh [--out DIR] [--steps N] [--input FILE...]
set -eu

usage() { sed -n '2,5p' "$0" | cut -c3-; }

out=runs/quickstart steps=120 input=()
while [ $# -gt 0 ]; do
    case $1 in
        --out) [ $# -ge 2 ] || { echo "error: --out requires a folder" >&2; exit 2; }; out=$2; shift 2 ;;
        --steps) [ $# -ge 2 ] || { echo "error: --steps requires a number" >&2; exit 2; }; steps=$2; shift 2 ;;
        --input) shift; while [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; do input+=("$(realpath -- "$1")"); shift; done
                 [ ${#input[@]} -gt 0 ] || { echo "error: --input requires at least one file" >&2; exit 2; } ;;
        -h|--help) usage; exit 0 ;;
        *) echo "error: $1: unknown option of this script; see --help" >&2; exit 2 ;;
    esac
done
case $out in /*) ;; *) out=$PWD/$out ;; esac
cd "$(dirname "$0")/.."
. examples/environment.sh
use_environment log,eval
mkdir -p "$out" || fail "--out $out: must be a folder this user can write; choose another"

if [ ${#input[@]} -eq 0 ]; then
    say "collecting text: this Python's standard library and its documentation topics"
    "$PYTHON" examples/corpus.py --out "$out/text.jsonl" --max-mb 6
    input=("$out/text.jsonl")
fi
say "training a tokenizer of 4,096 pieces on it"
"$PYTHON" -m megalite tokenizer --input "${input[@]}" --vocab-size 4096 --out "$out/tokenizer" --overwrite
say "turning the text into tokens: $out/data/text.bin and .idx"
"$PYTHON" -m megalite preprocess --input "${input[@]}" --tokenizer "$out/tokenizer" --out "$out/data/text" --workers 2 --overwrite
say "training $steps steps on 4 processes: --tp 2 --pp 2 (metrics in $out/metrics.jsonl)"
OMP_NUM_THREADS=1 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py \
    --config examples/recipes/quickstart.yaml --tp 2 --pp 2 --device cpu --train-steps "$steps" \
    --data "$out/data/text" --tokenizer "$out/tokenizer" --run-dir "$out"
say "drawing the loss curve: $out/loss.png"
"$PYTHON" -m megalite plot "$out" --out "$out/loss.png"
say "exporting to Hugging Face format: $out/hf"
rm -rf "$out/hf"
"$PYTHON" -m megalite convert export --checkpoint "$out/checkpoints/latest" --tokenizer "$out/tokenizer" --out "$out/hf"
say "text written by the model, loaded by transformers from $out/hf"
"$PYTHON" examples/generate_with_transformers.py "$out/hf" --prompt "def "
say "making a page of the run"
"$PYTHON" -m megalite view "$out" --html "$out/run.html"
say "done: everything is in $out; a page of the run, for a browser: $out/run.html"
