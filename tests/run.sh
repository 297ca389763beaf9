#!/usr/bin/env bash
# The tests that need no GPU, in an environment of its own (.venv, unless one is active). With --full first, every row of
# every grid too. Other arguments go to pytest. With --quick: style, types, imports and the tests of what changed, in a
# minute.
set -eu
cd "$(dirname "$0")/.."
full=
[ "${1:-}" = --full ] && { full=--full; shift; }
. examples/environment.sh
use_environment dev
# An independent reader of our token files; it asks for a CUDA stack that it does not need for that.
"$PYTHON" -m pip show --quiet megatron-core 2>/dev/null ||
    "$PYTHON" -m pip install --quiet --no-deps megatron-core==0.16.1 ||
    say "megatron-core could not be installed: the tests that compare with it will be skipped"
[ "${1:-}" = --quick ] && exec "$PYTHON" -m tests.quick
# Images of containers often set it: every process would compile every module anew.
unset PYTHONDONTWRITEBYTECODE
say "running the tests"
# Many tests wait (for a launcher's time limits, for a rank to be noticed): four at a time fill two cores, three where
# there is little memory, as each keeps workers of its own, up to 3.5 GB of them. By file, for those workers; in the
# order of tests/conftest.py, which mixes those that wait with those that compute.
jobs=3
[ "$(awk '/^MemAvailable/ { print int($2 / 2 ^ 20) }' /proc/meminfo 2>/dev/null || echo 0)" -ge 16 ] && jobs=4
exec "$PYTHON" -m pytest -n "$jobs" --dist loadfile --no-loadscope-reorder $full "$@"
