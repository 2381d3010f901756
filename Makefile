# Everything a checkout needs, with its set-up: `make demo`, `make test`. `make help` lists the rest.
#
#   make setup PYTHON=python3.12      use another interpreter for .venv (3.11 or newer)
#   make setup TORCH='torch>=2.8'     for a GPU: take torch as PyPI has it, with CUDA
#   make setup TORCH=torch TORCH_INDEX=https://download.pytorch.org/whl/rocm7.1

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
# On PyPI the same version is the CUDA build, several gigabytes larger. The `+cpu` build of this
# index counts as newer, so pip prefers it.
CPU_TORCH := torch==2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
ifdef TORCH
# The first line marks a choice, which holds until another is made: `make test` after
# `make setup TORCH=...` must not bring the CPU build back.
WANTED := '\# chosen by TORCH=' $(if $(TORCH_INDEX),'--extra-index-url $(TORCH_INDEX)') '$(TORCH)'
KEEPS_CHOICE := false
else
WANTED := '--extra-index-url $(CPU_INDEX)' '$(CPU_TORCH)'
KEEPS_CHOICE := grep -qs '^\# chosen'
endif
EXTRAS := daemon,dev,quantization
# How many test processes run side by side; 0 for one process, in which a debugger works.
SIDE_BY_SIDE ?= logical

VENV := .venv
BIN := $(VENV)/bin
ENVIRONMENT := $(VENV)/pyvenv.cfg
TORCH_WANTED := $(VENV)/.torch-wanted
TORCH_INSTALLED := $(VENV)/.torch-installed
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help setup demo test lint format pytest wheel clean always

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Make .venv and install everything into it

demo: $(INSTALLED) ## Start a daemon, draw pictures through it, show them and its figures
	@$(BIN)/python tools/demo.py

test: $(INSTALLED) ## Lint, types, import layers and all tests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory pytest

lint: $(INSTALLED) ## Lint, format check, strict types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

pytest: $(INSTALLED) ## The tests alone; make pytest ARGS='-k wheel' for some of them
	@# One thread each: the tests' models are too small for more, and their daemons want the cores too.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(SIDE_BY_SIDE) --dist loadfile $(ARGS)

format: $(INSTALLED) ## Format the code and sort its imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(INSTALLED) ## Build the wheel into dist/
	$(BIN)/python -m hatchling build -t wheel

clean: ## Remove .venv and all that was built or cached
	rm -rf $(VENV) .cache dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(ENVIRONMENT):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "offloadd needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Say which to use: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "No virtual environment could be made; on Debian: apt install python3-venv" >&2; exit 1; }

# Written anew only when it says something else, so that asking again for the same torch is free.
$(TORCH_WANTED): always | $(ENVIRONMENT)
	@printf '%s\n' $(WANTED) >$@.new
	@if $(KEEPS_CHOICE) $@ || cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# Before the rest: left to itself, `torch>=2.8` would fetch the CUDA build.
# Few retries, since the index is only a preference: without it pip goes on to the others.
$(TORCH_INSTALLED): $(TORCH_WANTED)
	$(PIP) install --retries 2 --requirement $(TORCH_WANTED)
	@touch $@

$(INSTALLED): $(TORCH_INSTALLED) pyproject.toml
	$(PIP) install --editable '.[$(EXTRAS)]'
	@touch $@
