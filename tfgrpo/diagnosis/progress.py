"""How far a run is, in a small file beside its journal: what a page in another process shows.

Does not know what a stage means, or pages. Source: own.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfgrpo.runtime.files import write_whole
from tfgrpo.sampling import Progress

__all__ = ["ProgressFile", "read_progress"]

log = logging.getLogger(__name__)

_NAME = "progress.json"
_QUIET_S = 60.0
"""A run that has not written for so long may have been killed."""


class ProgressFile:
    """Writes the newest state of each stage, at most once a second.

    Args:
        folder: of the run.
        clock: seconds since the epoch.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / _NAME
        self._clock = clock
        self._stages: dict[str, dict[str, Any]] = {}
        self._starts: dict[str, tuple[float, int]] = {}
        self._written = float("-inf")
        self._spent = ""
        self._is_broken = False

    def update(self, progress: Progress, spent: str) -> None:
        """Note the state of a stage, and what the run has spent so far."""
        now = self._clock()
        row = self._stages.get(progress.stage)
        if row is None or progress.done < row["done"]:  # a stage starts, or starts anew
            self._starts[progress.stage] = (now, progress.done)
        began, first = self._starts[progress.stage]
        passed = now - began
        self._stages[progress.stage] = {
            "stage": progress.stage,
            "done": progress.done,
            "total": progress.total,
            "failed": progress.failed,
            "in_flight": progress.in_flight,
            "rate": (progress.done - first) / passed if passed > 0 else 0.0,
        }
        self._spent = spent
        if now - self._written >= 1.0 or progress.done >= progress.total:
            self._write(now, ended=False)

    def end(self) -> None:
        """Say that nothing more comes."""
        self._write(self._clock(), ended=True)

    def _write(self, now: float, *, ended: bool) -> None:
        if self._is_broken:
            return
        self._written = now
        row = {
            "stages": list(self._stages.values()),
            "spent": self._spent,
            "updated": now,
            "ended": ended,
        }
        try:
            write_whole(self._path, json.dumps(row))
        except OSError as exc:  # a view ends, and not the run
            self._is_broken = True
            log.warning("%s: progress is not shown on pages from here on: %s", self._path, exc)


def read_progress(folder: Path, clock: Callable[[], float] = time.time) -> dict[str, Any] | None:
    """Return what a run said last, with `is_quiet`; None where it said nothing."""
    try:
        row = json.loads((folder / _NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("stages"), list):
        return None
    return row | {"is_quiet": clock() - float(row.get("updated") or 0) > _QUIET_S}
