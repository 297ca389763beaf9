#!/usr/bin/env bash
# Tests on the newest stable torch, where that is newer than the pinned one: what communicates, trains and resumes, and the
# estimate, or what the arguments name, which go to pytest. PyTorch's own index of CPU builds is asked first; where it
# has none, pip's usual index, whose builds for CUDA run on a CPU too but take 6 GB.
set -eu
cd "$(dirname "$0")/.."
. examples/environment.sh
index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
pinned=$(sed -n 's/^torch==//p' constraints.txt)
use_environment dev
skip() { say "tests on a newer torch are skipped: $1"; exit 0; }

# newest SUFFIX OPTION...: the newest final version whose name ends in SUFFIX, if it is above the pinned one
newest() {
    local suffix=$1 found
    shift
    found=$("$PYTHON" -m pip index versions torch "$@" --retries 0 --timeout 15 2>/dev/null |
        sed -n 's/^Available versions: //p' | tr -d ' ' | tr ',' '\n' | grep -E "^[0-9]+(\.[0-9]+)+${suffix}\$" | sort -Vr | head -n 1)
    [ "$(printf '%s\n' "$pinned" "${found%+cpu}" | sort -V | tail -n 1)" = "$pinned" ] || echo "$found"
}

if version=$(newest '\+cpu' --index-url "$index") && [ -n "$version" ]; then
    options=(--no-deps --index-url "$index")
elif version=$(newest '') && [ -n "$version" ]; then
    [ "$(df --output=avail -k . | tail -n 1)" -gt 12000000 ] || skip "$version needs 12 GB of disk"
    options=()
else
    skip "pip finds none above $pinned, which is pinned"
fi
say "tests on torch $version"
base=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf .venv-newest
"$PYTHON" -m venv .venv-newest
timeout 900 .venv-newest/bin/python -m pip install --quiet "${options[@]}" "torch==$version" || skip "pip could not install $version"
own=$(.venv-newest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# All else comes from the usual environment, which is searched after this one.
echo "import site; site.addsitedir('$base')" >"$own/base.pth"
export VIRTUAL_ENV=$PWD/.venv-newest
export PATH=$VIRTUAL_ENV/bin:$PATH
failed=0
[ $# -gt 0 ] || set -- tests/unit/mesh tests/unit/pipeline tests/unit/extras/estimate/test_estimate.py tests/parity
# A failure is repeated by this script: the environment goes.
REPEAT="bash .ci/newest_torch.sh" .venv-newest/bin/python -m pytest -n 3 --dist loadfile "$@" || failed=$?
rm -rf .venv-newest
exit "$failed"
