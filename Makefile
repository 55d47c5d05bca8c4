# make demo   serve the embedded model at 1 bit and ask it something (ARGS=--once: then stop)
# make test   lint, type-check and test, in about ten minutes on two cores
# make test-long   the tests that take longer: every family of models, other processors and GPUs, several processes
# make test-release   slow variants of what test-long runs: before a release
# make test-research   the tests of the literature's methods, figures and retrieval in research/
# make venv   only make .venv; every target does so by itself
# make audit  licences of what is installed, and known vulnerabilities of what the locks name
# make real-models   fetch real language models into the user's cache (ARGS=smollm2: one of them)
# make wheel   a source distribution and a manylinux wheel with the C++ kernels, in dist/
# make gpu-check   check and time everything on a GPU
# make vllm-contract   what a release of vLLM decides anew about our classes (VERSION=0.34.0; default: the newest)
# make test-vllm-0.33   run what can run on the Python of a release that has no build for CPUs yet
# make bench-cpu   decode and prefill on this CPU: antkv-1bit against vLLM's own caches (ARGS="--contexts 1024")
# make lint | format | docs | lock | clean

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
# What serving needs, and all that development needs.
SERVE := .venv/.serve
VENV := .venv/.stamp
# Three on two cores, since tests wait for servers; in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n 3 -p tests.scheduling --no-loadscope-reorder --durations=30 --durations-min=10
LINTERS := lint-types lint-docs lint-imports lint-style
# The environment that is active (docs/gpu-check.md), else .venv.
PYTHON := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)/bin/python
# Nothing here needs the network once .venv stands; vLLM must not phone home from a test.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export NO_MKDOCS_2_WARNING := 1
# Containers set it. Every process would then compile all modules of vLLM again, which takes longer than importing them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo real-models test test-short test-long test-release test-research vllm-contract wheel audit gpu-check bench-cpu lint $(LINTERS) format docs lock clean

help:
	@sed -n 's/^# //;/^make/p' Makefile

$(SERVE): requirements/cpu.in requirements/cpu.lock requirements/gpu.lock pyproject.toml setup.py scripts/make_venv.sh \
		$(wildcard vllm_antkv/csrc/cpu/* vllm_antkv/csrc/cpu/tiles/*) packaging/vllm-cpu-shim/pyproject.toml
	scripts/make_venv.sh serve
	touch $@

$(VENV): $(SERVE) $(wildcard requirements/*.lock)
	scripts/make_venv.sh develop
	touch $@

venv: $(VENV)

demo: $(SERVE)
	$(BIN)/python -m scripts.demo $(ARGS)

real-models: $(SERVE)
	$(BIN)/python -m scripts.real_models $(ARGS)

# Side by side: linters one after the other beside the tests.
test: $(VENV)
	$(MAKE) --no-print-directory --jobs=2 test-short $(LINTERS)

# Tests run make themselves.
test-short: $(VENV)
	env -u MAKEFLAGS -u MAKELEVEL -u ARGS $(PYTEST) -m 'not long' $(ARGS)

test-long: $(VENV)
	env -u MAKEFLAGS -u MAKELEVEL -u ARGS $(PYTEST) -m 'long and not release' $(ARGS)

test-release: $(VENV)
	env -u MAKEFLAGS -u MAKELEVEL -u ARGS $(PYTEST) -m release $(ARGS)

test-research: $(VENV)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(addprefix research/tests/test_,literature.py compare.py orderings.py figures.py retrieval.py retrieval_prompts.py humaneval.py) $(ARGS)

vllm-contract: $(VENV)
	$(BIN)/python -m scripts.vllm_contract $(VERSION) $(ARGS)

test-vllm-%: $(VENV)
	$(BIN)/python -m scripts.vllm_lane $* -n 2 --dist loadfile $(ARGS)

wheel: $(VENV)
	$(BIN)/python scripts/wheel.py

audit: $(VENV)
	$(BIN)/pip-licenses
	for lock in requirements/*.lock; do \
		echo "$$lock:"; $(BIN)/pip-audit --disable-pip --no-deps --requirement $$lock $(ARGS) || failed=1; \
	done; exit $${failed:-0}

gpu-check:
	@$(PYTHON) -m benchmarks.gpu.device
	$(MAKE) --no-print-directory --keep-going --file benchmarks/gpu.mk PYTHON=$(PYTHON) $(ARGS)

bench-cpu: $(VENV)
	$(BIN)/python -m benchmarks.cpu_decode $(ARGS)

# Side by side, the longest first.
lint: $(VENV)
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(LINTERS)

$(LINTERS): $(VENV)

lint-types:
	$(BIN)/mypy

lint-docs:
	$(BIN)/mkdocs build --strict --quiet

lint-imports:
	$(BIN)/lint-imports

lint-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)
	$(BIN)/python scripts/written_pages.py
	$(BIN)/mkdocs build --strict

# Resolves anew: versions move to the newest ones that requirements/*.in allow. Run the tests before committing.
lock: $(VENV)
	$(BIN)/python scripts/lock.py cpu
	$(BIN)/python scripts/lock.py gpu
	for tool in dev audit browser deploy kernels loadtest tasks vision wheel; do $(BIN)/python scripts/lock.py $$tool || exit 1; done

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
