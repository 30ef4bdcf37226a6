"""Processes of the gateway's benchmarks: started on a core, their CPU time and memory read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
_TICK = os.sysconf("SC_CLK_TCK")


def start(
    command: Sequence[str],
    core: int,
    log: Path,
    env: Mapping[str, str] | None = None,
    *,
    tells: bool = False,
) -> subprocess.Popen[str]:
    """Start a command on one core; what it writes goes to a file, its errors alone where it `tells`
    something on its output: a pipe that nobody reads would stop it once it is full."""
    errors = log.open("w")
    return subprocess.Popen(
        ["taskset", "-c", str(core), *command],
        stdout=subprocess.PIPE if tells else errors,
        stderr=errors,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        start_new_session=True,
    )


def family(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found += family(int(path.parent.name))
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and all below it."""
    total = 0
    for one in family(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / _TICK


def rss_mb(pid: int) -> float:
    """Return the resident megabytes of a process and all below it."""
    total = 0
    for one in family(pid):
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1])
        except OSError:
            continue
    return total * os.sysconf("SC_PAGE_SIZE") / 1e6


def stop(process: subprocess.Popen[str]) -> None:
    """End a process that was started here, with all below it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(url: str, seconds: float = 120.0) -> None:
    """Return when a URL answers."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"{url} did not answer within {seconds:g} s")


def load(job: Mapping[str, Any], core: int) -> dict[str, Any]:
    """Run the load generator in a process of its own."""
    done = subprocess.run(
        ["taskset", "-c", str(core), sys.executable, "-m", "tests.benchmarks.serve.load",
         json.dumps(job)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=540,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def pressure() -> str:
    """Return how busy the machine is, for the record."""
    path = Path("/proc/pressure/cpu")
    some = path.read_text().split("\n")[0] if path.exists() else ""
    return f"load {os.getloadavg()[0]:.2f}; {some}"
