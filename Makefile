# Sets up .venv once and runs everything from it; `make help` lists the targets.

VENV   := .venv
PYTHON ?=
ARGS   ?=

# Tests start hundreds of processes, each of which would compile Kaon's modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install serve chat test compiled-tests test-long test-paths chaos kills soak fairness fuzz conformance locks pins lint lint-style lint-types lint-docs format docs kernels bench bench-gpu bench-host bench-peers mutate test-gpu test-ops rendered site demo-model demo-head clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "make %-12s %s\n", $$1, $$2}'
	@echo 'ARGS="..." passes flags on: make serve ARGS="--port 8123"; PYTHON=... names the Python to make .venv from'

install: $(VENV)/.installed ## Make .venv and install Kaon into it

serve: $(VENV)/.installed ## Serve the embedded model on port 8000
	@exec $(VENV)/bin/kaon serve $(ARGS)

chat: $(VENV)/.installed ## Chat in the terminal
	@exec $(VENV)/bin/kaon chat $(ARGS)

test: $(VENV)/.installed-test ## Run the tests
	@exec $(VENV)/bin/python -m pytest -n auto --dist worksteal -m "not slow and not ops" $(ARGS)

# Python compiles the tests, and what they import, once: the workers of a first `make test` begin together, and each of
# them would compile all of it.
compiled-tests: $(VENV)/.installed-test
	@$(VENV)/bin/python -m pytest --collect-only -qq >$(VENV)/collected.txt || { cat $(VENV)/collected.txt; exit 1; }

test-long: $(VENV)/.installed-fuzz ## Run the tests, with the long form of those that have one, on examples drawn anew
	@exec $(VENV)/bin/python -m pytest -n auto --dist worksteal --hypothesis-profile=anew -m "not ops and not kills" $(ARGS)

# Faults of starts that are not clones of a warm process: tests/e2e/warm_starts.py.
test-long: export TEST_COLD_START := 1

test-paths: $(VENV)/.installed-test ## Run the parity tests with each set of instructions that the processor has
	@exec $(VENV)/bin/python -m tests.paths $(ARGS)

test-gpu: $(VENV)/.installed-test ## Run the tests that need a GPU, on the one that there is
	@exec $(VENV)/bin/python -m pytest -m gpu $(ARGS)

test-ops: $(VENV)/.installed-ops ## Test what deploy/ holds (apt-get install prometheus buildah debootstrap); image: as root
	@exec $(VENV)/bin/python -m pytest -m ops $(if $(filter tests/%,$(ARGS)),,tests/ops) $(ARGS)

chaos: $(VENV)/.installed-test ## Kill, stop, overload and leave the server in every way, and show the figures
	@exec $(VENV)/bin/python -m pytest --hypothesis-profile=anew -m "not kills" $(if $(filter tests/%,$(ARGS)),,tests/chaos) -rP $(ARGS)

kills: $(VENV)/.installed-test ## Kill engine cores and servers under each attack and load for 40 minutes; ARGS="-k churn"
	@exec $(VENV)/bin/python -m pytest -m kills tests/chaos -rP $(ARGS)

soak: $(VENV)/.installed-test ## Injure a loaded server for 20 minutes, then compare its counters; ARGS="--minutes 1"
	@exec $(VENV)/bin/python -m tests.chaos.soak $(ARGS)

fairness: $(VENV)/.installed-test ## Measure a light key next to ten heavy ones for 9 minutes; ARGS="--mixes grammars"
	@exec $(VENV)/bin/python -m tests.chaos.fairness $(ARGS)

fuzz: $(VENV)/.installed-fuzz ## Feed parsers mutated bytes; ARGS="--minutes 5 --target NAME"
	@exec $(VENV)/bin/python -m tests.fuzz.run $(ARGS)

mutate: $(VENV)/.installed-test ## Plant bugs, one at a time, and see which the tests find; ARGS="--only http/"
	@exec $(VENV)/bin/python -m tools.mutate $(ARGS)

conformance: $(VENV)/.installed ## Run other people's clients against the server, and write docs/conformance.md
	@exec $(VENV)/bin/python -m tests.conformance.run $(ARGS)

locks: $(VENV)/.installed-dev ## Write deploy/locks again, with uv, from what the package index has
	@exec $(VENV)/bin/python -m tools.locks $(ARGS)

