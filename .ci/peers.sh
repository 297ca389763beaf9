#!/usr/bin/env bash
# The tests that need TRL, lm-eval, DeepSpeed or Accelerate, transformers 4, gcsfs, torchao, or a browser, each group in an environment of its
# own (.venv-peers, .venv-transformers4, .venv-gcs, .venv-torchao, .venv-browser) on top of the usual one: their requirements would change its
# packages. Where they cannot be installed, the reason is printed. Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
. examples/environment.sh
use_environment dev
base=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# environment FOLDER PACKAGE...: whatever else is asked for comes from the usual environment, which is searched after this one
environment() {
    local folder=$1 want
    shift
    want=$(cksum <<<"$* $base")
    [ "$(cat "$folder/.installed" 2>/dev/null)" != "$want" ] || return 0
    say "installing $* beside the usual environment"
    rm -rf "$folder"
    "$PYTHON" -m venv "$folder"
    echo "import site; site.addsitedir('$base')" >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
    # DeepSpeed compiles nothing here; its kernels would want nvcc.
    DS_BUILD_OPS=0 timeout 900 "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@" ||
        { say "skipped: pip could not install $*"; return 1; }
    echo "$want" >"$folder/.installed"
}

# set=VARIABLES tests PYTHON TEST...: what runs here is noted in the file $RAN, if there is one, for .ci/run
tests() {
    local python=$1
    shift
    say "tests with $python: $*"
    [ -z "${RAN:-}" ] || printf -- '--deselect %s\n' "$@" >>"$RAN"
    # For tests/conftest.py, which prints how a failure is repeated: with these variables and this Python.
    REPEAT="${set:+$set }$python -m pytest" "$python" -m pytest -n 2 --dist loadfile "$@" $options || failed=$?
}

options=$*
if environment .venv-transformers4 "transformers>=4.57,<5"; then
    export MEGALITE_TRANSFORMERS4_PYTHON=$PWD/.venv-transformers4/bin/python
    set="MEGALITE_TRANSFORMERS4_PYTHON=\$PWD/.venv-transformers4/bin/python" \
        tests "$PYTHON" tests/unit/checkpoint/test_hf.py::test_transformers_4_reads_it_alike
fi
# The emulator needs pkg_resources.
if environment .venv-gcs "gcsfs>=2025.3" gcp-storage-emulator "setuptools<81"; then
    tests .venv-gcs/bin/python tests/unit/checkpoint/test_gcs.py tests/unit/places/test_store_contract.py
fi
# transformers uses torchao wherever it is installed: it stays out of the other environments.
if environment .venv-torchao --no-deps "torchao>=0.18"; then
    tests .venv-torchao/bin/python tests/unit/tensor_parallel/test_torchao.py
fi
# The browser is Debian's chromium, which .ci/run installs.
if environment .venv-browser "playwright==1.65.*"; then
    tests .venv-browser/bin/python tests/unit/extras/view/test_page_in_browser.py \
        tests/unit/extras/view/test_page_of_layouts_in_browser.py
fi
if environment .venv-peers "trl>=1.16" "lm-eval[hf]>=0.4.13" "deepspeed>=0.19"; then
    export VIRTUAL_ENV=$PWD/.venv-peers
    export PATH=$VIRTUAL_ENV/bin:$PATH
    # The launchers are looked for on PATH.
    set="VIRTUAL_ENV=\$PWD/.venv-peers PATH=\$PWD/.venv-peers/bin:\$PATH" \
        tests .venv-peers/bin/python tests/unit/test_trl.py tests/parity/test_rewards.py::test_one_process_is_trls_trainer \
        tests/parity/test_lm_harness.py \
        tests/unit/extras/compat/test_with_deepspeed.py tests/unit/extras/compat/test_hjson.py \
        tests/unit/extras/compat/test_resolved_files.py tests/unit/extras/prepare/test_published_templates.py \
        tests/faults/test_launchers.py
fi
exit "${failed:-0}"
