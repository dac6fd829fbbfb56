#!/usr/bin/env bash
# Makes a virtual environment with everything that the demo and the tests need.
#   scripts/setup.sh PYTHON VENV
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
"${pip[@]}" install -q ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt -e '.[dev]'

# Headless Chromium takes the pictures of the report in the tests.
if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu >/dev/null; } ||
            echo "chromium could not be installed: the tests that look at the report will be skipped." >&2
    else
        echo "No Chromium here: the tests that look at the report will be skipped." >&2
        echo "To run them:  sudo apt-get install chromium fonts-dejavu" >&2
    fi
fi
