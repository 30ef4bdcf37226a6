"""The lines that a run of the tests ends with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import slow_lines
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
REPORTS = [
    SimpleNamespace(nodeid="quick", duration=1.0, when="call", keywords=()),
    SimpleNamespace(nodeid="slow", duration=16.0, when="setup", keywords=()),
    SimpleNamespace(nodeid="known", duration=16.0, when="call", keywords=("long",)),
    SimpleNamespace(nodeid="no report of a test"),
]


@pytest.mark.parametrize(
    ("limit_s", "lines"),
    [(300.0, ["over a twentieth of the limit: 16 s setup slow"]), (400.0, []), (0.0, [])],
)
def test_a_test_over_a_twentieth_of_its_limit_is_named(limit_s: float, lines: list[str]) -> None:
    assert slow_lines(REPORTS, limit_s) == lines


@pytest.mark.parametrize("option", ["--timeout=0", "-pno:timeout"])
def test_without_a_limit_no_test_is_over_it(option: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider", option]
    one = "tests/test_house_counts.py::test_the_contract_of_this_checkout_is_read"
    done = subprocess.run(
        [*command, "-oaddopts=--import-mode=importlib", "-Wignore", one],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "twentieth" not in done.stdout
