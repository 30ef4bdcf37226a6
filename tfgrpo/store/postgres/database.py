"""One run's rows on a PostgreSQL server: the `RowStore` of a writer among others.

Everything is written by one thread, in the order in which it was handed over: what is handed over
while a transaction runs becomes the next one, so a batch grows with the load. Reading has a
connection of its own. Does not know transactions (`batches`) or what the rows mean. Source: own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from tfgrpo.errors import StoreError, TfgrpoError
from tfgrpo.runtime.event_loop import running_loop
from tfgrpo.store.postgres.address import Address
from tfgrpo.store.postgres.batches import BatchWriter, decides
from tfgrpo.store.postgres.items import Item, Start, resolve
from tfgrpo.store.postgres.link import Link
from tfgrpo.store.postgres.statements import from_server, in_dialect, to_server
from tfgrpo.store.postgres.tranches import Refusal, Units
from tfgrpo.store.rows import Claim, Statement

__all__ = ["PostgresDatabase"]

log = logging.getLogger(__name__)

_MOST_ITEMS = 500
"""Of one transaction."""
_AFTER_A_FAILURE_S = 1.0


class PostgresDatabase:
    """Rows of one run; safe from any thread, several processes at a time.

    Args:
        address: of the run.
        reader: the connection for reading.
        batches: what writes; None for one that only looks.
    """

    is_shared = True
    is_full = False

    def __init__(
        self,
        address: Address,
        reader: Link,
        batches: BatchWriter | None = None,
    ) -> None:
        self.address = address
        self.failure: StoreError | None = None
        """Why the newest write failed; None after one that did not."""
        self._reader = reader
        self._reading = threading.Lock()
        self._batches = batches
        self._new = threading.Condition()
        self._queue: list[Item] = []
        self._jobs: list[tuple[Units, Future[Refusal | None]]] = []
        self._pending = 0
        """Items handed over and not done."""
        self._wakes_in: asyncio.AbstractEventLoop | None = None
        self._calls = iter(range(0))
        self._numbering = threading.Lock()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        if batches is not None:
            self._thread = threading.Thread(
                target=self._run, args=(batches,), daemon=True, name="journal"
            )
            self._thread.start()

    @property
    def name(self) -> str:
        """How messages call it."""
        return str(self.address)

    @property
    def session(self) -> int:
        """The number of this writer's session."""
        return 0 if self._batches is None else self._batches.seat.session

    @property
    def rows(self) -> int:
        """Rows committed by this writer."""
        return 0 if self._batches is None else self._batches.rows

    def _writing(self) -> BatchWriter:
        """Return what writes.

        Raises:
            StoreError: this one only looks.
        """
        if self._batches is None:
            raise StoreError(f"{self.name!r} was opened to look only")
        return self._batches

    # Handing over -----------------------------------------------------------------------------

    def put(self, statements: Sequence[Statement]) -> None:
        """Hand rows over without waiting."""
        if statements:
            self._hand_over(Item(list(statements)))

    def put_this_turn(self, statements: Sequence[Statement]) -> None:
        """Hand rows over without waiting, ahead of all that is handed over later; without a running
        loop, return when they are written.

        Raises:
            StoreError: without a loop, they could not be written.
        """
        if running_loop() is None:
            self.commit_now(statements)
        else:
            self.put(statements)

    async def commit(self, statements: Sequence[Statement]) -> None:
        """Hand rows over and return when they are committed.

        Raises:
            StoreError: they could not be written; they stay handed over.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hand_over(Item(list(statements), done))
        await done

    def commit_now(self, statements: Sequence[Statement]) -> None:
        """Write rows, and all that was handed over before them, before it returns.

        Raises:
            StoreError: they could not be written; they stay handed over.
        """
        done: Future[None] = Future()
        self._hand_over(Item(list(statements), done))
        done.result()

    def flush(self) -> None:
        """Write everything that was handed over."""
        if self._pending:
            self.commit_now([])

    def drop(self, statements: Sequence[Statement]) -> None:
        """Take rows back that could not be written yet."""
        gone = {id(s) for s in statements}
        with self._new:
            for item in self._queue:
                item.statements = [s for s in item.statements if id(s) not in gone]

    def _hand_over(self, item: Item) -> None:
        self._writing()
        loop = running_loop()
        with self._new:
            if self._is_closing:
                raise StoreError(f"{self.name!r} is closed")
            self._queue.append(item)
            self._pending += 1
            if loop is None or item.done is None or isinstance(item.done, Future):
                self._new.notify()
                return
            if self._wakes_in is loop:
                return
            self._wakes_in = loop
        loop.call_soon(self._wake)  # what a turn hands over is one transaction

    def _put_back(self, statements: list[Statement]) -> None:
        """Hand rows over for others, under the lock, also while it closes."""
        self._queue.append(Item(statements))
        self._pending += 1
        self._new.notify()

    def _wake(self) -> None:
        with self._new:
            self._wakes_in = None
            self._new.notify()

    async def start_call(
        self,
        intent: Callable[[int, int], Statement],
        unsent: Callable[[int], list[Statement]],
        keys: Sequence[bytes] = (),
    ) -> Claim:
        """Write a call's intent with the claim on its draws; see `RowStore.start_call`.

        Raises:
            StoreError: it could not be written, so the call must not be sent.
        """
        terms = self._writing().seat.terms
        while True:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            start = Start([], done, None, self._next_call(), tuple(keys), intent, unsent)
            self._hand_over(start)
            try:
                await done
            except asyncio.CancelledError:
                with self._new:
                    start.is_given_up = True
                    if start.is_unsent:
                        self._put_back(unsent(start.call))
                raise
            if keys and not start.mine:
                return Claim(None, start.mine)
            if time.monotonic() - start.asked_at <= terms.send_within_s:
                return Claim(start.call, start.mine if keys else None)
            log.debug("%s: a call waited too long to be sent; it is asked for anew", self.name)
            self.put(unsent(start.call))

    def _next_call(self) -> int:
        with self._numbering:
            for number in self._calls:
                return number
            first = self._reader_value("SELECT nextval('tfgrpo.call_block')")
            self._calls = iter(range(first + 1, first + 1000))
            return first

    def draw(self, units: Units) -> Future[Refusal | None]:
        """Draw a tranche for further amounts, in the writing thread."""
        done: Future[Refusal | None] = Future()
        with self._new:
            if self._is_closing:
                raise StoreError(f"{self.name!r} is closed")
            self._jobs.append((units, done))
            self._new.notify()
        return done

    def lease_group(self, group_id: str, verifier_id: str) -> bool:
        """Return True where this writer makes a group: nobody else does, or who did is gone, or
        has closed it. Held until the session ends.

        Raises:
            StoreError: the server cannot be reached.
        """
        sql = (
            "INSERT INTO tfgrpo.leases AS l (group_id, verifier_id, session) VALUES (%s, %s, %s)"
            " ON CONFLICT (run, group_id, verifier_id) DO UPDATE SET session = excluded.session"
            " WHERE l.session = excluded.session OR EXISTS (SELECT FROM tfgrpo.writers w"
            "   WHERE w.run = l.run AND w.session = l.session AND w.closed_at IS NOT NULL)"
            "  OR EXISTS (SELECT FROM tfgrpo.groups g WHERE g.run = l.run"
            "   AND g.group_id = l.group_id AND g.verifier_id = l.verifier_id)"
            " RETURNING session"
        )
        values = (to_server(group_id), to_server(verifier_id), self._writing().seat.session)
        with self._reading:
            rows = self._reader.retry(
                "lease a group of", lambda c: c.execute(sql, values).fetchall()
            )
        return bool(rows)

    # Reading ------------------------------------------------------------------------------------

    def read(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query over what is committed."""
        text, given = in_dialect(sql), tuple(to_server(v) for v in values)
        with self._reading:
            rows = self._reader.retry("read", lambda c: c.execute(text, given).fetchall())
        return [tuple(from_server(v) for v in row) for row in rows]

    def _reader_value(self, sql: str) -> int:
        with self._reading:
            row = self._reader.retry("read", lambda c: c.execute(sql).fetchone())
        return int(row[0])

    def copy_from(self, source: Any, statements: Iterable[str]) -> None:
        """Run copying statements against another run of the same database, all or nothing."""
        self.flush()

        def copy(connection: Any) -> None:
            with connection.transaction():
                connection.execute("SET LOCAL synchronous_commit = on")
                connection.execute(
                    "SELECT set_config('tfgrpo.old', run::text, true) FROM tfgrpo.runs"
                    " WHERE name = %s",
                    (source.run,),
                )
                for sql in statements:
                    table = sql.split()[2]
                    connection.execute(
                        in_dialect(sql).replace(f"INTO {table}", f"INTO tfgrpo.{table}", 1)
                    )

        with self._reading:
            self._reader.retry("write to", copy)

    # The writing thread --------------------------------------------------------------------------

    def _run(self, batches: BatchWriter) -> None:
        beat_s = batches.seat.terms.beat_s
        next_beat = time.monotonic() + beat_s
        while True:
            with self._new:
                self._new.wait_for(
                    lambda: self._queue or self._jobs or self._is_closing,
                    max(0.0, next_beat - time.monotonic()),
                )
                if batches.is_abandoned:
                    return
                if self._is_closing and (not self._queue or self.failure is not None):
                    return
                items, self._queue = self._queue[:_MOST_ITEMS], self._queue[_MOST_ITEMS:]
                jobs, self._jobs = self._jobs, []
            for units, done in jobs:
                try:
                    done.set_result(batches.draw(units))
                except TfgrpoError as exc:
                    done.set_exception(exc)
            if items:
                self._save(batches, items)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + beat_s
                with suppress(TfgrpoError):  # whoever commits next has it
                    batches.beat()

    def _save(self, batches: BatchWriter, items: list[Item]) -> None:
        """Write items and tell whoever waits; what could not be written stays handed over."""
        error: StoreError | None = None
        try:
            batches.save(items)
        except TfgrpoError as exc:
            error = exc if isinstance(exc, StoreError) else StoreError(str(exc))
        with self._new:
            self.failure = error
            self._pending -= len(items)
            if error is not None:  # what was paid for is tried again; a call is not sent
                kept = [Item(i.statements) for i in items if i.statements]
                self._queue = kept + self._queue
                self._pending += len(kept)
            for item in items if error is None else ():
                self._note_written(item, batches.seat.lost)
        resolve(items, error)
        if error is not None and not self._is_closing:
            time.sleep(_AFTER_A_FAILURE_S)

    def _note_written(self, item: Item, lost: StoreError | None) -> None:
        """After a commit: who may go on, who may not, and calls that nobody will send."""
        if isinstance(item, Start):
            item.is_written = item.error is None and lost is None
            if item.is_unsent:
                self._put_back(item.unsent(item.call))
        if lost is not None and (isinstance(item, Start) or any(map(decides, item.statements))):
            item.error = lost

    # Leaving --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is left, give back what is held, and close the connections; may be called
        twice.

        Raises:
            StoreError: something could not be written.
        """
        with self._new:
            if self._is_closing:
                return
            self._is_closing = True
            self._new.notify()
        if self._batches is not None:
            self._batches.hurry()
        try:
            if self._thread is not None:
                self._thread.join()
            if self.failure is not None:
                raise self.failure
            if self._batches is not None:
                self._batches.leave()
        finally:
            self._part()

    def abandon(self) -> None:
        """Forget what was not written, as a killed process does."""
        with self._new:
            self._is_closing = True
            left, self._queue = self._queue, []
            self._new.notify()
        if self._batches is not None:
            self._batches.abandon()
        self._reader.stop()
        if self._thread is not None:
            self._thread.join()
        self._part()
        resolve(left, StoreError(f"{self.name!r} was left"))

    def _part(self) -> None:
        self._refuse_jobs()
        if self._batches is not None:
            self._batches.close()
        self._reader.close()

    def _refuse_jobs(self) -> None:
        with self._new:
            jobs, self._jobs = self._jobs, []
        for _, done in jobs:
            done.set_exception(StoreError(f"{self.name!r} is closed"))
