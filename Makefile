# The commands of this project; `make help` lists them. Each sets up what it needs; only python3 (3.11 or newer) and make must be installed.
# .venv has the newest Python here, and so the newest JAX; `make PYTHON=/path/to/python3.11 …` makes it with another one.
ifndef PYTHON
PYTHON := $(or $(shell .ci/find-python 3.14 3.13 3.12 3.11),python3)
endif
PYTEST_ARGS ?=
VENV := .venv/bin
# What the tests compile stays here for a month: then only programs that are new, or have changed, are compiled.
export JPIPE_TEST_CACHE ?= $(CURDIR)/build/test-cache
unexport PYTHONDONTWRITEBYTECODE # without bytecode each process of the tests compiles all modules again, and rewrites all assertions
# Each process imports all tests, for half a minute; more than four need too much memory.
PYTEST := python -m pytest -n $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count(), 4))') --dist worksteal

SPHINX := $(VENV)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -j auto
CHECKED := build/checked-docs

# So compiled, all tests take half as long. What is about numbers runs once more in `make test-slow`, compiled like the programs of users.
QUICKLY = env $$(.ci/compile-quickly $(VENV)/python)
NONE_IS_FINE = $(if $(PYTEST_ARGS),|| [ $$? -eq 5 ]) # where only some of the tests are asked for

define on_oldest
if [ "$$($(VENV)/python -c 'import sys; print(sys.version_info[:2])')" = "(3, 11)" ]; then \
	echo "Python 3.11 is that of .venv already: the tests on the oldest Python and JAX are skipped."; \
elif [ -z "$$(.ci/find-python 3.11)" ]; then echo "No Python 3.11 found: the tests on the oldest Python and JAX are skipped."; \
else $(MAKE) --no-print-directory .venv-oldest/ready && \
	env $$(.ci/compile-quickly .venv-oldest/bin/python) .venv-oldest/bin/$(PYTEST) -m "$(1)" $(PYTEST_ARGS); fi
endef

.DEFAULT_GOAL := help
.PHONY: help train test test-slow test-oldest test-all test-targets check-gpu check check-types check-docs check-imports check-wheel wheel format bench bench-peers bench-hosts bench-accuracy bench-planner bench-papers bench-faults bench-learning docs docs-links pictures clean

help: ## List the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 20

train: .venv/ready ## Train the GPT of configs/gpt-bytes.yaml through a four-stage pipeline, about a minute and a half
	@$(VENV)/jpipe train configs/gpt-bytes.yaml

test: .venv/ready ## Run all tests except the slow ones, about 8 minutes on two cores, the first time longer (PYTEST_ARGS="-k name" for some of them)
	@find build/test-cache -type f -mtime +30 -delete 2>/dev/null || true
	@$(QUICKLY) $(VENV)/$(PYTEST) -m "not slow and not targets" $(PYTEST_ARGS)

test-slow: .venv/ready ## Run the tests that `make test` leaves out, but for those marked `exhaustive`, which only `make test-all` runs
	@$(VENV)/$(PYTEST) -m "numbers and not exhaustive" $(PYTEST_ARGS) $(NONE_IS_FINE)
	@$(QUICKLY) $(VENV)/$(PYTEST) -m "slow and not exhaustive and not numbers" $(PYTEST_ARGS) $(NONE_IS_FINE)

test-oldest: .venv/ready ## Run the tests marked `oldest` on Python 3.11 and the JAX for it, where .venv has a newer one
	@$(call on_oldest,oldest and not exhaustive)

test-all: .venv/ready .venv-torch/ready ## Run all tests, and those marked `oldest` once more on Python 3.11 and the JAX for it
	@$(VENV)/$(PYTEST) $(PYTEST_ARGS)
	@$(call on_oldest,oldest)

test-targets: .venv-targets/ready ## Compile every kind of program for GPUs and TPUs that are not here, about five minutes; nothing is run on them
	@[ ! -e .venv-targets/ready ] || JPIPE_REQUIRE_TARGETS=1 JAX_PLATFORMS=cpu .venv-targets/bin/$(PYTEST) -m "targets and not exhaustive" tests/targets $(PYTEST_ARGS)

check-gpu: .venv/ready ## Check jpipe on one NVIDIA GPU within ten minutes, over NCCL too; it says what to install (ARGS="--rehearse" without a GPU)
	@$(VENV)/python -m benchmarks.check_gpu $(ARGS)

check: .venv/ready ## Format, lint, types, directions of imports, lengths of pages, the site, and the wheel built and used in an empty folder
	@$(VENV)/ruff format --check .
	@$(VENV)/ruff check .
	@$(MAKE) --no-print-directory -j 2 check-wheel check-types check-imports check-docs

check-types: .venv/ready
	@$(VENV)/mypy

check-imports: .venv/ready
	@$(VENV)/lint-imports --no-logo --no-cache

