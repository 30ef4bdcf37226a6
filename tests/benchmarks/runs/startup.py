"""How long a user waits before anything happens: the import of a verb, and the help.

Each figure is the median of five fresh processes after one that fills the byte-code cache: wall
time, and processor time, which hardly depends on what else runs. The bare interpreter is measured
beside them.

    python -m tests.benchmarks.runs.startup
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.benchmarks.record import record

REPEATS = 5
COMMANDS = {
    "python": ("-c", "pass"),
    "import": ("-c", "from tfgrpo import learn"),
    "help": ("-m", "tfgrpo", "--help"),
    "learn_help": ("-m", "tfgrpo", "learn", "--help"),
}


def once(arguments: Sequence[str]) -> tuple[float, float]:
    """Run a fresh interpreter; wall and processor seconds."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure() -> dict[str, float]:
    """Measure every command; medians."""
    figures = {}
    for name, arguments in COMMANDS.items():
        once(arguments)
        walls, cpus = zip(*(once(arguments) for _ in range(REPEATS)), strict=True)
        figures[f"{name}_s"] = round(statistics.median(walls), 3)
        figures[f"{name}_cpu_s"] = round(statistics.median(cpus), 3)
    return figures


if __name__ == "__main__":
    record("startup", measure(), "python -m tests.benchmarks.runs.startup")
