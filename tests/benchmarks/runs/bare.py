"""The first commands on a machine that has never run the project, quiet and under foreign load.

A fresh clone of the commit, a fresh environment, an empty home: `make demo`, then `make test`, and
on demand every extra alone; with any number of busy loops beside them. One row for each number of
loops is kept.

Run: python -m tests.benchmarks.runs.bare [--loops 3] [--extras]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.record import RESULTS, commit, record

ROOT = Path(__file__).parents[3]
COMMAND = "python -m tests.benchmarks.runs.bare"


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep processes beside that do nothing but take a core each."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def make(target: str, clone: Path, log: Path) -> tuple[int, float, str]:
    """Run a target with an empty home and return its exit code, seconds and output."""
    environment = os.environ | {
        "PIP_CACHE_DIR": str(clone.parent / "pip"),
        "TFGRPO_SHARED": os.environ.get("TFGRPO_SHARED", str(ROOT.parent / "shared")),
    }
    command = ["sh", "tests/bare.sh", "make", target, f"PYTHON={sys.base_prefix}/bin/python3.11"]
    started = time.monotonic()
    with log.open("w") as out:
        code = subprocess.run(
            command, cwd=clone, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode
    return code, time.monotonic() - started, log.read_text()


def counted(text: str) -> dict[str, int]:
    """Return what pytest's last line counts.

    >>> counted("= 1 failed, 20 passed, 3 skipped in 4.20s =")
    {'failed': 1, 'passed': 20, 'errors': 0}
    """
    last = text.rsplit(" in ", 1)[0].rsplit("\n", 1)[-1]
    found = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", last)}
    return {"failed": found.get("failed", 0), "passed": found.get("passed", 0),
            "errors": found.get("error", 0)}  # fmt: skip


def verdicts(text: str) -> dict[str, bool]:
    """Return by extra whether its feature ran, from the table that `make extras` prints.

    >>> verdicts("math        works       3 s   1 s\\nray         fails ...\\n")
    {'math': True, 'ray': False}
    """
    rows = re.findall(r"^(\w[\w-]*) +(works|fails|skipped)\b", text, re.MULTILINE)
    return {name: verdict == "works" for name, verdict in rows}


def measure(loops: int, extras: bool, logs: Path) -> dict[str, Any]:
    """Run demo and tests beside the loops and return the row."""
    at = commit()  # what is cloned; the checkout may go on meanwhile
    with tempfile.TemporaryDirectory(prefix="tfgrpo-bare-") as place, busy(loops):
        clone = Path(place) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        demo_exit, demo_s, _ = make("demo", clone, logs / f"demo{loops}.log")
        test_exit, test_s, told = make("test", clone, logs / f"test{loops}.log")
        row = {
            "busy_loops": loops,
            "demo_seconds": round(demo_s, 1),
            "demo_exit": demo_exit,
            "test_seconds": round(test_s, 1),
            "test_exit": test_exit,
            **counted(told),
            "load": [round(x, 1) for x in os.getloadavg()],
            "cores": os.cpu_count(),
            "commit": at,
        }
        if extras:
            _, seconds, table = make("extras", clone, logs / f"extras{loops}.log")
            row |= {"extras": verdicts(table), "extras_seconds": round(seconds, 1)}
    return row


def main() -> None:
    """Measure one number of loops and keep its row beside the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=0)
    parser.add_argument("--extras", action="store_true")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    row = measure(options.loops, options.extras, options.logs)
    kept = RESULTS / "bare.json"
    rows = json.loads(kept.read_text())["rows"] if kept.exists() else []
    rows = [r for r in rows if r["busy_loops"] != options.loops] + [row]
    rows.sort(key=lambda r: int(r["busy_loops"]))
    quiet = rows[0]
    figures = {k: quiet[k] for k in ("demo_seconds", "demo_exit", "test_seconds", "failed", "load")}
    record("bare", {**figures, "extras": quiet.get("extras", {}), "rows": rows}, COMMAND)


if __name__ == "__main__":
    main()
