"""Workers under supervision: who gets which unit, who is lost, who takes its place.

A worker is started, watched, killed and replaced here and nowhere else, whatever it is: a process,
an actor of a cluster. What it had in hand when it was lost is told to whoever waits for it; nothing
is started again but on request. A unit that was lost twice runs alone in a worker, so that one that
kills workers is found out and its neighbours are not blamed.

Does not know how messages travel, or what a unit is for. Source: own; supervision after OTP's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tfgrpo.errors import ExecutorError, TfgrpoError, UnitLost
from tfgrpo.execute.protocol import Unit
from tfgrpo.rollout import Rollout
from tfgrpo.runtime.event_loop import start_task
from tfgrpo.workers.codec import error_from_dict
from tfgrpo.workers.work import WorkSpec

log = logging.getLogger(__name__)

__all__ = ["Link", "PoolExecutor", "StartLink", "WorkerPool"]

Message = dict[str, Any]
_CONTEXTS = 128
"""Contexts that a worker keeps."""
_ALONE_FROM = 2
"""A unit that was lost so often runs alone."""
_MOST_STARTS = 5
"""Starts that may fail in a row, with no worker alive, before the run stops."""
_YOUNG_S = 10.0
_MOST_BACKOFF_S = 30.0


class Link(Protocol):
    """One worker, as the pool sees it.

    Contract: what is sent arrives in order, or the worker is lost; `on_lost` is called once, and
    nothing after it.
    """

    @property
    def name(self) -> str:
        """For messages: what and where it is."""
        ...

    def send(self, messages: list[Message]) -> None:
        """Hand messages over; does not wait."""
        ...

    async def kill(self) -> None:
        """End the worker, however busy it is."""
        ...


StartLink = Callable[[Callable[[Message], None], Callable[[str], None]], Awaitable[Link]]
"""Starts a worker, given what takes its messages and what is told that it is lost and why."""


@dataclass(eq=False)
class _Worker:
    link: Link
    started: float
    taken: int = 0
    """Slots in use, those included that were handed over and not used yet."""
    open: dict[int, asyncio.Queue[Message]] = field(default_factory=dict)
    known: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Works and contexts that it has."""
    is_alone: bool = False
    """It runs one unit that nothing may stand beside."""


