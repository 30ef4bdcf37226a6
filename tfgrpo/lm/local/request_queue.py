"""Draws that asyncio tasks wait for, queued for one thread that decodes.

A job ties a row to the future of whoever asked for it; a `JobSource` hands the rows out and every
result back to its event loop.

Does not know prompts, models or replies. Source: own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from dataclasses import dataclass, field

from tfgrpo.lm.local.rows import DecodeRow
from tfgrpo.protocols import Generated, Generator, Sampling

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """One draw that somebody waits for."""

    row: DecodeRow
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Generated]

    def settle(self, result: Generated | BaseException) -> None:
        """Hand the result over to the waiting task; called on the engine thread."""
        try:
            self.loop.call_soon_threadsafe(self._set, result)
        except RuntimeError:
            logger.debug("a reply came after its event loop was closed")

    def _set(self, result: Generated | BaseException) -> None:
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


@dataclass(slots=True)
class JobQueue:
    """Waiting jobs, and the engine thread's state; guarded by its lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    jobs: deque[Job] = field(default_factory=deque)
    taken: dict[int, Job] = field(default_factory=dict)
    """Jobs being decoded, by the id of their row."""
    thread: threading.Thread | None = None
    is_closed: bool = False

    def close(self) -> tuple[list[Job], threading.Thread | None]:
        """Refuse further jobs; return those that wait and the thread that decodes."""
        with self.lock:
            self.is_closed = True
            jobs, self.jobs = list(self.jobs), deque()
            for job in jobs:
                job.row.is_cancelled = True
            return jobs, self.thread


def halt(queue: JobQueue) -> None:
    """End the engine thread before the interpreter goes; inside torch it would take the process
    down with SIGABRT (pytorch issue 38228)."""
    _, thread = queue.close()
    with queue.lock:
        for job in queue.taken.values():
            job.row.is_cancelled = True
    if thread is not None:
        thread.join()


class JobSource:
    """Feeds a generator from the queue and hands finished rows to whoever waits."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    def take(
        self, count: int, *, like: Sampling | None = None, in_order: bool = False
    ) -> list[DecodeRow]:
        """Up to `count` rows that somebody still waits for; see `RowQueue`."""
        rows: list[DecodeRow] = []
        with self._queue.lock:
            others: deque[Job] = deque()
            while self._queue.jobs and len(rows) < count and not (in_order and others):
                job = self._queue.jobs.popleft()
                if job.row.is_cancelled:
                    continue
                if like is not None and job.row.sampling != like:
                    others.append(job)
                    continue
                self._queue.taken[id(job.row)] = job
                rows.append(job.row)
            self._queue.jobs.extendleft(reversed(others))
        return rows

    def finish(self, row: DecodeRow, generated: Generated) -> None:
        """Hand a finished row over."""
        with self._queue.lock:
            job = self._queue.taken.pop(id(row), None)
        if job is not None:
            job.settle(generated)

    def fail(self, error: BaseException) -> None:
        """Tell everybody whose row was being decoded."""
        with self._queue.lock:
            jobs = list(self._queue.taken.values())
            self._queue.taken.clear()
        for job in jobs:
            job.settle(error)


def run_batch(generator: Generator, source: JobSource, max_rows: int) -> None:
    """Serve the queue with a generator that knows only whole batches."""
    while rows := source.take(1):
        rows += source.take(max_rows - 1, like=rows[0].sampling)
        replies = generator.generate(
            [r.prompt for r in rows], 1, rows[0].sampling, [[r.seed] for r in rows]
        )
        for row, (generated, *_) in zip(rows, replies, strict=True):
            row.token_ids, row.logprobs = list(generated.token_ids), list(generated.logprobs)
            source.finish(row, generated)
