#!/usr/bin/env bash
# One complete model of 100 million parameters: text -> tokenizer -> tokens -> training -> loss curve -> Hugging Face
# export -> its loss on held-out text -> generated text. On one GPU it takes minutes; started again, it continues.
#
#   bash examples/small_model.sh [--out DIR] [--nproc N] [--recipe FILE] [--vocab-size N]
#                                [--input FILE... --held-out FILE...] [-- FLAGS of pretrain_gpt.py]
#
# Without --input the text is the Python code of this environment: the standard library and all installed packages.
set -euo pipefail

usage() { sed -n '2,8p' "$0" | cut -c3-; }

mistake() { echo "error: $*" >&2; exit 2; }

out=runs/llama-100m nproc=1 recipe=examples/recipes/llama-100m.yaml vocab=16384 input=() held_out=()
while [ $# -gt 0 ]; do
    case $1 in
        --out|--nproc|--recipe|--vocab-size) [ -n "${2:-}" ] || mistake "$1 requires a value" ;;&
        --nproc|--vocab-size) [[ $2 =~ ^[1-9][0-9]*$ ]] || mistake "$1 $2: must be a whole number above 0; correct it" ;;&
        --recipe) [ -f "$2" ] || mistake "--recipe $2: no such file; check the path" ;;&
        --out) out=$2; shift 2 ;;
        --nproc) nproc=$2; shift 2 ;;
        --recipe) recipe=$(realpath -- "$2"); shift 2 ;;
        --vocab-size) vocab=$2; shift 2 ;;
        --input|--held-out)
            option=$1 files=(); shift
            while [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; do
                # A pattern in quotes is for the tools to expand.
                [ -e "$1" ] || compgen -G "$1" >/dev/null || mistake "$option $1: no such file; check the path"
                files+=("$(realpath -- "$1")"); shift
            done
            [ ${#files[@]} -gt 0 ] || mistake "$option requires at least one file"
            if [ "$option" = --input ]; then input=("${files[@]}"); else held_out=("${files[@]}"); fi ;;
        --) shift; break ;;
        -h|--help) usage; exit 0 ;;
        *) mistake "$1: unknown option of this script; flags of pretrain_gpt.py follow after --; see --help" ;;
    esac
done
[ ${#input[@]} -eq 0 ] || [ ${#held_out[@]} -gt 0 ] || mistake "--input requires --held-out: text to evaluate on"
[ ${#held_out[@]} -eq 0 ] || [ ${#input[@]} -gt 0 ] || mistake "--held-out requires --input: text to train on"
case $out in /*) ;; *) out=$PWD/$out ;; esac
cd "$(dirname "$0")/.."
. examples/environment.sh
use_environment log,eval
mkdir -p "$out" || fail "--out $out: must be a folder this user can write; choose another"

# absent FILE: whether this step is still to be done. What an earlier start has finished is kept.
absent() {
    [ -e "$1" ] || return 0
    say "using $1 from an earlier start (remove it to make it again)"
    return 1
}

if [ ${#input[@]} -eq 0 ]; then
    input=("$out/text.jsonl") held_out=("$out/held_out.jsonl")
    if absent "$out/text.jsonl"; then
        say "collecting text: the Python code of this environment"
        "$PYTHON" examples/corpus.py --packages --out "$out/text.jsonl" --held-out "$out/held_out.jsonl"
    fi
fi
if absent "$out/tokenizer/tokenizer.model"; then
    say "training a tokenizer of $vocab pieces on its first 50 MB"
    "$PYTHON" -m megalite tokenizer --input "${input[@]}" --vocab-size "$vocab" --max-mb 50 --out "$out/tokenizer"
fi
for part in text held_out; do
    if absent "$out/data/$part.idx"; then
        say "turning text into tokens: $out/data/$part.bin and .idx"
        files=("${input[@]}"); [ $part = text ] || files=("${held_out[@]}")
        "$PYTHON" -m megalite preprocess --input "${files[@]}" --tokenizer "$out/tokenizer" --out "$out/data/$part" --overwrite
    fi
done
say "training: $recipe $*"
"$PYTHON" -m megalite train --nproc "$nproc" --config "$recipe" --data "$out/data/text" --valid-data "$out/data/held_out" \
    --tokenizer "$out/tokenizer" --run-dir "$out" "$@"
say "drawing the loss curve: $out/loss.png"
"$PYTHON" -m megalite plot "$out" --out "$out/loss.png"
say "exporting to Hugging Face format: $out/hf"
rm -rf "$out/hf"
"$PYTHON" -m megalite convert export --checkpoint "$out/checkpoints/latest" --tokenizer "$out/tokenizer" --out "$out/hf"
say "its loss on held-out text, with the export loaded from $out/hf"
"$PYTHON" -m megalite evaluate "$out/hf" --text "${held_out[@]}" | tee "$out/held_out.json"
say "text written by it"
"$PYTHON" -m megalite generate "$out/hf" --prompt "def "
say "done: everything is in $out"
