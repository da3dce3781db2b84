# Everything runs in .envs/verl and .envs/openrlhf; the first target that needs one creates it (Linux, Python 3.11 to 3.13, no GPU).
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo $$p; break; }; done || true)
PY := .envs/verl/bin/python
ARGS ?=
TRAINER ?= verl
GPU_PYTHON ?= python
JOBS ?=
SHAPES ?=
MAKE_ENV := $(or $(PYTHON),python3) tools/make_env.py
CHECK := $(or $(PYTHON),python3) tools/check.py
# One thread per process that sleeps while it waits: all else fights over the cores, between Ray's workers and with the engine.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export NUMBA_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# What torch compiles for the CPU is the same in every run; a run with a /tmp of its own would compile it again.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor
# Without bytecode each of a hundred processes would compile the same libraries again, half of its time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: guards help env verl-env quickstart real test times lint format docs unit mutants engine-test trainer-test gpu-test conformance soak versions bench gpu-hour card-pieces clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 18

env:  ## create or update .envs/$(TRAINER) (instant when it is current)
	@$(MAKE_ENV) $(TRAINER)

quickstart: env  ## a GRPO run on this CPU with speculative rollouts, about 4 minutes; TRAINER=openrlhf or trl, ARGS="--steps 20 --plain" …
	@.envs/$(TRAINER)/bin/python examples/quickstart/run.py --trainer $(TRAINER) $(ARGS)

real:  ## GRPO of SmolLM2-135M in TRL on this CPU, with the flag and without, in turns; ARGS="--sharpness 1 --steps 12" …
	@$(MAKE_ENV) trl
	@.envs/trl/bin/python examples/real/run.py $(ARGS)

verl-env:
	@$(MAKE_ENV) verl

test:  ## everything, side by side, with a table at the end; JOBS=1 for one after the other
	@$(CHECK) $(if $(JOBS),--jobs $(JOBS)) -- $(ARGS)

times:  ## print the table of the last `make test` again
	@$(CHECK) --times

lint:  ## ruff, mypy, the import arrows, the documentation site, and whether each mistake of `make mutants` can still be made
	@$(CHECK) --foreground lint

format: verl-env  ## let ruff repair and format the sources
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: verl-env  ## build the documentation site into site/; a link that leads nowhere fails
	@$(PY) tools/docs_site.py

unit:  ## tests without an engine, but for the slow ones (minutes); ARGS="-k harvest" for some, of all
	@$(CHECK) --foreground unit -- $(if $(ARGS),$(ARGS),-m "not slow")

mutants: verl-env  ## make each known mistake in a copy, and see the unit tests notice it (minutes); ARGS="-k law"
	@PYTHONPATH=$(CURDIR)/tests:$(CURDIR)/testing:$$PYTHONPATH $(PY) -m mutants.run $(ARGS)

guards: verl-env  ## simulated runs with known truth under each guard: false alarms, misses, time to notice; ARGS="--only guard --runs 50"
	PYTHONPATH=tests:$$PYTHONPATH $(PY) -m simulators.run $(ARGS)

engine-test:  ## tests with a real vLLM engine (minutes)
	@$(CHECK) --foreground engine -- $(ARGS)

gpu-test:  ## tests that need a GPU, ten minutes, in an environment with vLLM for it; GPU_PYTHON=python3, ARGS="-k sleep" …
	$(GPU_PYTHON) -m pytest tests/gpu -s $(ARGS)

conformance:  ## the conformance kit on every adapter, and on wrong ones (minutes each); SHAPES=all, versions, or some: "verl-tp2 openrlhf-zero3"
ifeq ($(SHAPES),)
	@$(CHECK) --foreground kit-minimal wrong-adapters kit-verl kit-openrlhf kit-trl -- $(ARGS)
else
	@$(CHECK) $(if $(JOBS),--jobs $(JOBS)) $(if $(filter all,$(SHAPES)),--rest,$(SHAPES)) -- $(ARGS)
endif

trainer-test:  ## tests with real trainers (minutes)
	@$(CHECK) --foreground trainers-verl trainers-openrlhf trainers-trl -- $(ARGS)

versions: verl-env  ## which versions of trainers and vLLM can be installed together, into docs/supported.md (4 minutes, no download)
	@$(or $(PYTHON),python3) tools/versions.py --write $(ARGS)

soak: verl-env  ## 200 steps of the minimal adapter under random faults, kills and resumes, 10 minutes; ARGS="--seed 7 --steps 50" …
	@PYTHONPATH=tests:examples/minimal_adapter:$$PYTHONPATH $(PY) -m soak.run $(ARGS)

bench: verl-env  ## benchmarks under examples/bench, for an idle machine and a long break; ARGS="--only overheads" …
	$(PY) examples/bench/run_all.py $(ARGS)

gpu-hour:  ## what the flag costs and gains on one GPU, a trainer's run in it, in parts; without a GPU a rehearsal; ARGS="--part start" …
	@$(MAKE_ENV) trl
	@.envs/trl/bin/python examples/bench/card.py $(ARGS)

card-pieces: verl-env  ## vLLM, a trainer and our needs in pieces for a GPU machine without a network; ARGS="--have has.txt --trainer verl" …
	$(PY) tools/pack_card.py .cache/card/pieces $(ARGS)

clean:  ## remove caches and runs; the environment stays (rm -r .envs)
	rm -rf .cache runs outputs site build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info testing/{build,dist,*.egg-info}
	find . -name __pycache__ -not -path './.envs/*' -prune -exec rm -rf {} +
