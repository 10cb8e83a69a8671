# Everything a clone needs: `make demo` to see it work, `make test` to check it. `make help` lists the rest.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test lint types bench figures fuzz wheel clean

# The first Python that is new enough; `make PYTHON=/path/to/python demo` overrides it.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NATIVE := $(wildcard src/gncprior/native/*.cpp src/gncprior/native/*.hpp)
INPUTS := pyproject.toml setup.py constraints.txt $(NATIVE)
# Stamps: an environment is touched again only when one of INPUTS changed.
VENV := .venv/.stamp-venv
USE := .venv/.stamp-use
DEV := .venv/.stamp-dev
FIGURES := mixture parameters convexity schedules attainment gallery sampling

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

demo: $(USE) ## install into .venv and run the main job; says where its picture is
	@$(BIN)/gncprior demo --out out/demo

test: $(DEV) lint types ## lint, types and all tests
	$(BIN)/python -m pytest

lint: $(DEV) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV) ## mypy
	$(BIN)/mypy

figures: $(USE) ## every figure at full size, into out/figures
	@for f in $(FIGURES); do $(BIN)/gncprior figure $$f --out out/figures || exit; done

bench: $(DEV) ## measure speed and quality (benchmarks/, not part of the tests)
	@shopt -s nullglob; for b in benchmarks/bench_*.py; do echo "== $$b"; $(BIN)/python $$b || exit; done; \
	[ -d benchmarks ] || echo "No benchmarks yet: they will live in benchmarks/bench_*.py."

fuzz: $(DEV) ## 100 000 damaged picture files; 'make test' tries 2000
	$(BIN)/python tests/fuzz.py

wheel: $(DEV) ## source archive and wheel, into dist/
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --outdir dist .

clean: ## remove everything that was made here, .venv included
	rm -rf .venv build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	rm -f src/gncprior/native/_kernels_*.* src/gncprior/native/build.txt
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Some systems ship Python without ensurepip; their pip can then fill the environment from outside.
$(VENV):
	@[ -n "$(PYTHON)" ] || { echo "gncprior needs Python 3.11 or later: name one with make PYTHON=..." >&2; exit 2; }
	@echo "Making .venv with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv .venv >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@touch $@

$(USE): $(INPUTS) | $(VENV)
	@echo "Installing gncprior and torch into .venv (once; this can take some minutes) ..."
	@$(PIP) -e '.[plot]'
	@touch $@

$(DEV): $(INPUTS) | $(VENV)
	@echo "Installing gncprior and its development tools into .venv (once; this can take some minutes) ..."
	@$(PIP) -e '.[dev]'
	@touch $(USE) $@
