"""The SQLite file of a run: its tables, how it is opened, and the one way to write to it.

Every table is append-only. Writes are grouped: whatever asyncio tasks hand over in one turn of the
event loop is one transaction, and `commit` returns when it is in the file. WAL with
`synchronous=NORMAL` survives the death of the process at any moment; `durable=True` (`FULL`) also
the loss of power. Transactions run in the thread that writes: one takes some 25 µs, less than
handing it to another thread, whose every statement would wait for the interpreter's lock
(`tests/benchmarks/runs/journal.py` measures both). The slow part, moving the log into the file,
has a thread of its own.

Does not know what the rows mean. Source: SQLite's documentation on WAL; own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tfgrpo.errors import StoreError
from tfgrpo.runtime.event_loop import running_loop
from tfgrpo.store.disk.files import connect, store_errors, uri_of
from tfgrpo.store.disk.page_sums import PageSums
from tfgrpo.store.rows import Claim, Statement, aside_row, statement_words

log = logging.getLogger(__name__)

BATCH_S = 0.02
"""Longest time in seconds that a row which nobody waits for stays out of the file."""
WOKEN_A_TURN = 16
"""Most tasks that go on in one turn of the event loop after a transaction."""
CHECKPOINT_EVERY = 4000
"""Rows between two moves of the log into the file."""
LOG_BYTES = 32_000_000
"""Size of the log from which it is emptied; at `MOST_LOG_BYTES` the writer waits for that."""
MOST_LOG_BYTES = 160_000_000

_BAD_ROW = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,
    OverflowError,
    TypeError,
    ValueError,
)
"""What a row does that no journal can hold: a number beyond 64 bits, a type that SQLite has not, a
reference to a row that was set aside."""
_NOT_THE_DISK = (*_BAD_ROW, sqlite3.OperationalError)


def _is_full(exc: Exception) -> bool:
    name = getattr(exc, "sqlite_errorname", "") or ""
    return name.startswith(("SQLITE_FULL", "SQLITE_IOERR"))


class DatabaseWriter:
    """The one way to write to a journal in a file: a `RowStore`; safe from any thread.

    Rows are written in the order in which they were handed over, also across the three methods.
    Rows whose transaction failed are kept and tried again ahead of the next ones, so that freed
    disk space saves results that were paid for.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        reserve: Path | None = None,
        sums: PageSums | None = None,
    ) -> None:
        self.connection = connection
        self.path = path
        self.session = 0
        """The number of the writing session."""
        self.rows = 0
        """Rows committed by this writer."""
        self.failure: StoreError | None = None
        """Why the newest write failed; None after one that did not."""
        self.is_full = False
        """True once the reserved space had to be given up: nothing new may be paid for."""
        self._reserve = reserve
        self._sums = sums
        self._folded = (b"", 0)
        """Where the log was when it was last moved into the file."""
        # A connection that nobody closes moves the log into the file when Python drops it.
        self._dropped = None if sums is None else weakref.finalize(self, sums.seal)
        self._lock = threading.RLock()
        self._queue: list[Statement] = []
        """Rows handed over and not written, in order."""
        self._refusable: set[int] = set()
        """Identities of rows that are given up where they cannot be written: intents of calls that
        are not sent then."""
        self._waiting: list[asyncio.Future[None]] = []
        self._flush_due_in: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._checkpoint_at = CHECKPOINT_EVERY
        self._log = path.with_name(path.name + "-wal")
        self._empty_again_at = 0
        self._has_work = threading.Event()
        self._keeper: threading.Thread | None = None
        self._next_call = 0

    is_shared = False
    """A file has one writer."""

    @property
    def name(self) -> str:
        """How messages call it."""
        return str(self.path)

    async def start_call(
        self,
        intent: Callable[[int, int], Statement],
        unsent: Callable[[int], list[Statement]],
        keys: Sequence[bytes] = (),
    ) -> Claim:
        """Write a call's intent; see `RowStore.start_call`. With one writer every draw is its own.

        Raises:
            StoreError: it could not be written, so the call must not be sent.
        """
        if not self._next_call:
            self._next_call = int(self.read("SELECT coalesce(max(call), 0) FROM calls")[0][0]) + 1
        call = self._next_call
        self._next_call += 1
        row = intent(call, self.session)
        self._refusable.add(id(row))
        try:
            await self.commit([row])
        except asyncio.CancelledError:
            self.put(unsent(call))
            raise
        finally:
            self._refusable.discard(id(row))
        return Claim(call)

    def lease_group(self, group_id: str, verifier_id: str) -> bool:
        """Return True: with one writer every group is its own."""
        return True

    def put(self, statements: Sequence[Statement]) -> None:
        """Hand rows over without waiting; they are in the file within `BATCH_S`."""
        with self._lock:
            self._queue.extend(statements)
        self._wake_keeper()

    def put_this_turn(self, statements: Sequence[Statement]) -> None:
        """Hand rows over without waiting; they are in the file when this turn of the running event
        loop ends, or at once where no loop runs.

        Whatever is handed over later is written later, so nothing that anybody commits on the
        strength of these rows can be in the file without them.

        Raises:
            StoreError: without a loop, they could not be written.
        """
        loop = running_loop()
        if loop is None:
            self.commit_now(statements)
            return
        with self._lock:
            self._queue.extend(statements)
            self._flush_this_turn(loop)

    async def commit(self, statements: Sequence[Statement]) -> None:
        """Hand rows over and return when they are in the file.

        All tasks that commit in the same turn of the event loop share one transaction.

        Raises:
            StoreError: they could not be written; they stay handed over.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._queue.extend(statements)
            self._waiting.append(done)
            self._flush_this_turn(loop)
        await done

    def _flush_this_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._flush_due_in is not loop:
            self._flush_due_in = loop
            loop.call_soon(self._on_turn)

    def commit_now(self, statements: Sequence[Statement]) -> None:
        """Write rows, and all that was handed over before them, in the calling thread.

        Raises:
            StoreError: they could not be written; they stay handed over.
        """
        with self._lock:
            self._queue.extend(statements)
            self.flush()

    def flush(self) -> None:
        """Write everything that was handed over."""
        with self._lock:
            if not self._queue:
                self._resolve(None)
                return
            batch, self._queue = self._queue, []
            try:
                self._save(batch)
            except StoreError as exc:
                left = [row for row in batch if id(row) not in self._refusable]
                self._queue = left + self._queue
                self.failure = exc
                self._resolve(exc)
                raise
            self.failure = None
            self._resolve(None)
            size = self._log_bytes()
            if size >= max(MOST_LOG_BYTES, self._empty_again_at):
                self._empty_log()
            elif self.rows >= self._checkpoint_at or size >= LOG_BYTES:
                self._wake_keeper()

    def _log_bytes(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def empty_log(self) -> None:
        """Move the log into the file and give its space back; waits for readers.

        Raises:
            StoreError: it cannot be written.
        """
        with self._lock, store_errors(self.path, "write to"):
            self._seal()
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _empty_log(self) -> None:
        """Move what is left of the log into the file and give its space back.

        While rows are written a log only grows: it begins anew only where all of it has been moved,
        which here waits for nobody. A reader that holds it open is tried again later.
        """
        with self._lock:
            if self._is_closed:
                return
            try:
                self._seal()
                self.connection.execute("PRAGMA busy_timeout=0")
                self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.Error as exc:
                log.debug("%s: the log stays as it is: %s", self.path, exc)
            finally:
                self.connection.execute("PRAGMA busy_timeout=10000")
            size = self._log_bytes()
            self._empty_again_at = 0 if size < LOG_BYTES else size + LOG_BYTES

    def _save(self, batch: list[Statement]) -> None:
        """Write a batch; rows that no journal can hold are set aside and named, never the rest.

        Raises:
            StoreError: the disk or the file is at fault; nothing of the batch is written.
        """
        with store_errors(self.path, "write to"):
            try:
                self._write(batch)
                return
            except _NOT_THE_DISK as exc:
                if isinstance(exc, sqlite3.OperationalError):
                    if not self._make_room(exc):
                        raise
                    self._write(batch)
                    return
            for statement in batch:
                try:
                    self._write([statement])
                except _BAD_ROW as exc:
                    words = statement_words(statement, exc)
                    self._write([aside_row(statement, words)])
                    log.error("%s: a row cannot be kept and is set aside: %s", self.path, words)

    def _make_room(self, exc: Exception) -> bool:
        """Give up the reserved space where the disk is full; False where there is none."""
        reserve = self._reserve
        if reserve is None or not _is_full(exc):
            return False
        self._reserve = None
        self.is_full = True
        reserve.unlink(missing_ok=True)
        log.error(
            "%s: the disk is full; what was paid for is kept, nothing new is asked", self.path
        )
        return True

    def drop(self, statements: Sequence[Statement]) -> None:
        """Take rows back that could not be written yet."""
        with self._lock:
            gone = {id(s) for s in statements}
            self._queue = [s for s in self._queue if id(s) not in gone]

    def read(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query over what is in the file."""
        with self._lock, store_errors(self.path, "read"):
            try:
                return self.connection.execute(sql, values).fetchall()
            except sqlite3.OperationalError as exc:
                if "decode to UTF-8" not in str(exc):
                    raise
            # A flipped bit in a text: read on, its digest tells which row it is.
            self.connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
            return self.connection.execute(sql, values).fetchall()

    def copy_from(self, source: Path, statements: Iterable[str]) -> None:
        """Run copying statements against another journal, attached as `old`, all or nothing."""
        with self._lock, store_errors(self.path, "write to"):
            self.flush()
            self.connection.execute("ATTACH DATABASE ? AS old", (uri_of(source),))
            try:
                self._write([(sql, ()) for sql in statements])
            finally:
                self.connection.execute("DETACH DATABASE old")

    def define(self, statements: Iterable[str]) -> None:
        """Add tables or indices, all or nothing.

        Raises:
            StoreError: they could not be added.
        """
        with self._lock, store_errors(self.path, "write to"):
            self.flush()
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                for statement in statements:
                    self.connection.execute(statement)
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise
            self._seal()  # the new tables' definitions

    def close(self) -> None:
        """Write what is left, move the log into the file and close it."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._has_work.set()
        if self._keeper is not None:
            self._keeper.join()
        with self._lock:
            try:
                self.flush()
            finally:
                if self._reserve is not None:
                    self._reserve.unlink(missing_ok=True)
                self._seal()
                with store_errors(self.path, "close"):
                    self.connection.close()
                if self._sums is not None:
                    self._sums.touch()

    def abandon(self) -> None:
        """Forget what was not written and close the file, as a killed process does."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            self._seal()
            self.connection.close()

    def _seal(self) -> None:
        """Keep the checksums of all that the log holds, before it may begin anew."""
        if self._sums is not None:
            self._sums.seal(self.connection)
        if self._is_closed and self._dropped is not None:
            self._dropped.detach()

    def _write(self, batch: Sequence[Statement]) -> None:
        execute = self.connection.execute
        by_sql: dict[str, list[tuple[Any, ...]]] = {}
        for sql, values in batch:
            by_sql.setdefault(sql, []).append(values)
        execute("BEGIN IMMEDIATE")
        try:
            for sql, rows in by_sql.items():  # each table in the order handed over
                self.connection.executemany(sql, rows)
            execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                execute("ROLLBACK")
            raise
        self.rows += len(batch)

    def _on_turn(self) -> None:
        with self._lock:
            self._flush_due_in = None
            self._try_flush()

    def _wake_keeper(self) -> None:
        if self._keeper is None and not self._is_closed:
            with self._lock:
                self._keeper = threading.Thread(target=self._keep, daemon=True, name="journal")
                self._keeper.start()
        self._has_work.set()

    def _keep(self) -> None:
        """Write what nobody waits for, and move the log into the file when it has grown."""
        while not self._is_closed:
            self._has_work.wait()
            self._has_work.clear()
            if self._is_closed:
                return
            time.sleep(BATCH_S)
            with self._lock:
                if self._is_closed:
                    return
                self._try_flush()
            if self.rows >= self._checkpoint_at or self._log_bytes() >= LOG_BYTES:
                self._checkpoint_at = self.rows + CHECKPOINT_EVERY
                with contextlib.suppress(sqlite3.Error):  # the log stays as it is
                    self._fold_log()
                if self._log_bytes() >= max(LOG_BYTES, self._empty_again_at):
                    self._empty_log()

    def _fold_log(self) -> None:
        """Move most of the log into the file, while others write on.

        What is written meanwhile has no checksum yet: a reader keeps it out of the file, and with
        it the log from beginning anew.
        """
        sums = self._sums
        if sums is None:
            _checkpoint(self.path)
            return
        sums.take_log(is_written=True)
        with contextlib.closing(connect(self.path, readonly=True)) as reader:
            with self._lock:
                if self._is_closed:
                    return
                reader.execute("BEGIN")
                reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
                self._seal()
                if sums.place == self._folded:
                    return
                self._folded = sums.place
            _checkpoint(self.path)

    def _try_flush(self) -> None:
        try:
            self.flush()
        except StoreError:
            # Whoever waits has it; rows without a waiter are tried again, `close` raises.
            return

    def _resolve(self, error: StoreError | None) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        here = running_loop()
        for done in waiting:
            loop = done.get_loop()
            if loop is not here and not loop.is_closed():
                loop.call_soon_threadsafe(_finish, done, error)
        if here is not None:
            own = [d for d in waiting if d.get_loop() is here]
            # Who fails may take rows back, before the next transaction takes them along.
            _wake(here, own, error, len(own) if error else WOKEN_A_TURN)


def _checkpoint(path: Path) -> None:
    """Move the log into the file; a failure leaves the log as it is, which loses nothing."""
    try:
        connection = connect(path)
        try:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        finally:
            connection.close()
    except sqlite3.Error:
        return


def _wake(
    loop: asyncio.AbstractEventLoop,
    waiting: Sequence[asyncio.Future[None]],
    error: Exception | None,
    at_once: int,
) -> None:
    """Wake those that wait, so many in a turn of their loop.

    Replies of equal latency come in one turn. Woken all at once, those who wait for them would all
    do each step before any does the next: no call goes out before the last reply is judged, and the
    next replies come together again.
    """
    for done in waiting[:at_once]:
        _finish(done, error)
    if len(waiting) > at_once:
        loop.call_soon(_wake, loop, waiting[at_once:], error, at_once)


def _finish(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
