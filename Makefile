# `make` lists the targets. Each of them sets up what it needs; a second run finds it there.
# PYTHON=/path/to/python3 picks the interpreter; DEMO="--steps 50", CONVERGE="qwen3 --axis lora", BENCH="features",
# COVERAGE="qwen3", MUTANTS="--store" and TESTS="-k qk" hand options to the demo, the convergence suite, the benchmarks,
# the sweep over all model types, the planted one-line faults and pytest.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11
MATRIX := 4.57.6 5.23.0

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

# Two workers of one thread each: with more threads than cores the tests get slower, not faster. Some tests take minutes,
# so a worker without work takes over what another has not begun.
PYTEST := -m pytest -n 2 --dist worksteal --durations 10
export OMP_NUM_THREADS := 1

.PHONY: help demo converge bench coverage test test-slow test-all release-tests mutants lint format matrix newest docs dist clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

demo: $(DEMO_READY) ## train stock and fused twins on real text and compare them; the page with the curves lands in build/demo
	$(BIN)/fused-norm demo --jobs 2 --out build/demo $(DEMO)

converge: $(READY) ## hold fused training against a measured noise floor; the report lands in build/converge
	$(BIN)/fused-norm converge --out build/converge $(CONVERGE)

bench: $(READY) ## measure kernels, host time and whole models beside their peers; results land in build/bench
	$(BIN)/python -m benchmarks --out build/bench $(BENCH)

coverage: $(READY) ## count what all model types of transformers have, and what of it is fused
	$(BIN)/python -m tools.coverage $(COVERAGE)

test: $(READY) ## run the fast tests: every operator, family and command, in a few minutes
	$(BIN)/python $(PYTEST) -m "not slow" $(TESTS)

test-slow: $(READY) ## run the slow tests
	$(BIN)/python $(PYTEST) -m "slow and not release" $(TESTS)

test-all: test test-slow ## run the fast and the slow tests

release-tests: $(READY) ## run the tests that are too rare and slow for CI: other architectures, more seeds
	$(BIN)/python $(PYTEST) -m release $(TESTS)

mutants: $(READY) ## plant the stored one-line faults again; each that tests caught must be caught
	$(BIN)/python -m tools.mutants map
	$(BIN)/python -m tools.mutants again $(MUTANTS)

lint: $(READY) ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY) ## fix style and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

matrix: $(MATRIX:%=matrix-%) ## run the fast tests that touch transformers against its oldest and newest supported release

matrix-%: .matrix/%/.ready
	.matrix/$*/bin/python $(PYTEST) -m "not slow" tests/patcher tests/model_configs tests/convergence tests/planted tests/check $(TESTS)

newest: $(READY) ## run the fast tests with the newest PyTorch, Triton and transformers that the index gives
	$(BIN)/python -m venv .matrix/newest
	.matrix/newest/bin/python -m pip install --disable-pip-version-check --upgrade --upgrade-strategy eager --editable '.[dev]'
	.matrix/newest/bin/fused-norm env
	.matrix/newest/bin/python $(PYTEST) -m "not slow" $(TESTS)

docs: $(VENV)/.ready-docs ## build the documentation site, warnings being errors; it lands in build/site
	$(BIN)/mkdocs build --strict

dist: $(VENV)/.ready-release ## build wheel and sdist, check them, and try both in a clean environment
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist
	.ci/try-package dist $(BIN)/python

clean: ## remove the virtual environments and everything built
	rm -rf $(VENV) .matrix build dist .mypy_cache .pytest_cache .ruff_cache
	find src benchmarks tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ensurepip is what Debian's python3 lacks until python3-venv is installed.
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

# The demo's packages are compiled as it imports them; before the tests all are, but for files of other Pythons.
$(DEMO_READY): pyproject.toml constraints.txt
	@for python in $(PYTHON); do \
		if $$python -c '$(USABLE)' 2>/dev/null; then exec $$python -m venv $(VENV); fi; \
	done; \
	echo "None of '$(PYTHON)' is a Python 3.11 or newer with its venv module (Debian, Ubuntu: apt install python3-venv)." >&2; \
	echo "Install one, or name one: make PYTHON=/path/to/python3" >&2; \
	exit 1
	$(INSTALL) --no-compile --editable '.[demo]'
	@touch $@

$(READY): $(DEMO_READY)
	$(INSTALL) --editable '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

# What only the documentation, or only a release, needs.
$(VENV)/.ready-%: $(READY)
	$(INSTALL) --editable '.[$*]'
	@touch $@

# An environment on top of the first one holds only what another transformers needs in other versions; torch is shared.
PARENT = import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))
CHILD = import sysconfig; print(sysconfig.get_path("purelib") + "/parent.pth")

.PRECIOUS: .matrix/%/.ready
.matrix/%/.ready: $(READY)
	$(BIN)/python -m venv --without-pip --clear .matrix/$*
	@$(BIN)/python -c '$(PARENT)' >"$$(.matrix/$*/bin/python -c '$(CHILD)')"
	.matrix/$*/bin/python -m pip install --disable-pip-version-check transformers==$* accelerate datasets peft
	.matrix/$*/bin/python -c 'import transformers; assert transformers.__version__ == "$*", transformers.__file__'
	@touch $@
