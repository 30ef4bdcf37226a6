"""One run's rows on a PostgreSQL server: the `RowStore` of a writer among others.

Everything is written by one thread, in the order in which it was handed over: what is handed over
while a transaction runs becomes the next one, so a batch grows with the load. Each transaction
names its session and its number (`tfgrpo.hold`): a writer whose session was closed cannot write on
as if nothing had happened, and one whose connection broke in a commit learns whether it went
through, so that a row is never written twice.

A call is written together with the claim on its draws: one statement says which of them nobody
else asks for. Does not know what the rows mean. Source: own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tfgrpo.errors import StoreError, TfgrpoError
from tfgrpo.store.database import Claim, Statement, aside_row, statement_words
from tfgrpo.store.postgres.address import Address
from tfgrpo.store.postgres.link import FENCED, Link, Pause, explain, is_bad_row
from tfgrpo.store.postgres.seat import Seat, reap
from tfgrpo.store.postgres.statements import (
    TABLES,
    array_text,
    bulk_of,
    from_server,
    in_dialect,
    insert_sql,
    to_server,
)
from tfgrpo.store.postgres.tranches import Refusal, SharedLedger, Units

__all__ = ["PostgresDatabase"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_COMMITTED = "TF002"
_MOST_ITEMS = 500
_CALLS = tuple(TABLES["calls"])
_CLAIM = (
    "WITH mine AS MATERIALIZED (SELECT key, call FROM tfgrpo.claim(%s, %s::bytea[], %s::bigint[],"
    " %s)), kept AS ("
    + insert_sql("calls", _CALLS)
    + " WHERE u.call IN (SELECT m.call FROM mine m)) SELECT key, call FROM mine"
)
_DECIDING = ("decisions", "libraries", "groups", "meta")
"""Tables that a writer without a seat leaves alone."""


@dataclass(slots=True, eq=False)
class _Item:
    """Something handed over, and who waits for it."""

    statements: list[Statement]
    done: asyncio.Future[Any] | Future[Any] | None = None
    error: StoreError | None = None


@dataclass(slots=True, eq=False)
class _Start(_Item):
    """A call about to be sent."""

    call: int = 0
    keys: tuple[bytes, ...] = ()
    intent: Callable[[int, int], Statement] = field(default=lambda call, session: ("", ()))
    unsent: Callable[[int], list[Statement]] = field(default=lambda call: [])
    asked_at: float = 0.0
    """Monotonic, before the first attempt to write it."""
    mine: frozenset[bytes] = frozenset()
    """The draws that are this call's."""
    is_written: bool = False
    is_given_up: bool = False
    """True where the task that wanted it was cancelled."""

    @property
    def is_unsent(self) -> bool:
        """True where its intent stands and nobody will send it."""
        return self.is_written and self.is_given_up and bool(self.mine or not self.keys)


