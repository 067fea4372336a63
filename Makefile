# Headwater: `make` shows what there is. Every target sets up what it needs by itself (scripts/bootstrap.sh).
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= python3
ARGS ?=
# A plain mistake shows in the unit tests, in seconds; then what takes longest, so that no long file is left for the end.
PHASES ?= unit property resumption integration spark contract sinks simulation

export VENV

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-long lint format bench lock clean

help:  ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  \033[1m%-10s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## Make .venv from the lock, find or fetch Java, install Postgres if root (quick when done)
	@PYTHON="$(PYTHON)" scripts/bootstrap.sh

demo: setup  ## A real Postgres under load, copied, joined, delivered, killed and verified (ARGS=--keep to look around)
	@$(BIN)/headwater demo $(ARGS)

test: setup lint  ## Lint, types and all tests but the slow ones (what CI runs)
	@scripts/run-tests.sh $(PHASES)

test-unit: setup  ## Only the tests without Spark and without servers
	@scripts/run-tests.sh unit property simulation

test-long: setup lint  ## All tests, the slow ones too
	@HEADWATER_SLOW_TESTS=1 scripts/run-tests.sh $(PHASES)

lint: setup  ## ruff (lint and format) and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup  ## Let ruff format and fix what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup  ## Print the figures of docs/benchmarks.md, as one table (ARGS=--help)
	@$(BIN)/python -m benchmarks $(ARGS)

lock: setup  ## Write the lock files again from pyproject.toml (ARGS=--upgrade for newer versions)
	@scripts/lock.sh $(ARGS)

clean:  ## Remove the environment, caches and what a local run left behind
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist headwater-data spark-warehouse metastore_db derby.log
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
