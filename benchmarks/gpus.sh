#!/usr/bin/env bash
# Measures training on all GPUs of this host; see benchmarks/gpus.py, whose options it takes. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" benchmarks/gpus.py "$@"
