"""Transactions of one writer of a run: rows, claims on draws, tranches, signs of life.

Each names its session and its number (`tfgrpo.hold`): a writer whose session was closed cannot
write on as if nothing had happened, and one whose connection broke in a commit learns whether it
went through, so that a row is never written twice. A call is written together with the claim on its
draws: one statement says which of them nobody else asks for.

Used by one thread at a time. Does not know queues or what the rows mean. Source: own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tfgrpo.errors import StoreError, TfgrpoError
from tfgrpo.store.postgres.items import Item, Start
from tfgrpo.store.postgres.link import FENCED, Link, Pause, explain, is_bad_row
from tfgrpo.store.postgres.seat import Seat, reap
from tfgrpo.store.postgres.statements import (
    TABLES,
    array_text,
    bulk_of,
    in_dialect,
    insert_sql,
    to_server,
)
from tfgrpo.store.postgres.tranches import Refusal, SharedLedger, Units
from tfgrpo.store.rows import Statement, aside_row, statement_words

__all__ = ["BatchWriter", "decides"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_COMMITTED = "TF002"
_LEAVING_S = 60.0
"""How long a writer that leaves waits for a server that is away."""
_CALLS = tuple(TABLES["calls"])
_CLAIM = (
    "WITH mine AS MATERIALIZED (SELECT key, call FROM tfgrpo.claim(%s, %s::bytea[], %s::bigint[],"
    " %s)), kept AS ("
    + insert_sql("calls", _CALLS)
    + " WHERE u.call IN (SELECT m.call FROM mine m)) SELECT key, call FROM mine"
)
_DECIDING = ("decisions", "libraries", "groups", "meta")
"""Tables that a writer without a seat leaves alone."""


class BatchWriter:
    """Writes what a writer hands over, in transactions of its session.

    Args:
        link: the connection.
        seat: the writer's.
        ledger: the writer's part of the run's.
    """

    def __init__(self, link: Link, seat: Seat, ledger: SharedLedger) -> None:
        self.seat = seat
        self.ledger = ledger
        self.rows = 0
        """Rows committed."""
        self.is_abandoned = False
        """True: try nothing again."""
        self._link = link

    def save(self, items: list[Item]) -> None:
        """Write items; rows that no column can hold are set aside and named, never the rest.

        Raises:
            StoreError: the server is away or refuses; nothing of them is written.
        """
        now = time.monotonic()
        statements = [s for item in items for s in item.statements]
        starts = [i for i in items if isinstance(i, Start) and not i.is_given_up]
        for start in starts:
            start.asked_at = now
        try:
            self.once("write to", lambda c, s: self._write(c, s, statements, starts))
        except StoreError as exc:
            if exc.__cause__ is None or not is_bad_row(exc.__cause__):
                raise
            self.once("write to", lambda c, s: self._write_one_by_one(c, s, statements, starts))
        self.rows += len(statements) + len(starts)

    def once(self, doing: str, work: Callable[[Any, int], T]) -> T | None:
        """Do work in one transaction of this writer, exactly once whatever breaks.

        Returns:
            What `work` returned in the attempt that was committed.

        Raises:
            StoreError: the server is away for too long, or refuses.
        """
        seat, link = self.seat, self._link
        number, pause = seat.next_batch(), link.pause()
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
                if self.is_abandoned or not self._goes_on(exc, state, pause):
                    if isinstance(exc, TfgrpoError):
                        raise
                    raise explain(self._link.address, doing, exc) from exc

    def _goes_on(self, exc: Exception, state: str, pause: Pause) -> bool:
        """After a failed attempt: True where another one may succeed."""
        if state == FENCED:
            self._sit_down_again()
            return True
        return self._link.may_repeat(exc) and pause.wait(exc)

    def _sit_down_again(self) -> None:
        seat = self.seat
        log.warning(
            "%s: session %d was closed by others, as if this process were gone; going on with a "
            "new one",
            self._link.address,
            seat.session,
        )

        def sit(connection: Any) -> None:
            with connection.transaction():
                seat.take_again(connection)

        self._link.retry("go on with", sit)
        self.ledger.begin_again()

    def _write(
        self, connection: Any, session: int, statements: list[Statement], starts: list[Start]
    ) -> None:
        """Write a batch in the caller's transaction: one statement a table, the claims last.

        Without a seat only what was paid for is written.
        """
        if self.seat.lost is not None:
            statements, starts = [s for s in statements if not decides(s)], []
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
        self, connection: Any, session: int, starts: list[Start], keyed: list[Statement]
    ) -> Any:
        bulk = bulk_of(keyed[0][0])
        assert bulk is not None and bulk.columns == _CALLS
        pairs = [(key, start.call) for start in starts for key in start.keys]
        return connection.execute(
            _CLAIM,
            [
                session,
                array_text([key for key, _ in pairs], "bytea"),
                array_text([call for _, call in pairs], "bigint"),
                self.seat.terms.call_s,
                *bulk.arrays([values for _, values in keyed]),
            ],
        )

    def _write_one_by_one(
        self, connection: Any, session: int, statements: list[Statement], starts: list[Start]
    ) -> None:
        """As `_write`, each row by itself; a bad one is set aside."""
        for statement in statements:
            try:
                with connection.transaction():  # a savepoint
                    self._write(connection, session, [statement], [])
            except Exception as exc:
                if not is_bad_row(exc):
                    raise
                words = self._link.address.clean(statement_words(statement, exc))
                log.error(
                    "%s: a row cannot be kept and is set aside: %s", self._link.address, words
                )
                self._write(connection, session, [aside_row(statement, words)], [])
        for start in starts:
            try:
                with connection.transaction():
                    self._write(connection, session, [], [start])
            except Exception as exc:
                if not is_bad_row(exc):
                    raise
                start.error = explain(self._link.address, "write a call to", exc)

    def draw(self, units: Units) -> Refusal | None:
        """Draw what the tranche at hand lacks for further `units`; return why it was refused.

        Raises:
            StoreError: the server is away for too long, or refuses.
        """
        ledger = self.ledger
        if not any(ledger.lacks(units).values()):
            return None
        change = self.once("draw from the budget of", lambda c, s: ledger.draw(c, s, units))
        assert change is not None
        return change.apply()

    def beat(self) -> None:
        """Give a sign of life, give back money that is idle or wanted, and close the sessions of
        writers that are gone.

        Raises:
            StoreError: the server is away for too long, or refuses.
        """
        ledger, terms = self.ledger, self.seat.terms

        def work(connection: Any, session: int) -> Any:
            has_books = ledger.caps and ledger.is_started
            return ledger.beat(connection, session) if has_books else None

        change = self.once("go on with", work)
        if change is not None:
            change.apply()
        self._link.retry("go on with", lambda connection: reap(connection, terms))

    def abandon(self) -> None:
        """Try nothing again from now on; safe from any thread."""
        self.is_abandoned = True
        self._link.stop()

    def hurry(self) -> None:
        """Wait for a server that is away for a moment only; safe from any thread."""
        self._link.stop(_LEAVING_S)

    def close(self) -> None:
        """Close the connection and count as gone."""
        self.seat.leave()
        self._link.close()

    def leave(self) -> None:
        """Close the session and give back all that it holds.

        Raises:
            StoreError: the server is away for too long, or refuses.
        """
        seat = self.seat

        def close(connection: Any) -> None:
            with connection.transaction():
                connection.execute("SELECT tfgrpo.close_session(%s, false, true)", (seat.session,))
                for session in seat.earlier:
                    connection.execute("SELECT tfgrpo.recount(%s)", (session,))

        self._link.retry("close", close)


def decides(statement: Statement) -> bool:
    """Tell whether a row is one that only a writer with a seat may write."""
    return statement[0].split(maxsplit=3)[2] in _DECIDING


def _intents(starts: list[Start], session: int) -> tuple[list[Statement], list[Statement]]:
    """Return the rows of calls that claim draws, and of those that do not."""
    keyed: list[Statement] = []
    plain: list[Statement] = []
    for start in starts:
        (keyed if start.keys else plain).append(start.intent(start.call, session))
    return keyed, plain


def _divide(starts: list[Start], rows: list[tuple[bytes, int]]) -> None:
    by_call: dict[int, set[bytes]] = {}
    for key, call in rows:
        by_call.setdefault(int(call), set()).add(bytes(key))
    for start in starts:
        start.mine = frozenset(by_call.get(start.call, ()))
