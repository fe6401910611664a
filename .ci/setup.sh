#!/bin/sh
# Sets up the virtual environment and the default model; cheap when nothing has changed.
# Usage: .ci/setup.sh PYTHON VENV.  SAMEBITS_TORCH overrides what pip installs for PyTorch, for example
# SAMEBITS_TORCH="torch==2.13.0 --index-url https://your.index/cu130" for a CUDA build.
set -eu
python=$1
venv=$2

fail() {
    echo "setup: $1" >&2
    exit 1
}

command -v "$python" >/dev/null || fail "no $python; install it: apt-get install python3 python3-venv python3-pip"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed, found $("$python" -V 2>&1); install one and call make PYTHON=python3.11"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "Python has no venv or pip; install them: apt-get install python3-venv python3-pip"
command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    fail "no C++ compiler for the kernels; install one: apt-get install g++"

stamp=$venv/.samebits-setup
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# PyTorch as a CPU build: what PyPI serves for Linux brings gigabytes of CUDA. A wheel that pip already finds without
# an index (its find-links, an offline mirror) wins; else PyTorch's own CPU index is asked, whose "+cpu" builds sort
# before the plain version. SAMEBITS_TORCH overrides all of it.
install_torch() {
    torch="torch==2.13.0"
    if [ -n "${SAMEBITS_TORCH:-}" ]; then
        # shellcheck disable=SC2086 # several words on purpose
        pip install --quiet $SAMEBITS_TORCH
    elif pip install --quiet --dry-run --no-index --no-deps "$torch" >/dev/null 2>&1; then
        pip install --quiet "$torch"
    else
        pip install --quiet "$torch" --extra-index-url https://download.pytorch.org/whl/cpu
    fi
}

want=$(cat pyproject.toml .ci/setup.sh; echo "${SAMEBITS_TORCH:-}"; pwd; "$python" -V)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
    echo "setting up $venv (a few minutes the first time)" >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' || install_torch
    pip install --quiet --editable '.[test]'
    printf '%s' "$want" >"$stamp"
fi
"$venv/bin/python" -m engines.bundled.models.fetch
