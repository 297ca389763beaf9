#!/usr/bin/env bash
# Measures this machine's GPU; see benchmarks/gpu.py, whose options it takes. PYTHON names the interpreter; without it the
# first one whose torch sees a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
sees_gpu='import sys, torch; sys.exit(not torch.cuda.is_available())'
for candidate in ${PYTHON:-python python3}; do
  if "$candidate" -c "$sees_gpu" 2>/dev/null; then
    exec "$candidate" -m benchmarks.gpu "$@"
  fi
done
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
