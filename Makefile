# Two commands for a stranger: `make demo` and `make test`. Everything else serves them.
PYTHON ?= python3.11
# Empty: the index pip is set up with. For the CPU index: make TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

.PHONY: demo test
