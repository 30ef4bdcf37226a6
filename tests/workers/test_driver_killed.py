"""`kill -9` of the run's process: its workers end with it, and the same command goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.learning.worlds import World, settings
from tests.patience import PATIENCE_S
from tfgrpo.store import Journal

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
pytest.importorskip("aiohttp")


def workers_of(pid: int) -> list[int]:
    """The worker processes that were started by a process, whether it lives or not."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue  # it has just ended
        if b"tfgrpo.workers.process_main" in words and str(pid).encode() in words:
            found.append(int(entry.name))
    return found


def rollouts(folder: Path) -> int:
    if not (folder / "run" / "run.db").exists():
        return 0
    with Journal.open(folder / "run", readonly=True) as store:
        return store.state().rollouts


def test_workers_end_with_their_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.workers.driver", str(tmp_path)]
    first = subprocess.Popen(command)
    until = time.monotonic() + PATIENCE_S
    while rollouts(tmp_path) < 20 and time.monotonic() < until:
        assert first.poll() is None
        time.sleep(0.02)
    assert len(workers_of(first.pid)) == 2
    first.kill()
    first.wait()
    while workers_of(first.pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert workers_of(first.pid) == []
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    expected = World().learn(settings(tmp_path / "whole"))
    assert done.stdout.split() == [expected.library.version_id]
