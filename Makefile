# Needs only Python >= 3.11: uv is fetched into .uv/ where it is missing, and everything else by uv into .venv/.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow chaos test-planted test-long test-scale test-system lint fmt types model up e2e down bench-operator bench-wake docs image chart clean

REPORTS := .pytest_cache/reports
RUN     := .venv/bin
# Tests wait for deadlines more than they compute, so more of them than cores run side by side; JOBS=0 runs one after the other.
JOBS    ?= 5
LEVEL   ?= smoke
PYTEST  := $(RUN)/pytest -n $(JOBS) --dist worksteal

# The shell takes these from the environment, where quotes and spaces in them mean nothing. Only what is set is exported.
$(foreach variable,STATE PORT MODEL BASE_URL MESSAGE,$(if $($(variable)),$(eval export $(variable))))

UV := $(shell command -v uv 2>/dev/null && uv --version >/dev/null 2>&1 || echo .uv/bin/uv)
UV := $(lastword $(UV))

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.synced ## Chat on this machine with an offline model; MODEL=provider:name, BASE_URL=…, MESSAGE=… for one answer
	@$(RUN)/agentrun dev -f examples/minimal/agentrun.yaml $(if $(STATE),--state "$$STATE") $(if $(PORT),--port "$$PORT") \
		$(if $(MODEL),--model "$$MODEL") $(if $(BASE_URL),--base-url "$$BASE_URL") $(if $(MESSAGE),--message "$$MESSAGE")

test: .venv/.synced ## All that this machine can test, but for what takes long
	@mkdir -p $(REPORTS) && rm -f $(REPORTS)/*.xml
	$(PYTEST) -m "not scale and not slow" --junitxml=$(REPORTS)/all.xml $(ARGS)

test-slow: .venv/.synced ## The slow tests, and those of statements and scripts on the system's Postgres 15 and Redis, or skipped there
	@mkdir -p $(REPORTS); status=0; \
	$(PYTEST) -m slow --junitxml=$(REPORTS)/slow.xml $(ARGS) || status=$$?; \
	AGENTRUN_TEST_STORES=system $(PYTEST) tests/stores -m "not scale and (not processes or whole_path)" \
		--junitxml=$(REPORTS)/system.xml $(ARGS) || status=$$?; \
	exit $$status

test-long: .venv/.synced ## The tests that take many minutes, such as an API server that is away for five; needs KUBEBUILDER_ASSETS
	@mkdir -p $(REPORTS)
	AGENTRUN_TEST_LONG=1 $(PYTEST) -m long --junitxml=$(REPORTS)/long.xml $(ARGS)

chaos: .venv/.synced ## Random faults on real processes, judged by what is left; RUNS=200 SEED=1
	@PYTHONPATH=tests/support $(RUN)/python tests/chaos/chaos_run.py --runs $(or $(RUNS),200) --seed $(or $(SEED),1)

test-planted: .venv/.synced ## Plant each known bug in a copy of the product, and see its test go red
	@mkdir -p $(REPORTS)
	AGENTRUN_PLANTED=all $(PYTEST) tests/chaos/test_planted_bugs.py --junitxml=$(REPORTS)/planted.xml $(ARGS)

test-system: .venv/.synced ## The whole stores tier on the system's Postgres 15 and Redis 7.0
	@mkdir -p $(REPORTS)
	AGENTRUN_TEST_STORES=system $(PYTEST) tests/stores --junitxml=$(REPORTS)/system.xml $(ARGS)

ROWS ?= 1000000
test-scale: .venv/.synced ## Plans of all statements, reports, and retention beside submissions, at ROWS rows (1000000; the full size is 10000000)
	@mkdir -p $(REPORTS)
	AGENTRUN_SCALE_ROWS=$(ROWS) $(RUN)/pytest -m scale -s --junitxml=$(REPORTS)/scale.xml $(ARGS)

lint: .venv/.synced ## Style, format, types, and which room may import which
	@status=0; for check in "ruff check" "ruff format --check" mypy lint-imports; do \
		echo "$$check"; $(RUN)/$$check || status=1; \
	done; exit $$status

fmt: .venv/.synced ## Format, and mend what can be mended by itself
	$(RUN)/ruff check --fix
	$(RUN)/ruff format

types: .venv/.synced ## Types only
	$(RUN)/mypy

model: .venv/.synced ## Explore the protocol model; WHICH=base, large, without, bug, harmless or all
	$(RUN)/python tests/unit/model/protocol_run.py $(or $(WHICH),base)

up: .venv/.synced ## The whole system on a kind cluster, with an example; needs Docker, kind, kubectl, helm
	@$(RUN)/python e2e/cluster.py up

e2e: .venv/.synced ## Scenarios on a kind cluster of their own, LEVEL=smoke or full; needs Docker, kind, kubectl, helm
	@mkdir -p $(REPORTS)
	CLUSTER=$${CLUSTER:-agentrun-e2e} $(RUN)/pytest e2e --level=$(LEVEL) --junitxml=$(REPORTS)/e2e.xml $(ARGS)

down: .venv/.synced ## Take the cluster down; CLUSTER=agentrun-e2e: that of `make e2e`
	@$(RUN)/python e2e/cluster.py down

bench-operator: .venv/.synced ## The operator with 100, 300 and 1,000 AgentRuns (COUNTS="100") against its targets; needs KUBEBUILDER_ASSETS
	@$(RUN)/python bench/operator_load.py $(COUNTS)

bench-wake: .venv/.synced ## How soon the operator asks for a worker, TRIES times (20), against its targets; needs KUBEBUILDER_ASSETS
	@$(RUN)/python bench/operator_wake.py $(TRIES)

docs: .venv/.synced ## Write the reference pages that are made from the code
	$(RUN)/python -m agentrun.manifests.reference > docs/manifest.md

IMAGE      ?= agentrun:dev
BASE_IMAGE ?= python:3.13-slim
image: | $(UV) ## Build the container image IMAGE (agentrun:dev) on BASE_IMAGE; needs Docker, but no network while it builds
	@$(UV) run --quiet --isolated --no-project --with pip==25.3 --with packaging==25.0 \
		python image/wheels.py dist/image "$(BASE_IMAGE)" "$(UV)"
	@docker build --quiet --network=none --tag "$(IMAGE)" --build-arg BASE_IMAGE="$(BASE_IMAGE)" --build-arg SOURCE="$(SOURCE)" \
		--build-arg VERSION="$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' services/agentrun/__init__.py)" \
		--build-arg REVISION="$$(git describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null)" . >/dev/null
	@docker run --rm --network=none "$(IMAGE)" --version | sed 's|^|built $(IMAGE), agentrun |'

chart: .venv/.synced ## Make the chart's README and schema from values.yaml, check the chart, and pack it into dist/; needs helm
	$(RUN)/python charts/agentrun/describe.py
	helm lint --strict --quiet charts/agentrun
	helm package --destination dist charts/agentrun

clean: ## Remove what was built and cached; keeps the data in .agentrun
	rm -rf .venv .uv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.synced: pyproject.toml uv.lock | $(UV)
	@test -d .venv || echo "installing everything into .venv/; this takes a minute"
	@$(UV) sync --all-extras --locked --quiet
	@touch $@

# A virtual environment, since many systems refuse installation into their own Python; where venv is missing, a folder.
.uv/bin/uv:
	@echo "fetching uv into .uv/"
	@if python3 -m venv .uv 2>/dev/null; then .uv/bin/python -m pip install --quiet --disable-pip-version-check uv; \
	else rm -rf .uv && python3 -m pip install --quiet --disable-pip-version-check --target .uv uv; fi
	@test -x $@