class PostgresDatabase:
    """Rows of one run; safe from any thread, several processes at a time.

    Args:
        address: of the run.
        links: two connections: for writing and for reading.
        seat: the writer's; None for one that only looks.
        ledger: of the seat.
    """

    is_shared = True
    is_full = False

    def __init__(
        self,
        address: Address,
        links: tuple[Link, Link],
        seat: Seat | None = None,
        ledger: SharedLedger | None = None,
    ) -> None:
        self.address = address
        self.rows = 0
        """Rows committed by this writer."""
        self.failure: StoreError | None = None
        """Why the newest write failed; None after one that did not."""
        self._link, self._reader = links
        self._reading = threading.Lock()
        self._seat = seat
        self._ledger = ledger
        self._new = threading.Condition()
        self._queue: list[_Item] = []
        self._jobs: list[tuple[Units, Future[Refusal | None]]] = []
        self._pending = 0
        """Items handed over and not done."""
        self._wakes_in: asyncio.AbstractEventLoop | None = None
        self._calls = iter(range(0))
        self._numbering = threading.Lock()
        self._is_closing = self._is_abandoned = False
        self._thread: threading.Thread | None = None
        if seat is not None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="journal")
            self._thread.start()

    @property
    def name(self) -> str:
        """How messages call it."""
        return str(self.address)

    @property
    def session(self) -> int:
        """The number of this writer's session."""
        return 0 if self._seat is None else self._seat.session

    # Handing over -----------------------------------------------------------------------------

    def put(self, statements: Sequence[Statement]) -> None:
        """Hand rows over without waiting."""
        if statements:
            self._hand_over(_Item(list(statements)))

    def put_this_turn(self, statements: Sequence[Statement]) -> None:
        """Hand rows over without waiting, ahead of all that is handed over later; without a running
        loop, return when they are written.

        Raises:
            StoreError: without a loop, they could not be written.
        """
        if _running_loop() is None:
            self.commit_now(statements)
        else:
            self.put(statements)

    async def commit(self, statements: Sequence[Statement]) -> None:
        """Hand rows over and return when they are committed.

        Raises:
            StoreError: they could not be written; they stay handed over.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hand_over(_Item(list(statements), done))
        await done

    def commit_now(self, statements: Sequence[Statement]) -> None:
        """Write rows, and all that was handed over before them, before it returns.

        Raises:
            StoreError: they could not be written; they stay handed over.
        """
        done: Future[None] = Future()
        self._hand_over(_Item(list(statements), done))
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

    def _hand_over(self, item: _Item) -> None:
        if self._thread is None:
            raise StoreError(f"{self.name!r} was opened to look only")
        loop = _running_loop()
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
        self._queue.append(_Item(statements))
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
        while True:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            start = _Start([], done, None, self._next_call(), tuple(keys), intent, unsent)
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
            assert self._seat is not None
            if time.monotonic() - start.asked_at <= self._seat.terms.send_within_s:
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
        assert self._seat is not None
        sql = (
            "INSERT INTO tfgrpo.leases AS l (group_id, verifier_id, session) VALUES (%s, %s, %s)"
            " ON CONFLICT (run, group_id, verifier_id) DO UPDATE SET session = excluded.session"
            " WHERE l.session = excluded.session OR EXISTS (SELECT FROM tfgrpo.writers w"
            "   WHERE w.run = l.run AND w.session = l.session AND w.closed_at IS NOT NULL)"
            "  OR EXISTS (SELECT FROM tfgrpo.groups g WHERE g.run = l.run"
            "   AND g.group_id = l.group_id AND g.verifier_id = l.verifier_id)"
            " RETURNING session"
        )
        values = (to_server(group_id), to_server(verifier_id), self._seat.session)
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

    def _run(self) -> None:
        assert self._seat is not None
        beat_s = self._seat.terms.beat_s
        next_beat = time.monotonic() + beat_s
        while True:
            with self._new:
                self._new.wait_for(
                    lambda: self._queue or self._jobs or self._is_closing,
                    max(0.0, next_beat - time.monotonic()),
                )
                if self._is_abandoned:
                    return
                if self._is_closing and (not self._queue or self.failure is not None):
                    return
                items, self._queue = self._queue[:_MOST_ITEMS], self._queue[_MOST_ITEMS:]
                jobs, self._jobs = self._jobs, []
            for units, done in jobs:
                self._do_draw(units, done)
            if items:
                self._do_items(items)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + beat_s
                with suppress(TfgrpoError):  # whoever commits next has it
                    self._beat()

    def _do_items(self, items: list[_Item]) -> None:
        error: StoreError | None = None
        try:
            self._save(items)
        except TfgrpoError as exc:
            error = exc if isinstance(exc, StoreError) else StoreError(str(exc))
        with self._new:
            self.failure = error
            self._pending -= len(items)
            if error is not None:  # what was paid for is tried again; a call is not sent
                kept = [_Item(i.statements) for i in items if i.statements]
                self._queue = kept + self._queue
                self._pending += len(kept)
            for item in items if error is None else ():
                self._note_written(item)
        _resolve(items, error)
        if error is not None and not self._is_closing:
            time.sleep(1.0)

    def _note_written(self, item: _Item) -> None:
        """After a commit: who may go on, who may not, and calls that nobody will send."""
        assert self._seat is not None
        lost = self._seat.lost
        if isinstance(item, _Start):
            item.is_written = item.error is None and lost is None
            if item.is_unsent:
                self._put_back(item.unsent(item.call))
        if lost is not None and (isinstance(item, _Start) or any(map(_decides, item.statements))):
            item.error = lost

    def _save(self, items: list[_Item]) -> None:
        """Write items; rows that no column can hold are set aside and named, never the rest.

        Raises:
            StoreError: the server is away or refuses; nothing of them is written.
        """
        now = time.monotonic()
        statements = [s for item in items for s in item.statements]
        starts = [i for i in items if isinstance(i, _Start) and not i.is_given_up]
        for start in starts:
            start.asked_at = now
        try:
            self._once("write to", lambda c, s: self._write(c, s, statements, starts))
        except StoreError as exc:
            if exc.__cause__ is None or not is_bad_row(exc.__cause__):
                raise
            self._once("write to", lambda c, s: self._write_one_by_one(c, s, statements, starts))
        self.rows += len(statements) + len(starts)

    def _once(self, doing: str, work: Callable[[Any, int], T]) -> T | None:
        """Do work in one transaction of this writer, exactly once whatever breaks.

        Returns:
            What `work` returned in the attempt that was committed.

        Raises:
            StoreError: the server is away for too long, or refuses.
        """
        assert self._seat is not None
        seat, link = self._seat, self._link
        number, pause = seat.next_batch(), Pause(link.patience_s)
        result: T | None = None
        while True:
            connection = None
            try:
                connection = link.connection
                with connection.transaction():
                    connection.execute(
                        "SELECT tfgrpo.hold(%s, %s, %s)",
                        (seat.session, number, seat.terms.lease_s),
                    )
                    result = work(connection, seat.session)
                return result
            except Exception as exc:
                state = getattr(exc, "sqlstate", None) or ""
                if state == _COMMITTED:
                    return result
                if self._is_abandoned or not self._goes_on(exc, state, pause):
                    if isinstance(exc, TfgrpoError):
                        raise
                    raise explain(self.address, doing, exc) from exc

    def _goes_on(self, exc: Exception, state: str, pause: Pause) -> bool:
        """After a failed attempt: True where another one may succeed."""
        if state == FENCED:
            self._sit_down_again()
            return True
        return self._link.may_repeat(exc) and pause.wait(self.address, exc)

    def _sit_down_again(self) -> None:
        assert self._seat is not None
        seat = self._seat
        log.warning(
            "%s: session %d was closed by others, as if this process were gone; going on with a "
            "new one",
            self.name,
            seat.session,
        )

        def sit(connection: Any) -> None:
            with connection.transaction():
                seat.take_again(connection)

        self._link.retry("go on with", sit)
        if self._ledger is not None:
            self._ledger.begin_again()

    def _write(
        self, connection: Any, session: int, statements: list[Statement], starts: list[_Start]
    ) -> None:
        """Write a batch in the caller's transaction: one statement a table, the claims last.

        Without a seat only what was paid for is written.
        """
        assert self._seat is not None
        if self._seat.lost is not None:
            statements, starts = [s for s in statements if not _decides(s)], []
        by_sql: dict[str, list[tuple[Any, ...]]] = {}
        for sql, values in statements:
            by_sql.setdefault(sql, []).append(values)
        keyed, plain = _intents(starts, session)
        with connection.pipeline():
            # first what may wait for other writers, in the one order that all of them keep
            for sql in sorted(by_sql, key=lambda sql: " ON CONFLICT" not in sql):
                bulk = bulk_of(sql)
                if bulk is not None:
                    connection.execute(bulk.sql, bulk.arrays(by_sql[sql]))
                    continue
                for values in by_sql[sql]:
                    connection.execute(in_dialect(sql), [to_server(v) for v in values])
            if plain:
                bulk = bulk_of(plain[0][0])
                assert bulk is not None
                connection.execute(bulk.sql, bulk.arrays([values for _, values in plain]))
            cursor = self._claim(connection, session, starts, keyed) if keyed else None
        if cursor is not None:
            _divide(starts, cursor.fetchall())

    def _claim(
        self, connection: Any, session: int, starts: list[_Start], keyed: list[Statement]
    ) -> Any:
        assert self._seat is not None
        bulk = bulk_of(keyed[0][0])
        assert bulk is not None and bulk.columns == _CALLS
        pairs = [(key, start.call) for start in starts for key in start.keys]
        return connection.execute(
            _CLAIM,
            [
                session,
                array_text([key for key, _ in pairs], "bytea"),
                array_text([call for _, call in pairs], "bigint"),
                self._seat.terms.call_s,
                *bulk.arrays([values for _, values in keyed]),
            ],
        )

    def _write_one_by_one(
        self, connection: Any, session: int, statements: list[Statement], starts: list[_Start]
    ) -> None:
        """As `_write`, each row by itself; a bad one is set aside."""
        for statement in statements:
            try:
                with connection.transaction():  # a savepoint
                    self._write(connection, session, [statement], [])
            except Exception as exc:
                if not is_bad_row(exc):
                    raise
                words = self.address.clean(statement_words(statement, exc))
                log.error("%s: a row cannot be kept and is set aside: %s", self.name, words)
                self._write(connection, session, [aside_row(statement, words)], [])
        for start in starts:
            try:
                with connection.transaction():
                    self._write(connection, session, [], [start])
            except Exception as exc:
                if not is_bad_row(exc):
                    raise
                start.error = explain(self.address, "write a call to", exc)

    def _do_draw(self, units: Units, done: Future[Refusal | None]) -> None:
        ledger = self._ledger
        assert ledger is not None
        try:
            if not any(ledger.lacks(units).values()):
                done.set_result(None)
                return
            change = self._once("draw from the budget of", lambda c, s: ledger.draw(c, s, units))
            assert change is not None
            done.set_result(change.apply())
        except TfgrpoError as exc:
            done.set_exception(exc)

    def _beat(self) -> None:
        """Give a sign of life, close the sessions of writers that are gone, give back money."""
        seat, ledger = self._seat, self._ledger
        assert seat is not None

        def work(connection: Any, session: int) -> Any:
            has_caps = ledger is not None and ledger.caps
            return ledger.beat(connection, session) if has_caps and ledger else None

        change = self._once("go on with", work)
        if change is not None:
            change.apply()
        self._link.retry("go on with", lambda c: reap(c, seat.terms))

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
        try:
            if self._thread is not None:
                self._thread.join()
                self._leave()
        finally:
            self._refuse_jobs()
            self._link.close()
            self._reader.close()

    def _leave(self) -> None:
        seat = self._seat
        assert seat is not None

        def leave(connection: Any) -> None:
            with connection.transaction():
                connection.execute("SELECT tfgrpo.close_session(%s, false, true)", (seat.session,))
                for session in seat.earlier:
                    connection.execute("SELECT tfgrpo.recount(%s)", (session,))

        try:
            if self.failure is not None:
                raise self.failure
            self._link.retry("close", leave)
        finally:
            seat.leave()

    def abandon(self) -> None:
        """Forget what was not written, as a killed process does."""
        with self._new:
            self._is_closing = self._is_abandoned = True
            left, self._queue = self._queue, []
            self._new.notify()
        self._link.stop()
        self._reader.stop()
        if self._thread is not None:
            self._thread.join()
        if self._seat is not None:
            self._seat.leave()
        _resolve(left, StoreError(f"{self.name!r} was left"))
        self._refuse_jobs()
        self._link.close()
        self._reader.close()

    def _refuse_jobs(self) -> None:
        with self._new:
            jobs, self._jobs = self._jobs, []
        for _, done in jobs:
            done.set_exception(StoreError(f"{self.name!r} is closed"))


def _decides(statement: Statement) -> bool:
    return statement[0].split(maxsplit=3)[2] in _DECIDING


def _intents(starts: list[_Start], session: int) -> tuple[list[Statement], list[Statement]]:
    """Return the rows of calls that claim draws, and of those that do not."""
    keyed: list[Statement] = []
    plain: list[Statement] = []
    for start in starts:
        (keyed if start.keys else plain).append(start.intent(start.call, session))
    return keyed, plain


def _divide(starts: list[_Start], rows: list[tuple[bytes, int]]) -> None:
    by_call: dict[int, set[bytes]] = {}
    for key, call in rows:
        by_call.setdefault(int(call), set()).add(bytes(key))
    for start in starts:
        start.mine = frozenset(by_call.get(start.call, ()))


def _resolve(items: Iterable[_Item], error: StoreError | None) -> None:
    """Tell whoever waits, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for item in items:
        failed = item.error or error
        if isinstance(item.done, Future):
            if failed is None:
                item.done.set_result(None)
            else:
                item.done.set_exception(failed)
        elif item.done is not None:
            by_loop.setdefault(item.done.get_loop(), []).append((item.done, failed))
    for loop, waiting in by_loop.items():
        with suppress(RuntimeError):  # closed: nobody waits any more
            loop.call_soon_threadsafe(_finish, waiting)


def _finish(waiting: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for done, failed in waiting:
        if done.done():
            continue
        if failed is None:
            done.set_result(None)
        else:
            done.set_exception(failed)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
