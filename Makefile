# `make help` lists the targets. VENV and PYTHON may be given: make test VENV=elsewhere PYTHON=python3.12
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?=
EXTRAS := test,plot,dev,docs
# Gloo ranks share the cores: one thread each is faster than all of them fighting.
export OMP_NUM_THREADS ?= 1
# Subprocesses see this checkout, also where one environment serves several.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(shell printf %s '$(CURDIR)' | cksum | cut -d' ' -f1)
TORCH = $(shell grep '^torch==' constraints.txt)
CODE := lightning_par tests $(wildcard benchmarks docs examples)
# Tests start many processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
PYTEST_ARGS ?=
# Workers of the tests: 3 on two cores are 15 % faster, and show more races of gloo.
WORKERS ?= 2
# Where the few tests are that run alone; nothing else has to be collected for them.
ALONE = $(shell grep -rl --include='*.py' 'mark\.alone' tests)
# What does not run on the simulated device: processes that a test starts by itself, on the CPU; rehearsals, which are
# there, too; several worlds at once, whose requests cannot be told apart; the files that a step enters, counted there.
ON_HOST = $(wildcard tests/distributed/hosts/*.py) $(addprefix tests/distributed/,profiling/test_rehearsal.py \
	islands/test_trainer.py test_step_value.py)
SIMULATED = tests/cuda_simulation tests/gpu \
	$(filter-out $(ON_HOST),$(sort $(shell find tests/distributed -name 'test_*.py')))
# By itself: its ranks are copies of the process, which must not have computed gradients on a device.
SIMULATED_ALONE = tests/unit/verification/test_rehearse.py
# The part of it that continuous integration runs.
SIMULATED_SHORT = tests/cuda_simulation tests/gpu/test_single_device.py tests/gpu/test_offload.py \
	$(addprefix tests/distributed/,test_mixed_precision.py faults/test_nonfinite.py)

# The oldest versions that pyproject.toml allows, except those of torch (gigabytes) and safetensors
# (transformers, which the tests use, wants a newer one).
OLDEST = $(shell sed -nE 's/^ *"(jsonargparse|lightning|torchmetrics)[^>]*>=([0-9.]+).*/\1==\2/p' pyproject.toml)

.PHONY: help setup demo test test-together test-alone test-all test-cuda-sim test-cuda-sim-short minimal lint format types bench zoo bench-gpu pictures docs docs-serve package clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | column -t -s '|'

setup: $(STAMP) ## Make the environment (.venv) with the pinned versions

$(STAMP): pyproject.toml constraints.txt
	@candidates="$(PYTHON)"; \
	if [ -z "$$candidates" ]; then candidates="python3 python3.13 python3.12 python3.11"; fi; \
	if [ -x "$(BIN)/python" ]; then echo "setup: using $(VENV)"; exit 0; fi; \
	for python in $$candidates; do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "setup: $$("$$python" -V) makes $(VENV)"; \
			"$$python" -m venv "$(VENV)" && exit 0; \
			rm -rf "$(VENV)"; \
			echo "setup: '$$python -m venv' failed; install Python's venv module" \
				"(on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; \
		fi; \
	done; \
	echo "setup: Python 3.11 or newer is needed. Tried: $$candidates." \
		"python3 is: $$(python3 -V 2>&1). Use: make setup PYTHON=path-to-python" >&2; exit 1
	@echo "setup: installing $(TORCH) and the rest of constraints.txt (minutes, the first time)"
	$(BIN)/python -m pip install -qq -c constraints.txt setuptools "$(TORCH)"
	$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e ".[$(EXTRAS)]"
	@touch "$@"

demo: $(STAMP) ## Train a small GPT on four ranks (tensor 2 x pipeline 2) and show the result
	$(BIN)/python -m lightning_par.demo

test: $(STAMP) ## Run the tests (PYTEST_ARGS="tests/unit -k plan" for a part)
	@status=0; \
	$(MAKE) --no-print-directory test-together || status=1; \
	$(MAKE) --no-print-directory test-alone || status=1; \
	exit $$status

test-together: $(STAMP)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not alone and not exhaustive" $(PYTEST_ARGS) || [ $$? -eq 5 ]

test-alone: $(STAMP)
	@$(BIN)/python -m pytest -m "alone and not exhaustive" $(or $(PYTEST_ARGS),$(ALONE)) || [ $$? -eq 5 ]

test-all: test ## Run the tests, and then every cell of the large matrices (long)
	@status=0; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "exhaustive and not alone" $(PYTEST_ARGS) || [ $$? -eq 5 ] || status=1; \
	$(BIN)/python -m pytest -m "exhaustive and alone" $(or $(PYTEST_ARGS),$(ALONE)) || [ $$? -eq 5 ] || status=1; \
	exit $$status

test-cuda-sim: $(STAMP) ## Run tests on a simulated CUDA device (needs g++; compiles it the first time)
	@status=0; export CUDA_SIMULATION=1; \
	$(BIN)/python -m pytest -rs -n 2 --dist worksteal -m "not alone and not exhaustive" $(or $(PYTEST_ARGS),$(SIMULATED)) || status=1; \
	$(if $(PYTEST_ARGS),,$(BIN)/python -m pytest -rs -m "not exhaustive" $(SIMULATED_ALONE) || status=1;) exit $$status

test-cuda-sim-short: ## Run the part of these tests that CI runs
	@$(MAKE) --no-print-directory test-cuda-sim PYTEST_ARGS="$(SIMULATED_SHORT)"

minimal: $(STAMP) ## Check the oldest versions of Lightning and of what it needs, if they can be installed
	@rm -rf build/minimal
	@if $(BIN)/python -m pip install -qq --no-deps --target build/minimal $(OLDEST); then \
		PYTHONPATH="$(CURDIR)/build/minimal:$$PYTHONPATH" $(BIN)/python -m pytest -q \
			tests/unit/test_upstream.py tests/unit/test_registration.py tests/unit/test_cli.py; \
	else echo "minimal: not checked, as pip cannot install $(OLDEST)" >&2; fi

lint: $(STAMP) ## Check style and formatting
	$(BIN)/python -m ruff check $(CODE)
	$(BIN)/python -m ruff format --check $(CODE)

format: $(STAMP) ## Format the code and fix what can be fixed
	$(BIN)/python -m ruff check --fix $(CODE)
	$(BIN)/python -m ruff format $(CODE)

types: $(STAMP) ## Check types: the package with mypy (strict), a user's project also with pyright
	$(BIN)/python -m mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python

bench: $(STAMP) ## Run every benchmark that this machine can run
	@for script in $(sort $(filter-out benchmarks/gpu_%,$(wildcard benchmarks/[a-z]*.py))); do \
		echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

zoo: $(STAMP) ## Score checkers on the silent faults of benchmarks/zoo (less than ten minutes); draws docs/pictures/zoo.svg
	$(BIN)/python -m benchmarks.zoo --report benchmarks/zoo/found.json
	$(BIN)/python docs/drawing/draw_zoo.py

bench-gpu: $(STAMP) ## Run tests/gpu and every GPU benchmark (20 minutes at most); adds a table to RESULTS.md
	$(BIN)/python benchmarks/gpu_all.py $(if $(DEVICES),--devices $(DEVICES)) $(BENCH_ARGS)

pictures: $(STAMP) ## Draw the pictures of the guides anew
	@for script in $(sort $(wildcard docs/drawing/draw*.py)); do \
		echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

docs: $(STAMP) ## Build the site (build/versions); check every link, and in a Chromium how every page looks
	$(BIN)/python docs/site/make_pages.py
	$(BIN)/zensical build --clean --strict
	$(BIN)/python docs/site/check_site.py build/site
	$(BIN)/python docs/site/check_rendered.py "$$($(BIN)/python docs/site/add_version.py build/site build/versions)"

docs-serve: $(STAMP) ## Show the site on this machine
	$(BIN)/python docs/site/make_pages.py
	$(BIN)/zensical serve

package: $(STAMP) ## Build the sdist and the wheel (dist/), and check them
	$(BIN)/python -m pip install -qq -c constraints.txt build twine setuptools
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

clean: ## Remove caches and build output; keep the environment and the runs
	rm -rf build dist ./*.egg-info .pytest_cache .ruff_cache .mypy_cache
	find lightning_par tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
