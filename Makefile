# `make demo` and `make test` need Python 3.11+, pip and make, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test test-slow test-engines test-trainers lint format bench clean

help:
	@echo "make demo        a small transformer learns by GRPO through Forebay (one to two minutes; DEMO_ARGS= for forebay demo)"
	@echo "make test        all tests (about ten minutes on two quiet cores)"
	@echo "make test-slow   soak runs"
	@echo "make test-engines  tests against a live vLLM (ENGINE=sglang: SGLang) on CPU; installs it into .venv-vllm (slow)"
	@echo "make test-trainers  tests against TRL on CPU; installs it into .venv-trainers"
	@echo "make lint        ruff and mypy --strict"
	@echo "make bench       every benchmark, quick settings (BENCH_ARGS= for the full ones)"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Forebay needs Python 3.11 or newer; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)

DEMO_ARGS ?=
demo: setup
	@$(BIN)/forebay demo $(DEMO_ARGS)

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: setup
	$(BIN)/python -m pytest -m slow

ENGINE ?= vllm
test-engines:
	@$(PYTHON) tests/engines/build.py $(ENGINE)
	ENGINE=$(ENGINE) OMP_NUM_THREADS=1 .venv-$(ENGINE)/bin/python -m pytest tests/engines -v

TRAINERS := .venv-trainers
$(TRAINERS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[trainers]'
	@touch $@

test-trainers: $(TRAINERS)/.installed
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(TRAINERS)/bin/python -m pytest tests/trainers

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

BENCH_ARGS ?= --quick
bench: setup
	@status=0; for script in bench/[a-z]*.py; do \
	    echo "== $$script $(BENCH_ARGS)"; \
	    $(BIN)/python $$script $(BENCH_ARGS) || status=1; \
	done; exit $$status

clean:
	rm -rf $(VENV) .venv-vllm .venv-sglang .venv-trainers .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist bench/results
