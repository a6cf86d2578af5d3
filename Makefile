# Two commands matter on a fresh machine: `make demo` and `make test`. Both set up what they need first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.baton-setup
PORT ?= 8000
# Many tests wait for processes. A file's tests stay together: what they share is dear to start.
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo serve test check bench clean

help:  ## show this
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## make .venv and install everything (idempotent)

$(STAMP): pyproject.toml setup.py $(wildcard kernels/cpu_ops/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Baton needs Python 3.11 or later, this is " + sys.version.split()[0])'
	@echo "setup 1/3: a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "setup 2/3: torch (the largest part; a minute or some, by the network)"
	@$(BIN)/python -m pip install --quiet torch==2.13.0
	@echo "setup 3/3: Baton, its C kernels and the tools for tests"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: setup  ## start a local cluster, let an agent on the shipped model fix a bug in it, stop
	@PYTHONSAFEPATH=1 $(BIN)/baton demo

serve: setup  ## start a local cluster on the shipped model and keep it running (PORT=8000)
	@PYTHONSAFEPATH=1 $(BIN)/baton up --port $(PORT)

test: setup  ## run the tests
	$(BIN)/python -m pytest $(TWO_AT_A_TIME)

check: setup  ## format, lint, types, import contracts, tests
	@VENV=$(VENV) scripts/check

bench: setup  ## run the benchmarks of docs/benchmarks.md (minutes)
	@$(BIN)/baton bench handoff
	@$(BIN)/baton bench prefill
	@$(BIN)/baton bench decode

clean:  ## remove the environment and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