check-docs: .venv/ready
	@$(VENV)/python -m docs.lengths
	@$(SPHINX) -t fast -b html docs $(CHECKED)
	@JPIPE_SITE=$(CHECKED) $(VENV)/python -m pytest -q -k test_the_site_is_complete tests/test_site.py

check-wheel: .venv/ready
	@.ci/check-wheel

wheel: .venv/ready ## Build the wheel into dist/
	@$(VENV)/python -m build --wheel --no-isolation .

format: .venv/ready ## Format the code and fix what the linter can
	@$(VENV)/ruff check --fix-only .
	@$(VENV)/ruff format .

bench: .venv/ready ## Measure speed; prints a table and writes JSON
	@$(VENV)/python -m benchmarks

bench-peers: .venv/ready .venv-torch/ready ## Compare speed with PyTorch (TORCH_INDEX=URL of an index with its CPU builds) and plain JAX
	@$(VENV)/python -m benchmarks.peers

bench-hosts: .venv/ready ## Measure speed on two and four hosts (network namespaces, slow links); needs root and iproute2
	@$(VENV)/python -m benchmarks.hosts

bench-accuracy: .venv/ready ## Train to the same loss over slow links, by data parallelism and a planned pipeline; needs root and iproute2
	@$(VENV)/python -m benchmarks.hosts.accuracy --json benchmarks/hosts/accuracy.json --document docs/explanation/time-to-accuracy.md --pictures docs/pictures

bench-planner: .venv/ready ## Measure the planner: its speed, the papers' examples, predictions against measurements on this machine
	@$(VENV)/python -m benchmarks.planner

bench-papers: .venv/ready ## Plan the papers' models for the papers' clusters, a few minutes; puts the tables into docs/explanation/ and draws them
	@$(VENV)/python -m benchmarks.papers --documents docs/explanation/papers-*.md --pictures docs/pictures

bench-faults: .venv/ready ## Kill runs, damage checkpoints, restore them under other plans, measure their cost; takes hours
	@$(VENV)/python -m benchmarks.faults

bench-learning: .venv/ready ## Compare how well models learn with delayed weights, about eight minutes; docs/explanation/learning-setup.md has the full grid
	@$(VENV)/python -m benchmarks.learning

docs: .venv/ready ## Build the documentation site, build/docs/index.html; a warning is an error
	@began=$$(date +%s) && $(SPHINX) -b html docs build/docs && echo "build/docs/index.html: built in $$(($$(date +%s) - began)) s"

docs-links: .venv/ready ## Check the links from the documentation to other sites; needs a network
	@$(SPHINX) -b linkcheck docs build/links

pictures: .venv/ready ## Draw the pictures of docs/pictures/ again
	@$(VENV)/python -m docs.pictures

clean: ## Remove the virtual environments and everything else that was built (not runs/)
	rm -rf .venv .venv-oldest .venv-targets .venv-torch build dist docs/reference/api/*.rst .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, found: $$($(PYTHON) --version 2>&1). Name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@echo "Setting up .venv (once; a minute or two) ..."
	@[ -x .venv/bin/pip ] || $(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.venv-oldest/ready: pyproject.toml constraints.txt
	@echo "Setting up .venv-oldest (once; a minute or two) ..."
	@[ -x .venv-oldest/bin/pip ] || "$$(.ci/find-python 3.11)" -m venv .venv-oldest
	@.venv-oldest/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The packages of .venv, and XLA's compilers for GPUs and TPUs (1.1 GB).
.venv-targets/ready: .venv/ready
	@echo "Setting up .venv-targets (once; a minute or two) ..."
	@[ -x .venv-targets/bin/pip ] || .venv/bin/python -m venv .venv-targets
	@.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-targets/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@.ci/set-up .venv-targets "XLA's compilers for GPUs and TPUs" -c constraints.txt -e '.[target-cuda,target-tpu]'

# PyTorch's CPU build (200 MB; the CUDA build has gigabytes), transformers and what trains with it. Without them the benchmark omits its rows, and slow tests
# are skipped. PyTorch's pipelines need numpy.
TORCH ?= torch==2.13.0+cpu
TRANSFORMERS ?= transformers==5.23.0 safetensors==0.8.0 peft==0.21.2 trl==1.16.0
.venv-torch/ready: Makefile
	@echo "Setting up .venv-torch (once) ..."
	@[ -x .venv-torch/bin/pip ] || "$(or $(shell .ci/find-python 3.11),$(PYTHON))" -m venv .venv-torch
	@FURTHER_INDEX='$(TORCH_INDEX)' .ci/set-up .venv-torch '$(TORCH) and transformers' '$(TORCH)' numpy $(TRANSFORMERS)
	@[ -e $@ ] || .venv-torch/bin/python -c 'import torch' 2>/dev/null || rm -rf .venv-torch
