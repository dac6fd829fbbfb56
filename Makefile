# Every target makes .venv first, so each works on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup demo test test-ray test-vllm style lint docs bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	bash scripts/setup.sh $(PYTHON) $(VENV)
	touch $(STAMP)

demo: setup
	$(BIN)/python scripts/demo.py

style: setup
	$(BIN)/ruff check src tests scripts benchmarks
	$(BIN)/ruff format --check -q src tests scripts benchmarks
	$(BIN)/mypy

lint: style
	$(BIN)/lint-imports
	$(BIN)/python scripts/docs.py --check

# The tests check the layers and the generated parts too: test_the_layers_hold, test_no_generated_part_is_stale.
test: style
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

# Ray is large, and few need it: its tests have an environment of their own.
RAY := .venv-ray
$(RAY)/.ready: pyproject.toml constraints.txt
	EXTRAS=dev,ray bash scripts/setup.sh $(PYTHON) $(RAY)
	touch $(RAY)/.ready

test-ray: $(RAY)/.ready
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest tests/samplers

# vLLM pins packages that .venv has in other versions, so it has an environment of its own.
test-vllm: .venv-vllm/.ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/engines/test_vllm.py

.venv-vllm/.ready: pyproject.toml constraints.txt scripts/setup_vllm.sh
	bash scripts/setup_vllm.sh $(PYTHON) .venv-vllm
	touch .venv-vllm/.ready

docs: setup
	$(BIN)/python scripts/docs.py

bench: setup
	bash benchmarks/run.sh

clean:
	rm -rf $(VENV) $(RAY) .venv-vllm runs site
