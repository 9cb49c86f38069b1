# Needs Python >= 3.11, git and make; everything else comes as wheels into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# what the installation depends on; it is renewed when one of these is newer
INSTALLED := $(VENV)/.installed
TESTS ?= tests
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help install up demo test soak lint format types contracts contract check test-compose bench evidence deploy clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

install: $(INSTALLED) ## install into .venv

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "TokenFleet needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." >&2; \
		echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' comes without venv: install it (Debian: apt install python3-venv)." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

up: install ## the whole fleet on this machine until Ctrl-C; prints the API's URL and a key
	$(BIN)/tokenfleet up $(ARGS)

demo: install ## a minute of load through TokenFleet and through round robin, side by side
	$(BIN)/tokenfleet demo $(ARGS)

test: install ## the test suite, on a real NATS and a real Postgres
	$(PYTEST) -m 'not soak and not compose' $(TESTS) $(ARGS)

soak: install ## the long tests
	$(PYTEST) -m soak $(TESTS) $(ARGS)

test-compose: install ## docker-compose.yml, run for real; needs a Docker engine
	$(PYTEST) -m compose tests/e2e $(ARGS)

lint: install ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install ## ruff: mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install ## mypy, strict
	$(BIN)/mypy

contracts: install ## who may import whom
	$(BIN)/lint-imports

deploy: install ## write what docker-compose.yml mounts anew (deploy/, .env.example)
	$(BIN)/python deploy/render.py

contract: install ## write schemas/published anew from the messages' types
	$(BIN)/python -m tokenfleet_schemas.publish

bench: install ## overhead and capacity; see benchmarks/
	$(BIN)/python -m benchmarks $(ARGS)

evidence: install ## the evidence's quick subsets again: do all signs hold? (evidence-PART: a part whole)
	$(BIN)/python -m benchmarks.evidence --check $(ARGS)

evidence-%: install
	$(BIN)/python -m benchmarks.evidence $* $(ARGS)

check: lint types contracts test ## all that a change must pass

clean: ## remove what was installed and built
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
