#!/usr/bin/env bash
# Unit and parity tests on the newest stable CPU build of torch, where that is newer than the pinned one. Arguments go to
# pytest. PyTorch's own index is asked, and only versions that end in +cpu count: a CUDA build would bring gigabytes.
set -eu
cd "$(dirname "$0")/.."
. examples/environment.sh
index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
pinned=$(sed -n 's/^torch==//p' constraints.txt)
use_environment dev
skip() { say "tests on a newer torch are skipped: $1"; exit 0; }
versions=$("$PYTHON" -m pip index versions torch --index-url "$index" --retries 0 --timeout 15 2>/dev/null) ||
    skip "pip finds no torch on $index"
newest=$(grep -oE '[0-9]+(\.[0-9]+)+\+cpu' <<<"$versions" | sort -Vr | head -n 1)
[ -n "$newest" ] || skip "pip finds no CPU build of torch on $index"
[ "$(printf '%s\n' "$pinned" "${newest%+cpu}" | sort -V | tail -n 1)" != "$pinned" ] ||
    skip "$newest is the newest CPU build that pip finds, and $pinned is pinned"
say "tests on torch $newest"
base=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf .venv-newest
"$PYTHON" -m venv .venv-newest
.venv-newest/bin/python -m pip install --quiet --no-deps --index-url "$index" "torch==$newest"
own=$(.venv-newest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# All else comes from the usual environment, which is searched after this one.
echo "import site; site.addsitedir('$base')" >"$own/base.pth"
export VIRTUAL_ENV=$PWD/.venv-newest
export PATH=$VIRTUAL_ENV/bin:$PATH
.venv-newest/bin/python -m pytest -n 3 --dist loadfile --ignore tests/unit/test_house.py tests/unit tests/parity "$@"