pins: $(VENV)/.installed-dev ## Name images and actions of others by digest and commit; ARGS=--check lists the rest
	@exec $(VENV)/bin/python -m tools.pins $(ARGS)

lint: lint-style lint-types lint-docs ## Check style, types, import contracts and generated docs

# Apart, so that `make -j` checks several at once.
lint-style: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/lint-imports

lint-types: $(VENV)/.installed-dev
	$(VENV)/bin/mypy

lint-docs: $(VENV)/.installed-dev
	$(VENV)/bin/python -m tools.config_docs --check
	$(VENV)/bin/python -m tools.api_docs --check
	$(VENV)/bin/python -m tests.parity.models_docs --check
	$(VENV)/bin/python -m tools.kernel_report --check

format: $(VENV)/.installed-dev ## Format the code
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

docs: $(VENV)/.installed-test ## Write the tables of the configuration, the API's fields, models and kernels again
	$(VENV)/bin/python -m tools.config_docs
	$(VENV)/bin/python -m tools.api_docs
	$(VENV)/bin/python -m tests.parity.models_docs
	$(VENV)/bin/python -m tools.kernel_report

kernels: $(VENV)/.installed-test ## Compile changed kernels without a GPU, and write docs/kernels.md and its record
	@exec $(VENV)/bin/python -m tools.kernel_report $(ARGS)

rendered: $(VENV)/.installed-ops ## Write dashboards, manifests and bill of materials of deploy/ again
	$(VENV)/bin/python -m tools.dashboards
	$(VENV)/bin/python -m tools.manifests
	$(VENV)/bin/python -m tools.sbom

bench: $(VENV)/.installed-test ## Measure, and write docs/benchmarks.md
	@exec $(VENV)/bin/python -m benchmarks $(ARGS)

bench-gpu: $(VENV)/.installed-test ## Measure the GPU, and write its part of that page; ARGS="--quick"
	@exec $(VENV)/bin/python -m benchmarks.gpu $(ARGS)

bench-host: $(VENV)/.installed-test ## Measure what the host does for a GPU, without one, and write that part
	@exec $(VENV)/bin/python -m benchmarks.host $(ARGS)

bench-peers: $(VENV)/.installed-test ## Measure Kaon and other servers in turn, and write their part of that page
	@exec $(VENV)/bin/python -m benchmarks.peers $(ARGS)

site: $(VENV)/.installed-site ## Build the documentation site into build/site, and check its links
	@exec $(VENV)/bin/mkdocs build --strict $(ARGS)

demo-model: $(VENV)/.installed ## Train the embedded model again (under 45 minutes on two cores)
	@exec $(VENV)/bin/python -m tools.demo.train --out models/demo/checkpoint $(ARGS)

demo-head: $(VENV)/.installed ## Train the head that drafts for the embedded model again (20 minutes on two cores)
	@exec $(VENV)/bin/python -m tools.demo.train_head $(ARGS)

clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) .conformance .peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What pip compiles.
COMPILED := $(wildcard setup.py models/ops/cpu/*.[ch])

# One stamp a set of extras. As long as it is newer than what it was installed from, pip does not run again.
$(VENV)/.installed-test: EXTRAS := [test]
$(VENV)/.installed-dev: EXTRAS := [test,dev]
$(VENV)/.installed-dev: IMPLIED := $(VENV)/.installed-test
# Otherwise an old library would stay where the sources do not compile; empty: installs without a compiler too.
$(VENV)/.installed-test $(VENV)/.installed-dev: export KAON_MUST_COMPILE ?= 1
$(VENV)/.installed-site: EXTRAS := [site]
$(VENV)/.installed-ops: EXTRAS := [test,ops]
$(VENV)/.installed-ops: IMPLIED := $(VENV)/.installed-test
$(VENV)/.installed-fuzz: EXTRAS := [test,fuzz]
$(VENV)/.installed-fuzz: IMPLIED := $(VENV)/.installed-test

LOCKS := $(wildcard deploy/locks/*.txt)

$(VENV)/.installed $(VENV)/.installed-test $(VENV)/.installed-dev $(VENV)/.installed-site $(VENV)/.installed-fuzz $(VENV)/.installed-ops: pyproject.toml constraints.txt $(LOCKS) $(COMPILED)
	@sh deploy/install.sh $(VENV) '$(EXTRAS)' $(PYTHON)
	@touch $(VENV)/.installed $(IMPLIED) $@
