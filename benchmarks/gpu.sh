#!/usr/bin/env bash
# Everything about this machine's GPU in one call of under 8 minutes: builds the native kernels, runs the GPU tests,
# (every backend's numbers among them), measures every kernel and a training step, and writes benchmarks/results/<gpu>.json,
# with how each part ended, beside each part's output.
#   bash benchmarks/gpu.sh [--no-build]
# Needs a CUDA build of torch; nvcc is used where it is, and said where it is not. PYTHON names the interpreter.
# Exits 1 if a part failed or was cut off.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-$(command -v python || echo python3)}"
# megalite need not be installed.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "error: $PYTHON's torch sees no GPU: install a CUDA build of torch, or set PYTHON to one that has it" >&2
  exit 2
fi
name=$("$PYTHON" -c 'import re, torch; print(re.sub(r"\W+", "-", torch.cuda.get_device_name()).lower())')
arch=$("$PYTHON" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
results="benchmarks/results/$name"
mkdir -p benchmarks/results
# Left by a call that was stopped.
rm -f "$results".{parts.tsv,kernels.json,step.json}

failed=0
due=0
# part NAME SECONDS COMMAND…: runs it for its seconds at most, and those that the parts before it left over.
part() {
  local part=$1 began=$SECONDS limit code=0
  due=$((due + $2))
  limit=$((due > SECONDS ? due - SECONDS : 1))
  shift 2
  echo "== $part: at most $limit s, output in $results.$part.txt"
  # SIGINT: pytest still writes its summary. A file, not a pipe: a process left behind could keep a pipe open for ever.
  timeout -s INT -k 5 "$limit" "$@" > "$results.$part.txt" 2>&1 || code=$?
  tail -n 60 "$results.$part.txt"
  [ "$code" -eq 0 ] || failed=1
  printf '%s\t%d\t%d\t%d\n' "$part" "$code" "$((SECONDS - began))" "$limit" >> "$results.parts.tsv"
}

# The seconds come to 415. The tests go first: they fill Triton's cache.
if [ "${1:-}" != "--no-build" ]; then
  part build 55 env MEGALITE_CUDA_ARCHS="$arch" "$PYTHON" setup.py -q build_ext --inplace
fi
part tests 215 "$PYTHON" -m pytest tests/gpu -m gpu
part kernels 70 "$PYTHON" benchmarks/kernels.py --device cuda --json "$results.kernels.json"
part step 75 "$PYTHON" benchmarks/step.py --json "$results.step.json" --precisions bf16 --compiled -- \
  --preset llama-3.2-1b --seq-len 4096 --micro-batch-size 4 --global-batch-size 8

"$PYTHON" - "$results" <<'PY'
import json
import sys
from pathlib import Path

results = sys.argv[1]
merged = {"parts": {}}
table = Path(f"{results}.parts.tsv")
for line in table.read_text().splitlines():
    part, code, seconds, limit = line.split("\t")
    ends = {"0": "passed", "124": f"cut off after {limit} s", "137": "killed"}
    said = Path(f"{results}.{part}.txt").read_text(errors="replace").split("\n")
    merged["parts"][part] = {
        "outcome": ends.get(code, f"failed with exit code {code}"),
        "seconds": int(seconds),
        "last_line": next((text for text in reversed(said) if text.strip()), ""),
    }
    measured = Path(f"{results}.{part}.json")
    if code == "0" and measured.exists():
        merged[part] = json.loads(measured.read_text())
    measured.unlink(missing_ok=True)
table.unlink()
Path(f"{results}.json").write_text(json.dumps(merged, indent=1))
for part, end in merged["parts"].items():
    print(f"{part}: {end['outcome']}, {end['seconds']} s")
print(f"wrote {results}.json")
PY
exit "$failed"
