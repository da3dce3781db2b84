# Everything runs in .envs/verl, which the first target that needs it creates (Linux, Python 3.11, no GPU).
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && { echo $$p; break; }; done || true)
PY := .envs/verl/bin/python
ARGS ?=
# One thread per process: more of them only fight over the cores, between Ray's workers and with the engine.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help env quickstart test lint format unit engine-test trainer-test bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 18

env:  ## create or update .envs/verl (instant when it is current)
	@$(or $(PYTHON),python3) tools/make_env.py

quickstart: env  ## a GRPO run on this CPU with speculative rollouts, about 15 minutes; ARGS="--steps 10 --plain" …
	@$(PY) examples/quickstart/run.py $(ARGS)

test: lint unit engine-test trainer-test  ## everything, cheapest first; stops at the first part that fails

lint: env  ## ruff, mypy and the import arrows
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.envs/verl/bin/lint-imports

format: env  ## let ruff repair and format the sources
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

unit: env  ## tests without an engine (seconds)
	$(PY) -m pytest tests/unit $(ARGS)

engine-test: env  ## tests with a real vLLM engine (minutes)
	$(PY) -m pytest tests/engine -m engine $(ARGS)

trainer-test: env  ## tests with a real trainer (minutes)
	$(PY) -m pytest tests/trainers -m trainer $(ARGS)

bench: env  ## benchmarks under examples/bench (about 20 minutes on an idle machine)
	$(PY) examples/bench/run_all.py $(ARGS)

clean:  ## remove caches and runs; the environment stays (rm -r .envs)
	rm -rf .cache runs outputs build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.envs/*' -prune -exec rm -rf {} +
