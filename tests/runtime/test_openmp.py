"""How waiting threads are told to wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tfgrpo.runtime.openmp import bound_waiting

ASK = """
import os, sys
sys.argv = ["tfgrpo", "--version"]
from tfgrpo.cli.main import run_program
try:
    run_program()
except SystemExit:
    print("torch" in sys.modules, os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"])
"""


@pytest.mark.parametrize(
    ("given", "set_"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": ""}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
    ],
)
def test_a_users_choice_stands(given: dict[str, str], set_: dict[str, str]) -> None:
    bound_waiting(given)
    assert given == set_


def test_the_command_line_bounds_waiting_before_torch_is_loaded() -> None:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, env=plain, check=True
    )
    assert done.stdout.splitlines()[-1] == "False PASSIVE 10000"
