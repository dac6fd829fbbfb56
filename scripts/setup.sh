#!/usr/bin/env bash
# Makes a virtual environment with everything that the demo and the tests need.
#   scripts/setup.sh PYTHON VENV      EXTRAS=dev,ray: what of pyproject.toml's extras, dev alone unless set
set -euo pipefail
python=$1
venv=$2

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "posttrain needs Python 3.11 or newer; $python is $("$python" --version 2>&1 || echo missing)." >&2
    echo "Give another one with: make PYTHON=/path/to/python3.11" >&2
    exit 2
fi

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
    else
        echo "This Python cannot make virtual environments: install the package python3-venv." >&2
        exit 2
    fi
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

# The build of PyTorch for processors alone is far smaller; where an index offers it, or where there
# is a GPU, pip's own choice is right. TORCH_INDEX names another index for torch if one is wanted.
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)
"${pip[@]}" install -q --upgrade "pip>=24"
"${pip[@]}" install -q ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt -e ".[${EXTRAS:-dev}]"

# Programs of the system: Chromium takes the pictures of the report in the tests, bubblewrap holds the
# programs that the code and proof verifiers run, and Coq checks proofs.
missing=()
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
    missing+=(chromium fonts-dejavu)
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v coqc >/dev/null || missing+=(coq)
[ -x /usr/bin/python3 ] || missing+=(python3) # boxes need an interpreter that not only root can read
if [ ${#missing[@]} -gt 0 ] && [ "$(uname)" = Linux ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; } ||
            echo "${missing[*]} could not be installed: the tests that need them will be skipped." >&2
    else
        echo "Not here: ${missing[*]}. The tests that need them will be skipped." >&2
        echo "To run them:  sudo apt-get install ${missing[*]}" >&2
    fi
fi
