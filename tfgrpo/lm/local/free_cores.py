"""How many cores other programs leave to this one, measured while it runs (Linux).

Threads that wait for each other lose more than the cores that somebody else takes: a product over
two threads, one of them not running, takes as long as the scheduler's time slice. So a CPU engine
asks here, now and then, how many threads it may use.

Does not know torch. Source: `proc(5)`, the file /proc/stat.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_BUSY = (0, 1, 2, 5, 6, 7)
"""Fields of a CPU's line that are work: user, nice, system, interrupts twice, stolen."""


def usable_cores() -> frozenset[int]:
    """Return the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def busy_seconds() -> float | None:
    """Return the seconds of work done on our cores since the start, by whomever; None where the
    system does not tell."""
    names = {f"cpu{core}" for core in usable_cores()}
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    rows = [line.split() for line in lines]
    ticks = sum(int(row[1 + i]) for row in rows if row and row[0] in names for i in _BUSY)
    return ticks / _TICKS


def own_seconds() -> float:
    """Return the processor time of this process, all threads."""
    spent = os.times()
    return spent.user + spent.system


class FreeCores:
    """Counts the cores that others leave; a new look at most once per period.

    Args:
        cores: how many there are; None asks the system.
        period_s: between two looks.
        busy: seconds of work on these cores by everybody; None: unknown, all count as free.
        own: seconds of work by this process.
        clock: wall time in seconds.
    """

    def __init__(
        self,
        cores: int | None = None,
        *,
        period_s: float = 0.5,
        busy: Callable[[], float | None] = busy_seconds,
        own: Callable[[], float] = own_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cores = cores or len(usable_cores())
        self._period_s = period_s
        self._busy, self._own, self._clock = busy, own, clock
        self._last: tuple[float, float] | None = None
        self._count = self._cores

    def count(self) -> int:
        """Return how many threads may run now, at least 1."""
        now = self._clock()
        if self._last is not None and now - self._last[0] < self._period_s:
            return self._count
        busy = self._busy()
        if busy is None:
            return self._count
        others = busy - self._own()
        if self._last is not None:
            before, others_before = self._last
            taken = max(0.0, (others - others_before) / (now - before))
            self._count = max(1, worth_using(self._cores, taken))
        self._last = (now, others)
        return self._count


def worth_using(cores: int, taken: float) -> int:
    """Return how many threads get most done where others take so many of the cores.

    All threads wait for the slowest: n of them on n cores, of one of which others take the share
    x, do the work of n (1 - x), and n - 1 threads beside it that of n - 1.

    >>> worth_using(2, 0.45), worth_using(2, 0.55), worth_using(8, 2.5)
    (2, 1, 5)
    """
    whole = math.floor(taken)
    free = cores - whole
    return free - 1 if (taken - whole) * free > 1 else free
