# `make demo` and `make test` do all the set-up on a fresh machine.

PYTHON ?= python3
EXTRAS ?= dev,metaworld,bench
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_ARGS ?= --env Meta-World/MT1 --env-kwargs env_name reach-v3 --horizon 150 --action-repeat 2 --num-envs 16 \
	--max-lag 1 --ppo.reward-scale 0.1 --ppo.gamma 0.95 --target-success 0.95 --eval-every 4 --run-dir $(DEMO_DIR)
DEMO_DIR ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
PYTEST_ARGS ?=
SIMS_VENV ?= .venv-sims
SIMS_STAMP := $(SIMS_VENV)/.installed

.PHONY: help venv test test-slow lint types unit test-sims format demo clean

help:
	@echo "make demo    install, then train a robot policy on Meta-World reach-v3"
	@echo "make test    install, then lint, types and tests"
	@echo "make test-sims    install all simulators (4 GB) in an environment of their own, then run them"
	@echo "make test-slow    tests that take minutes: runs that are killed, again and again"
	@echo "make lint | types | unit | format    one of them"

venv: $(STAMP)

# A new environment is complete only once the stamp exists: a broken installation is repeated.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

test: lint types unit

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

unit: venv
	$(BIN)/python -m pytest $(PYTEST_ARGS)

$(SIMS_STAMP): pyproject.toml constraints.txt
	test -x $(SIMS_VENV)/bin/python || $(PYTHON) -m venv $(SIMS_VENV)
	$(SIMS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev,sims]'
	@touch $@

test-sims: $(SIMS_STAMP)
	$(SIMS_VENV)/bin/python -m pytest tests/sims -o faulthandler_timeout=240 $(PYTEST_ARGS)

test-slow: venv
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: venv
	$(BIN)/ebrl train $(DEMO_ARGS)

clean:
	rm -rf $(VENV) $(SIMS_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
