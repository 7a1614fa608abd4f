# Every target sets up what it needs. `make demo` and `make test` are all that a newcomer types.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A vLLM that runs on CPUs, for the end-to-end test.
ENGINE := .venv-engine

.DEFAULT_GOAL := help
.PHONY: help demo test sweep lint format golden bench gpu-plans gpu clean

help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

$(VENV)/.ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(ENGINE)/.ready: requirements-engine.lock pyproject.toml
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(ENGINE)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-engine.lock
	$(ENGINE)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(VENV)/.ready ## Build and show a plan for Qwen3-0.6B
	$(BIN)/m2ncompile build plans/qwen3-0.6b-fsdp4-tp2.toml --output build
	$(BIN)/m2ncompile show build/qwen3-0.6b-fsdp4-tp2.plan.json
	$(BIN)/m2ncompile explain build/qwen3-0.6b-fsdp4-tp2.plan.json model.layers.0.mlp.down_proj.weight

test: $(VENV)/.ready $(ENGINE)/.ready ## Run the tests
	M2NCOMPILE_ENGINE=$(abspath $(ENGINE))/bin/python $(BIN)/python -m pytest -m "not slow"

sweep: $(VENV)/.ready ## Verify every model on more layouts (slow)
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.ready ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(VENV)/.ready ## Rebuild the checked-in plans
	$(BIN)/m2ncompile build plans/*.toml --no-cache --output plans

bench: $(VENV)/.ready ## Print the tables of docs/figures.md (half an hour)
	$(BIN)/python tools/bench_build.py
	$(BIN)/python tools/bench_routes.py
	$(BIN)/python tools/bench_run.py

gpu-plans: $(VENV)/.ready ## Build what `make gpu` runs, into build/gpu
	$(BIN)/python tools/gpu.py --prepare build/gpu

gpu: ## Run tests and benchmarks on GPUs, in python3's environment (torch with CUDA, m2ncompile[nccl])
	$(PYTHON) tools/gpu.py build/gpu --results build/gpu-results.md

clean: ## Remove what the targets made
	rm -rf $(VENV) $(ENGINE) build dist .pytest_cache .mypy_cache .ruff_cache
