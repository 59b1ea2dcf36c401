# `make demo` and `make test` do everything on a fresh machine: they make .venv and install into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test docs bench endure lint format

demo: $(VENV)/.installed
	$(BIN)/everstep run.name=demo

# Two files of tests at a time: most of a real run is waiting. A file's tests stay in one process.
test: $(VENV)/.installed-dev
	tests/install_system_packages.sh
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

docs: $(VENV)/.installed
	$(BIN)/everstep settings > docs/settings.md

bench: $(VENV)/.installed-dev
	$(BIN)/python -m tests.benchmarks.saving --json build/saving.json
	$(BIN)/python -m tests.benchmarks.resuming --json build/resuming.json
	$(BIN)/python -m tests.benchmarks.streaming
	$(BIN)/python -m tests.benchmarks.starting
	$(BIN)/python -m tests.benchmarks.seeing
	$(BIN)/python -m tests.benchmarks.exporting --json build/exporting.json
	$(BIN)/python -m tests.benchmarks.surviving --json build/surviving.json

# Chains of attempts that are killed at random moments, as long as you like; a seed is drawn.
ATTEMPTS ?= 1000
RUN_ATTEMPTS ?= 25
endure: $(VENV)/.installed-dev
	$(BIN)/python -m tests.protocol.driver --attempts $(ATTEMPTS)
	$(BIN)/python -m tests.protocol.driver --attempts $(ATTEMPTS) --zombies
	$(BIN)/python -m tests.endurance --attempts $(RUN_ATTEMPTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck .ci/run slurm/*.sbatch tests/*.sh

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --editable . --constraint constraints.txt
	touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --editable '.[dev]' --constraint constraints.txt
	touch $@ $(VENV)/.installed
