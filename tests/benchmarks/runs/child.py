"""A part of a benchmark in a process of its own, with a peak of memory of its own.

The part prints its figures by `tell`, and its steps' seconds by `tell_step`, so that what was cut
off leaves those.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

_FIGURES, _STEP = "RESULT ", "STEP "


def tell(figures: dict[str, Any]) -> None:
    """Print what the part came to; called once, in the child."""
    print(_FIGURES + json.dumps(figures), flush=True)


def tell_step(seconds: float) -> None:
    """Print how long a step took."""
    print(f"{_STEP}{seconds:.3f}", flush=True)


class Child:
    """A started `python -m ARGUMENTS`; further arguments are environment variables."""

    def __init__(self, arguments: Sequence[str], **environment: str) -> None:
        self._told = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `figures` closes both
        self._wrong = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=self._told,
            stderr=self._wrong,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment},
        )

    def figures(self, seconds: float) -> dict[str, Any]:
        """Wait so long and return its figures, or `error` with the seconds of the steps it made."""
        try:
            code = self._process.wait(seconds)
            failed = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            failed = "timed out"
        with self._told as told, self._wrong as wrong:
            told.seek(0)
            lines = told.read().splitlines()
            wrong.seek(0)
            errors = wrong.read()
        if failed:
            steps = [float(x.removeprefix(_STEP)) for x in lines if x.startswith(_STEP)]
            error = f"{failed}; standard error ends: {errors[-1500:]}"
            return {"error": error, "all_step_s": steps}
        line = next(x for x in lines if x.startswith(_FIGURES))
        figures: dict[str, Any] = json.loads(line.removeprefix(_FIGURES))
        return figures
