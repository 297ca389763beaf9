# Sourced by the two README commands: creates .venv (unless an environment is active) and installs megalite with extras.

say() { printf '\n== %s\n' "$*"; }

fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

# use_environment EXTRAS: sets PYTHON. Installs again only if the requirements have changed.
use_environment() {
    local extras=$1 prefix stamp want
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        PYTHON=$VIRTUAL_ENV/bin/python
        [ -x "$PYTHON" ] || fail "VIRTUAL_ENV=$VIRTUAL_ENV: bin/python is missing there; run deactivate, or activate another"
    else
        command -v python3 >/dev/null || fail "python3 is not on PATH: megalite requires Python 3.10 or newer; install it"
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            fail "$(python3 -V): megalite requires Python 3.10 or newer; install it, or activate an environment that has it"
        if [ ! -x .venv/bin/python ]; then
            say "creating the environment .venv"
            python3 -m venv .venv || fail "python3 -m venv failed: it requires the venv module; install python3-venv"
        fi
        PYTHON=$PWD/.venv/bin/python
    fi
    prefix=$("$PYTHON" -c 'import sys; print(sys.prefix)')
    # Nothing is left outside the checkout but pip's cache.
    export MPLCONFIGDIR=$prefix/var/matplotlib
    stamp=$prefix/.megalite-$extras
    want=$(cat pyproject.toml constraints.txt setup.py csrc/*/* | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
        say "installing megalite[$extras] and its dependencies (a minute or two the first time)"
        # What the build needs besides a compiler (pybind11) pip fetches for it. CUDA kernels only with a GPU to run them.
        command -v nvidia-smi >/dev/null || export MEGALITE_CUDA=${MEGALITE_CUDA:-0}
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]" ||
            fail "megalite could not be installed: see pip's message above; check the network or the package index"
        echo "$want" >"$stamp"
    fi
}
