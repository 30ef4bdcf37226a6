"""Keep a benchmark's figures beside what is needed to run it again."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """Return the processor's name as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Return the checkout's commit, with `+changes` where files differ from it."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD") or "none"
    return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def record(name: str, figures: dict[str, Any], command: str, device: str = "") -> dict[str, Any]:
    """Print the figures as one JSON line and write them to `results/NAME.json`."""
    row = {
        **figures,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "commit": commit(),
        "processor": device or processor(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps({name: figures}))
    return row
