#!/usr/bin/env bash
# The tests that need TRL, lm-eval or DeepSpeed, in an environment of their own (.venv-peers) on top of the usual one: their
# requirements would change its packages. Where they cannot be installed, the reason is printed. Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
. examples/environment.sh
use_environment dev
base=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
wanted=("trl>=1.16" "lm-eval[hf]>=0.4.13" "deepspeed>=0.19")
stamp=.venv-peers/.installed
want=$(cksum <<<"${wanted[*]} $base")
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    say "installing ${wanted[*]} beside the usual environment"
    rm -rf .venv-peers
    "$PYTHON" -m venv .venv-peers
    own=$(.venv-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # All else comes from the usual environment, which is searched after this one.
    echo "import site; site.addsitedir('$base')" >"$own/base.pth"
    # DeepSpeed compiles nothing here; its kernels would want nvcc.
    DS_BUILD_OPS=0 timeout 900 .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
        "${wanted[@]}" || { say "skipped: pip could not install ${wanted[*]}"; exit 0; }
    echo "$want" >"$stamp"
fi
say "tests with TRL, lm-eval and DeepSpeed"
export VIRTUAL_ENV=$PWD/.venv-peers
export PATH=$VIRTUAL_ENV/bin:$PATH
exec .venv-peers/bin/python -m pytest tests/unit/test_trl.py tests/parity/test_lm_harness.py \
    tests/unit/extras/compat/test_with_deepspeed.py "$@"
