# Sourced by the two README commands: makes .venv (unless an environment is active) and installs megalite with extras.

say() { printf '\n== %s\n' "$*"; }

fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

# use_environment EXTRAS: sets PYTHON. Installs again only when what is asked for has changed.
use_environment() {
    local extras=$1 prefix stamp want
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        PYTHON=$VIRTUAL_ENV/bin/python
    else
        command -v python3 >/dev/null || fail "python3 is not on PATH: megalite needs Python 3.10 or newer; install it"
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            fail "$(python3 -V): megalite needs Python 3.10 or newer; install it, or activate an environment that has it"
        if [ ! -x .venv/bin/python ]; then
            say "making the environment .venv"
            python3 -m venv .venv || fail "python3 -m venv failed: it needs the venv module; install python3-venv"
        fi
        PYTHON=$PWD/.venv/bin/python
    fi
    prefix=$("$PYTHON" -c 'import sys; print(sys.prefix)')
    # Nothing is left outside the checkout but pip's cache.
    export MPLCONFIGDIR=$prefix/var/matplotlib
    stamp=$prefix/.megalite-$extras
    want=$(cat pyproject.toml constraints.txt setup.py | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
        say "installing megalite[$extras] and what it needs (a minute or two the first time)"
        # On Linux without CUDA a plain torch would bring gigabytes of CUDA: the pinned version comes first, alone.
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -c constraints.txt torch "setuptools>=77" ||
            fail "torch could not be installed: see pip's message above; check the network or the package index"
        # Not isolated, so that the C++ kernels find torch (and CUDA's, where there is a GPU to run them); without a
        # compiler the install goes on and every op keeps its torch form.
        command -v nvidia-smi >/dev/null || export MEGALITE_CUDA=${MEGALITE_CUDA:-0}
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
            --no-build-isolation -e ".[$extras]" ||
            fail "megalite could not be installed: see pip's message above; check the network or the package index"
        echo "$want" >"$stamp"
    fi
}
