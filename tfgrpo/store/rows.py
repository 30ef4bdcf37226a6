"""`RowStore`: what a journal needs of the database that keeps its rows.

A file has one writer (`database.DatabaseWriter`), a server any number (`postgres.database`). All
that lies above this protocol is the same for both. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from tfgrpo.errors import StoreError
from tfgrpo.store.budget import Ledger
from tfgrpo.store.database import Claim, Statement

__all__ = ["Lock", "OpenRun", "RowStore"]


class RowStore(Protocol):
    """The rows of one run, wherever they are kept: all that a journal needs of its database.

    Contract:
        1. Rows are written in the order in which they are handed over, whichever method took them.
        2. What a method waited for is there when it returns, also after the process is killed.
        3. Rows that could not be written stay handed over; a row that no table can hold is set
           aside and named, and the rest of its batch is written.
        4. Queries are SQL that SQLite reads, with `?`, over the tables of `SCHEMA`.
        5. A call's number is given out once, and a draw is asked for by one call at a time.
    """

    @property
    def rows(self) -> int:
        """Rows committed by this writer."""
        ...

    @property
    def failure(self) -> StoreError | None:
        """Why the newest write failed; None after one that did not."""
        ...

    @property
    def name(self) -> str:
        """How messages call it; no secrets."""
        ...

    @property
    def is_shared(self) -> bool:
        """True where other processes may write to the same run."""
        ...

    @property
    def is_full(self) -> bool:
        """True once nothing new may be paid for."""
        ...

    @property
    def session(self) -> int:
        """The number of the writing session."""
        ...

    def put(self, statements: Sequence[Statement]) -> None:
        """Hand rows over without waiting."""
        ...

    def put_this_turn(self, statements: Sequence[Statement]) -> None:
        """Hand rows over without waiting; at once where no event loop runs."""
        ...

    async def commit(self, statements: Sequence[Statement]) -> None:
        """Hand rows over and return when they are written."""
        ...

    def commit_now(self, statements: Sequence[Statement]) -> None:
        """Write rows, and all that was handed over before them, before it returns."""
        ...

    def flush(self) -> None:
        """Write everything that was handed over."""
        ...

    async def start_call(
        self,
        intent: Callable[[int, int], Statement],
        unsent: Callable[[int], list[Statement]],
        keys: Sequence[bytes] = (),
    ) -> Claim:
        """Write a call's intent; it may be sent when this returns its number.

        Args:
            intent: makes the row from the call's number and the session's.
            unsent: makes the rows that say that a call was not sent, from its number; written
                where the caller is cancelled and the intent stands.
            keys: draws that no other call may be asking for; none asks whatever others do.
        """
        ...

    def lease_group(self, group_id: str, verifier_id: str) -> bool:
        """Return True where this writer is the one to make a group."""
        ...

    def read(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query over what is written."""
        ...

    def copy_from(self, source: Any, statements: Iterable[str]) -> None:
        """Run copying statements against another run of the same kind, which they call `old`, all
        or nothing."""
        ...

    def close(self) -> None:
        """Write what is left and close; may be called twice."""
        ...

    def abandon(self) -> None:
        """Forget what was not written, as a killed process does."""
        ...


class Lock(Protocol):
    """The right to write, where the rows' own place does not give it."""

    def release(self) -> None:
        """Leave in order."""
        ...

    def abandon(self) -> None:
        """Let go as a killed process does."""
        ...


class OpenRun(NamedTuple):
    """A run's rows, open."""

    database: RowStore
    ledger: Ledger
    is_resumed: bool
    """True when there was a journal before."""
    lock: Lock | None = None
