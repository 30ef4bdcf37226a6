"""`RowStore`: what a journal needs of the database that keeps its rows.

A file has one writer (`disk.database`), a server any number (`postgres.database`). All that lies
above this protocol is the same for both; so are the tables. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from tfgrpo.errors import StoreError
from tfgrpo.store.budget import Ledger

__all__ = [
    "FILE",
    "SCHEMA",
    "Claim",
    "Lock",
    "OpenRun",
    "RowStore",
    "Statement",
    "aside_row",
    "statement_words",
]

FILE = "run.db"
"""Name of the journal in a run's folder."""

Statement = tuple[str, tuple[Any, ...]]


class Claim(NamedTuple):
    """Which call may be sent."""

    call: int | None
    """Its number; None where other writers ask for all of its draws, or have their replies."""
    keys: Collection[bytes] | None = None
    """The draws that are its own; None is all."""


SCHEMA = """
CREATE TABLE meta (name TEXT NOT NULL, value TEXT NOT NULL);
CREATE TABLE sessions (
  session INTEGER NOT NULL, event TEXT NOT NULL, at REAL NOT NULL, elapsed_s REAL NOT NULL,
  pid INTEGER NOT NULL, host TEXT NOT NULL);
CREATE TABLE calls (
  call INTEGER PRIMARY KEY, session INTEGER NOT NULL, at REAL NOT NULL, key BLOB NOT NULL,
  stage TEXT NOT NULL, model TEXT NOT NULL, rollout_id TEXT NOT NULL, n INTEGER NOT NULL,
  cost_usd REAL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL);
CREATE TABLE results (
  call INTEGER PRIMARY KEY REFERENCES calls DEFERRABLE INITIALLY DEFERRED,
  elapsed_s REAL NOT NULL, duration_s REAL NOT NULL,
  kind TEXT NOT NULL, n INTEGER NOT NULL, calls INTEGER NOT NULL,
  uncached INTEGER NOT NULL, cache_read INTEGER NOT NULL, cache_write INTEGER NOT NULL,
  text INTEGER NOT NULL, reasoning INTEGER NOT NULL, cost_usd REAL, estimated INTEGER NOT NULL,
  model TEXT NOT NULL, failure TEXT NOT NULL, error TEXT NOT NULL);
CREATE TABLE completions (
  completion INTEGER PRIMARY KEY, key BLOB NOT NULL, call INTEGER, finish TEXT NOT NULL,
  body NOT NULL, digest BLOB NOT NULL);
CREATE INDEX completions_by_key ON completions (key);
CREATE TABLE hits (stage TEXT NOT NULL, model TEXT NOT NULL, n INTEGER NOT NULL);
CREATE TABLE rollouts (
  rollout INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, verifier_id TEXT NOT NULL,
  group_id TEXT NOT NULL, task_id TEXT NOT NULL, outcome TEXT NOT NULL, reward REAL,
  truncated INTEGER NOT NULL, body NOT NULL, digest BLOB NOT NULL);
CREATE INDEX rollouts_by_id ON rollouts (rollout_id);
CREATE TABLE texts (digest BLOB PRIMARY KEY, body NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
  grp INTEGER PRIMARY KEY, group_id TEXT NOT NULL, stage TEXT NOT NULL, task_id TEXT NOT NULL,
  policy_id TEXT NOT NULL, verifier_id TEXT NOT NULL, task BLOB NOT NULL,
  context BLOB NOT NULL, body NOT NULL, digest BLOB NOT NULL);
CREATE INDEX groups_by_id ON groups (group_id);
CREATE TABLE libraries (
  library INTEGER PRIMARY KEY, version_id TEXT NOT NULL, at REAL NOT NULL,
  body NOT NULL, digest BLOB NOT NULL);
CREATE TABLE decisions (
  decision INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, at REAL NOT NULL,
  body NOT NULL, digest BLOB NOT NULL);
CREATE INDEX decisions_by_kind ON decisions (kind, key);
CREATE TABLE set_aside (tbl TEXT NOT NULL, row INTEGER NOT NULL, why TEXT NOT NULL);
"""


def statement_words(statement: Statement, exc: Exception) -> str:
    """Return a statement that failed in words."""
    sql, values = statement
    shown = ", ".join(repr(v)[:40] for v in values[:4])
    return f"{' '.join(sql.split())[:60]} ({shown}, …): {type(exc).__name__}: {exc}"


def aside_row(statement: Statement, words: str) -> Statement:
    """Return the row that names one which no table can hold."""
    table = statement[0].split("INTO")[-1].split()
    why = "could not be written: " + words
    return (
        "INSERT INTO set_aside VALUES (?, ?, ?)",
        (table[0].partition("(")[0] if table else "", 0, why.encode("utf-8", "replace").decode()),
    )


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
    damage: str = ""
    """What is damaged or was lost when it was opened, in words."""
    is_sound: bool = False
    """True where all that is kept was compared with its checksums as it was opened."""
