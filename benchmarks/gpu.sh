#!/usr/bin/env bash
# Everything about this machine's GPU in one call of under 8 minutes: builds the native kernels, checks every backend's
# numbers, runs the GPU tests, measures every kernel and a training step, and writes benchmarks/results/<gpu>.json.
#   bash benchmarks/gpu.sh [--no-build]
# Needs a CUDA build of torch; nvcc is used where it is, and said where it is not. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python}"

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "error: $PYTHON's torch sees no GPU: install a CUDA build of torch, or set PYTHON to one that has it" >&2
  exit 2
fi
name=$("$PYTHON" -c 'import re, torch; print(re.sub(r"\W+", "-", torch.cuda.get_device_name()).lower())')
arch=$("$PYTHON" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
results="benchmarks/results/$name"
mkdir -p benchmarks/results

if [ "${1:-}" != "--no-build" ]; then
  echo "== native kernels for sm_$arch"
  MEGALITE_CUDA_ARCHS="$arch" "$PYTHON" setup.py -q build_ext --inplace
fi
echo "== choice of kernels, and their numbers against float64"
failed=0
for dtype in fp32 bf16 fp16; do
  "$PYTHON" -m megalite.ops --device cuda --dtype "$dtype" --check | tee "$results.check-$dtype.txt" | tail -1 || failed=1
done
echo "== GPU tests"
timeout 150 "$PYTHON" -m pytest tests/gpu -m gpu || failed=1
echo "== kernels"
timeout 150 "$PYTHON" benchmarks/kernels.py --device cuda --json "$results.kernels.json" || failed=1
echo "== training step"
timeout 150 "$PYTHON" benchmarks/step.py --json "$results.step.json" --precisions bf16 -- \
  --preset llama-3.2-1b --seq-len 4096 --micro-batch-size 4 --global-batch-size 8 || failed=1

"$PYTHON" - "$results" <<'PY'
import json
import sys
from pathlib import Path

results = Path(sys.argv[1])
parts = {part: Path(f"{results}.{part}.json") for part in ("kernels", "step")}
merged = {part: json.loads(path.read_text()) for part, path in parts.items() if path.exists()}
Path(f"{results}.json").write_text(json.dumps(merged, indent=1))
for path in parts.values():
    path.unlink(missing_ok=True)
print(f"wrote {results}.json with {', '.join(merged) or 'nothing: every measurement failed'}")
PY
exit "$failed"
