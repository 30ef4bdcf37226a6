"""A pool of worker processes that answer one JSON line with one JSON line, under a wall clock.

A worker that is late, dies or talks nonsense is killed and replaced at the next request. Workers
end with their parent, whose end closes their pipe. Safe under threads; the caller's event loop
does not matter.

Does not know what is asked. Source: own.
"""

from __future__ import annotations

import json
import queue
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import VerifierError

__all__ = ["WorkerPool"]


class WorkerPool:
    """Workers of one kind, started when first needed.

    Args:
        command: program and arguments of a worker; it writes one line when it is ready.
        size: most workers at a time.
        name: in messages.
        start_timeout_s: how long a start may take, seconds.
    """

    def __init__(
        self, command: Sequence[str], size: int, name: str, *, start_timeout_s: float = 60.0
    ) -> None:
        self._command = list(command)
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._free: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(max(1, size)):
            self._free.put(None)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.starts = 0
        """Workers started so far."""
        self._finalizer = weakref.finalize(self, _end_all, self._running)

    def ask(
        self,
        request: Mapping[str, Any],
        timeout_s: float,
        stop: threading.Event | None = None,
    ) -> dict[str, Any]:
        """Return a worker's reply; blocks. Waiting for a free worker does not count as its time.

        Raises:
            VerifierError: no reply within `timeout_s` seconds, the worker died, or `stop` was set:
                nobody waits any more.
        """
        worker = self._free.get()
        try:
            if worker is None:
                worker = self._start()
            reply = self._exchange(worker, json.dumps(request), timeout_s, stop)
        except VerifierError:
            if worker is not None:
                self._end(worker)
            worker = None
            raise
        finally:
            self._free.put(worker)
        return reply

    def close(self) -> None:
        """End all workers; a later request starts new ones."""
        with self._lock:
            running = list(self._running)
        for worker in running:
            self._end(worker)

    def _start(self) -> subprocess.Popen[bytes]:
        worker = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        with self._lock:
            self._running.add(worker)
            self.starts += 1
        try:
            self._read(worker, self._start_timeout_s)
        except VerifierError:
            self._end(worker)
            raise
        return worker

    def _exchange(
        self,
        worker: subprocess.Popen[bytes],
        line: str,
        timeout_s: float,
        stop: threading.Event | None,
    ) -> dict[str, Any]:
        assert worker.stdin is not None
        try:
            worker.stdin.write(line.encode() + b"\n")
        except (BrokenPipeError, ValueError) as exc:
            raise VerifierError(f"{self._name}: its process had died") from exc
        return self._read(worker, timeout_s, stop)

    def _read(
        self,
        worker: subprocess.Popen[bytes],
        timeout_s: float,
        stop: threading.Event | None = None,
    ) -> dict[str, Any]:
        assert worker.stdout is not None
        deadline = time.monotonic() + timeout_s
        data = b""
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or (stop is not None and stop.is_set()):
                raise VerifierError(f"{self._name}: no result within {timeout_s:g} s")
            if not select.select([worker.stdout], [], [], min(left, 0.1 if stop else left))[0]:
                continue
            more = worker.stdout.read(65536)
            if not more:
                raise VerifierError(f"{self._name}: its process died (exit {worker.poll()})")
            data += more
        try:
            reply = json.loads(data)
        except ValueError as exc:
            raise VerifierError(f"{self._name}: unreadable reply {data[:80]!r}") from exc
        if not isinstance(reply, dict):
            raise VerifierError(f"{self._name}: unreadable reply {data[:80]!r}")
        return reply

    def _end(self, worker: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.discard(worker)
        _end_one(worker)


def _end_one(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            pipe.close()


def _end_all(running: set[subprocess.Popen[bytes]]) -> None:
    while running:
        _end_one(running.pop())
