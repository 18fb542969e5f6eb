# `make` lists the targets. Each one makes its own virtual environment ready first; that is quick when nothing changed.

# PYTHON=/path/to/python3.11 names the interpreter of the virtual environments; scripts/venv.sh says what happens without it.
# Tests start hundreds of interpreters: without bytecode each compiles the package anew, a quarter of a second.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
RUN := $(VENV)/bin/python
CONSUMERS := .venv-consumers
# torch stands outside the hashed locks: scripts/lock.sh says why. For another build or index:
# make test-consumers TORCH='torch==2.13.0 --index-url ...'
TORCH ?= torch==2.13.0

# Taken from make's command line only: a MODEL in the environment is nobody's wish to send it prompts.
given = $(if $(filter command,$(firstword $(origin $(1)))),$(2) '$($(1))')
DEMO_ARGS = $(call given,MODEL,--model) $(call given,BASE_URL,--base-url) $(call given,API_KEY_ENV,--api-key-env)
CHAOS_ARGS = $(call given,N,--n) $(call given,SEED,--seed)
PYTEST_ARGS ?=
consume = $(1)/bin/python -m pytest -c tests/consumers/pytest.ini $(2) --producer=$(CURDIR)/$(RUN) $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test smoke lint size bench bench-atropos chaos test-consumers lock clean demo-venv dev-venv

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: demo-venv ## the whole product on ten small tasks (MODEL=... BASE_URL=... [API_KEY_ENV=...] for your own model)
	@$(VENV)/bin/hermes-rl demo $(DEMO_ARGS)

test: dev-venv ## all tests, in two processes (PYTEST_ARGS='-k journal' for some, -n 0 for one process)
	@$(RUN) -m pytest -n 2 --max-worker-restart 0 $(PYTEST_ARGS)

smoke: dev-venv ## a small part of the tests, for another Python (PYTHON=/path/to/python3.13 VENV=.venv-3.13)
	@$(VENV)/bin/hermes-rl --help >/dev/null
	@$(RUN) -m pytest tests/house/test_imports.py tests/ground tests/tools tests/rollout/test_rollout.py tests/packaging

lint: dev-venv ## ruff, formatting and strict types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

size: ## lines, files and Python tokens per package, beside their budgets
	@$(or $(PYTHON),python3) scripts/size.py

bench: dev-venv ## the numbers of the README, measured beside bare loops
	@$(RUN) tests/bench/run.py

bench-atropos: dev-venv ## env process beside atroposlib's, on the same work (1 GB of packages)
	@bash scripts/venv.sh .venv-atropos locks/atropos.txt
	@$(RUN) tests/bench/atropos.py --atropos .venv-atropos/bin/python

chaos: dev-venv ## kill a run at random moments and check its books (N=200 SEED=1)
	@$(RUN) tests/chaos/run.py $(CHAOS_ARGS)

test-consumers: dev-venv ## our files read by other people's programs, in environments of their own
	@bash scripts/venv.sh $(CONSUMERS) locks/consumers.txt $(TORCH)
	@$(call consume,$(CONSUMERS),tests/consumers $(patsubst %,--ignore=tests/consumers/with_%,verl axolotl protocols))
	@bash scripts/venv.sh $(CONSUMERS)-verl locks/consumers-verl.txt $(TORCH)
	@$(call consume,$(CONSUMERS)-verl,tests/consumers/with_verl)
	@bash scripts/venv.sh $(CONSUMERS)-axolotl locks/consumers-axolotl.txt $(TORCH)
	@$(call consume,$(CONSUMERS)-axolotl,tests/consumers/with_axolotl)
	@PIP_IGNORE_REQUIRES_PYTHON=1 bash scripts/venv.sh $(CONSUMERS)-protocols locks/consumers-protocols.txt
	@$(call consume,$(CONSUMERS)-protocols,tests/consumers/with_protocols)

lock: ## write the lock files anew from pyproject.toml (newest versions: scripts/lock.sh --upgrade)
	@bash scripts/lock.sh

clean: ## remove the virtual environments, caches and build output; runs/ is kept
	@rm -rf .venv .venv-* .make .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find hermes_rl batch_runner environments tests -name __pycache__ -type d -prune -exec rm -rf {} +

demo-venv:
	@bash scripts/venv.sh $(VENV) locks/demo.txt --editable

dev-venv:
	@bash scripts/venv.sh $(VENV) locks/dev.txt --editable
