# Every target makes .venv first, so each works on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# One more than there are cores: tests that wait for deadlines and for killed processes leave a core free.
WORKERS = $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

.PHONY: setup demo test test-all check test-ray test-vllm test-verifiers test-openenv test-aarch64 lock style lint docs bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	bash scripts/setup.sh $(PYTHON) $(VENV)
	touch $(STAMP)

# One seed until 80 % are right; SEEDS=3 FULL=1 makes the demo's table of benchmarks/RESULTS.md.
SEEDS ?= 1
FULL ?=
demo: setup
	$(BIN)/posttrain demo --seeds $(SEEDS) $(if $(FULL),--full)

style: setup
	$(BIN)/ruff check src tests scripts benchmarks examples
	$(BIN)/ruff format --check -q src tests scripts benchmarks examples
	$(BIN)/mypy

lint: style
	$(BIN)/lint-imports
	$(BIN)/python scripts/docs.py --check

# An empty value turns it off: every process that a test starts would compile what it imports again.
export PYTHONDONTWRITEBYTECODE =
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Linters, types, and of the tests one variant for each choice: 12 minutes on two cores, what .ci/run calls. The
# tests check the layers and the generated parts too: test_the_layers_hold, test_no_generated_part_is_stale.
# Files go out in their order: by their number of tests, the few long ones would be left to one core at the end.
test: style
	$(PYTEST) -m "not full"

# Every test: all architectures, each product of choices, whole runs of which `make test` has one of a kind, and more
# moments at which runs are killed; the shapes of the mathematics' arguments are checked in all (tests/conftest.py).
test-all: style
	$(PYTEST)

# What a contributor asks after each change, in three minutes on two cores: linters, types, and the tests of the
# mathematics, the methods, recipes, pages and layers, and of whole runs from Python. Nothing of them is drawn by chance.
FAST := math methods recipe base/test_chat_tokens.py base/test_spelling.py base/test_verdict.py api/test_api.py \
	commands/test_bad_preferences.py docs/test_coming_from.py docs/test_docs.py models/test_weights.py \
	loop/test_own_code.py test_layers.py test_testing.py

check: style
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not full" $(addprefix tests/,$(FAST))

# Ray is large, and few need it: its tests have an environment of their own.
RAY := .venv-ray
$(RAY)/.ready: pyproject.toml constraints.txt
	EXTRAS=dev,ray bash scripts/setup.sh $(PYTHON) $(RAY)
	touch $(RAY)/.ready

test-ray: $(RAY)/.ready
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest tests/rollout

# vLLM pins packages that .venv has in other versions, so it has an environment of its own.
test-vllm: .venv-vllm/.ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/engines/test_vllm.py tests/engines/test_vllm_server.py

.venv-vllm/.ready: pyproject.toml constraints.txt scripts/setup_vllm.sh
	bash scripts/setup_vllm.sh $(PYTHON) .venv-vllm
	touch .venv-vllm/.ready

# The libraries verifiers and openenv want different versions of mcp, and the former an older openai than .venv has.
test-verifiers: .venv-verifiers-envs/.ready
	.venv-verifiers-envs/bin/python -m pytest -n 0 tests/posttrain_envs/test_verifiers_library.py

test-openenv: .venv-openenv/.ready
	.venv-openenv/bin/python -m pytest -n 0 tests/posttrain_envs/test_openenv.py

.venv-verifiers-envs/.ready .venv-openenv/.ready: .venv-%/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -q --disable-pip-version-check --no-input \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-e '.[$*]' pytest pytest-timeout pytest-xdist hypothesis jaxtyping beartype
	touch $@

# The compiled kernels on another processor: built for aarch64 as well, run under qemu, compared with this machine's.
AARCH64 := g++-aarch64-linux-gnu qemu-user
test-aarch64: setup
	@(command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64) >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends $(AARCH64); } || \
		{ echo "To run this test:  sudo apt-get install $(AARCH64)" >&2; exit 2; }
	$(BIN)/python -m pytest -n 0 -p no:cacheprovider tests/models/test_aarch64.py

# The versions of constraints.txt anew: the newest that pyproject.toml allows. Run `make test-all` before they are kept.
lock:
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/python -m pip install -q --disable-pip-version-check --no-input \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[dev]'
	{ head -n 1 constraints.txt; .venv-lock/bin/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//'; } > .venv-lock/lock.txt
	mv .venv-lock/lock.txt constraints.txt
	rm -rf .venv-lock

# The site: generated parts, notebooks with what they print, and Zensical in an environment of its own.
DOCS := .venv-docs
$(DOCS)/.ready: scripts/docs-requirements.txt | $(STAMP)
	$(BIN)/python -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q --disable-pip-version-check --no-input -r scripts/docs-requirements.txt
	touch $(DOCS)/.ready

docs: setup $(DOCS)/.ready
	$(BIN)/python scripts/docs.py
	$(BIN)/python scripts/pages.py play .site
	$(DOCS)/bin/python scripts/pages.py stage .site
	$(DOCS)/bin/zensical build --clean --strict -f mkdocs.yml
	$(DOCS)/bin/python scripts/pages.py check site
	@echo "open site/index.html; for the search, which browsers refuse to files: $(PYTHON) -m http.server -d site"

bench: setup
	bash benchmarks/run.sh

clean:
	rm -rf $(VENV) $(RAY) $(DOCS) .venv-vllm .venv-verifiers-envs .venv-openenv runs site .site