class WorkerPool:
    """Workers of one kind.

    Args:
        start: starts one.
        workers: how many.
        slots: units that one works on at once.
        grace_s: time beyond a unit's own deadlines after which its worker counts as hung.
    """

    def __init__(
        self, start: StartLink, *, workers: int, slots: int, grace_s: float = 30.0
    ) -> None:
        self._start, self._size, self._slots, self._grace_s = start, workers, slots, grace_s
        self._workers: list[_Worker] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: deque[asyncio.Future[_Worker]] = deque()
        self._waiting_alone: deque[asyncio.Future[_Worker]] = deque()
        self._numbers = 0
        self._failed_starts = 0
        self._young = 0
        """Workers in a row that were lost soon after their start."""
        self._failure: TfgrpoError | None = None
        self._is_started = self._is_closed = False
        self.lost = 0
        """Workers that were lost so far."""

    @property
    def alive(self) -> list[str]:
        """The names of the workers that are up."""
        return [worker.link.name for worker in self._workers]

    async def submit(self, spec: WorkSpec, unit: Unit) -> AsyncGenerator[Rollout, None]:
        """Run a unit on a worker; as `Executor.submit`."""
        alone = unit.losses >= _ALONE_FROM
        worker = await self._slot(alone)
        self._numbers += 1
        number = self._numbers
        queue: asyncio.Queue[Message] = asyncio.Queue()
        limits = spec.settings
        most_s = limits.timeout_s + len(unit.indices) * limits.verifier_timeout_s + self._grace_s
        loop = asyncio.get_running_loop()
        timer = loop.call_later(most_s, self._hung, worker, f"no answer within {most_s:.0f} s")
        has_ended = False
        try:
            worker.open[number] = queue
            row = {"unit": unit.to_dict(), "work": spec.digest, "number": number}
            worker.link.send([*self._needed(worker, spec, unit), row])
            while True:
                message = await queue.get()
                if "rollout" in message:
                    yield Rollout.from_dict(message["rollout"])
                    continue
                has_ended = True
                if "lost" in message:
                    raise UnitLost(
                        f"{worker.link.name} was lost with task {unit.task.task_id!r} "
                        f"({message['lost']})"
                    )
                if "error" in message:
                    raise error_from_dict(message["error"])
                return
        finally:
            timer.cancel()
            worker.open.pop(number, None)
            if not has_ended and worker in self._workers:
                worker.link.send([{"cancel": number}])
            self._release(worker, alone)

    def _needed(self, worker: _Worker, spec: WorkSpec, unit: Unit) -> list[Message]:
        """What a worker has to know before a unit, and does not yet."""
        messages: list[Message] = []
        if spec.digest not in worker.known:
            worker.known[spec.digest] = None
            messages.append({"work": spec.to_dict(), "digest": spec.digest})
        name = unit.context.context_hash
        if not unit.context.is_empty:
            if name not in worker.known:
                messages.append({"context": unit.context.to_dict(), "hash": name})
            worker.known[name] = None
            worker.known.move_to_end(name)
            if len(worker.known) > _CONTEXTS:
                oldest = next(n for n in worker.known if n != spec.digest)
                del worker.known[oldest]
                messages.append({"forget": oldest})
        return messages

    # Slots.

    async def _slot(self, alone: bool) -> _Worker:
        """Wait for a slot; alone: for a whole worker."""
        self._ensure_started()
        if self._failure is not None:
            raise self._failure
        turn: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        waiting = self._waiting_alone if alone else self._waiting
        waiting.append(turn)
        self._hand_out()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._release(turn.result(), alone)
            elif turn in waiting:
                waiting.remove(turn)
            raise

    def _hand_out(self) -> None:
        """Give free slots to those that wait, in order; whole workers first."""
        for waiting in (self._waiting, self._waiting_alone):
            while waiting and waiting[0].done():  # cancelled
                waiting.popleft()
        while self._waiting_alone:
            idle = min(self._workers, key=lambda w: (w.is_alone, w.taken), default=None)
            if idle is None or idle.taken:
                break
            idle.is_alone = True
            self._give(self._waiting_alone, idle)
        kept = None  # a worker that is emptied for a unit that must run alone
        if self._waiting_alone:
            kept = min(self._workers, key=lambda w: (w.is_alone, w.taken), default=None)
        while self._waiting:
            free = [
                w for w in self._workers
                if w.taken < self._slots and not w.is_alone and w is not kept
            ]  # fmt: skip
            if not free:
                break
            self._give(self._waiting, min(free, key=lambda w: w.taken))

    @staticmethod
    def _give(waiting: deque[asyncio.Future[_Worker]], worker: _Worker) -> None:
        turn = waiting.popleft()
        if not turn.done():
            worker.taken += 1
            turn.set_result(worker)

    def _release(self, worker: _Worker, alone: bool) -> None:
        worker.taken -= 1
        worker.is_alone = worker.is_alone and not alone
        self._hand_out()

    # Supervision.

    def _ensure_started(self) -> None:
        if self._is_closed:
            raise ExecutorError("the workers have been closed")
        if not self._is_started:
            self._is_started = True
            for _ in range(self._size):
                start_task(self._raise_worker(0.0), self._tasks)

    async def _raise_worker(self, wait_s: float) -> None:
        """Start one worker, again after a pause where that fails."""
        while not self._is_closed:
            await asyncio.sleep(wait_s)
            early: list[str] = []
            made: list[_Worker] = []

            def lost(why: str, early: list[str] = early, made: list[_Worker] = made) -> None:
                if made:
                    self._lost(made[0], why)
                else:
                    early.append(why)

            def take(message: Message, made: list[_Worker] = made) -> None:
                queue = made[0].open.get(message["number"]) if made else None
                if queue is not None:
                    queue.put_nowait(message)

            try:
                link = await self._start(take, lost)
            except ExecutorError as exc:
                early.append(str(exc))
            except TfgrpoError as exc:  # an absent library, a wrong address: no try will mend it
                self._fail(exc)
                return
            if not early:
                made.append(_Worker(link, time.monotonic()))
                self._workers.append(made[0])
                self._failed_starts = 0
                self._hand_out()
                return
            self._failed_starts += 1
            log.warning("a worker did not start: %s", early[0])
            if self._failed_starts >= _MOST_STARTS and not self._workers:
                self._fail(ExecutorError(f"no worker starts: {early[0]}"))
                return
            wait_s = min(_MOST_BACKOFF_S, max(0.2, 2.0 * wait_s))

    def _lost(self, worker: _Worker, why: str) -> None:
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        self.lost += 1
        log.warning("%s was lost (%s) with %d units in hand", worker.link.name, why,
                    len(worker.open))  # fmt: skip
        for queue in worker.open.values():
            queue.put_nowait({"lost": why})
        if not self._is_closed:
            # One that dies soon after its start is replaced after a growing pause.
            is_young = time.monotonic() - worker.started < _YOUNG_S
            self._young = self._young + 1 if is_young else 0
            wait_s = min(_MOST_BACKOFF_S, 0.25 * 2.0**self._young) if is_young else 0.0
            start_task(self._raise_worker(wait_s), self._tasks)

    def _hung(self, worker: _Worker, why: str) -> None:
        if worker in self._workers:
            self._lost(worker, why)
            start_task(worker.link.kill(), self._tasks)

    def _fail(self, failure: TfgrpoError) -> None:
        """Nothing can be done here any more."""
        self._failure = failure
        for waiting in (self._waiting, self._waiting_alone):
            while waiting:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_exception(failure)

    async def aclose(self) -> None:
        """End all workers."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        workers, self._workers = self._workers, []
        for worker in workers:
            for queue in worker.open.values():
                queue.put_nowait({"lost": "the workers were closed"})
        await asyncio.gather(*(worker.link.kill() for worker in workers))
        self._fail(ExecutorError("the workers have been closed"))


class PoolExecutor:
    """One work on the workers of a pool; an `Executor`.

    Args:
        pool: shared with other works; whoever made it closes it.
        spec: the work.
    """

    def __init__(self, pool: WorkerPool, spec: WorkSpec) -> None:
        self._pool, self._spec = pool, spec

    def submit(self, unit: Unit) -> AsyncGenerator[Rollout, None]:
        """Run a unit."""
        return self._pool.submit(self._spec, unit)

    async def aclose(self) -> None:
        """The pool is its maker's."""
