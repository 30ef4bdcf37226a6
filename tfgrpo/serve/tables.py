"""The gateway's tables in the journal, and how they are added to a run's file.

A gateway's folder is a run: calls and results stand where every run has them. The tables here say
which request a call belongs to and what came of it. They are append-only as well: a later fact is
a further row. A file that has them carries version 2; a file without is taken as it is and gets
them when a gateway opens it.

Does not know HTTP or what feedback means. Source: own.
"""

from __future__ import annotations

from typing import Any

from tfgrpo.store import Journal
from tfgrpo.store.disk.files import GATEWAY_VERSION

__all__ = ["add_tables"]

SCHEMA = (
    # A request as it was let in; the intent of its first call is in the same transaction.
    """CREATE TABLE IF NOT EXISTS requests (
      response_id TEXT PRIMARY KEY, at REAL NOT NULL, endpoint TEXT NOT NULL, route TEXT NOT NULL,
      key TEXT NOT NULL, end_user TEXT NOT NULL, task_id TEXT NOT NULL, session_id TEXT NOT NULL,
      group_id TEXT NOT NULL, unit TEXT NOT NULL, experiment TEXT NOT NULL, arm TEXT NOT NULL,
      share REAL NOT NULL, prediction REAL, library TEXT NOT NULL, context TEXT NOT NULL,
      metadata TEXT NOT NULL, task_digest TEXT NOT NULL, prompt BLOB) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS requests_by_session ON requests (session_id)"
    " WHERE session_id <> ''",
    "CREATE INDEX IF NOT EXISTS requests_by_group ON requests (group_id) WHERE group_id <> ''",
    "CREATE INDEX IF NOT EXISTS requests_by_task ON requests (task_id) WHERE task_id <> ''",
    "CREATE INDEX IF NOT EXISTS requests_kept ON requests (route, at) WHERE prompt NOT NULL",
    "CREATE INDEX IF NOT EXISTS requests_in_test ON requests (experiment) WHERE experiment <> ''",
    # How it ended.
    """CREATE TABLE IF NOT EXISTS replies (
      response_id TEXT PRIMARY KEY, at REAL NOT NULL, status INTEGER NOT NULL, state TEXT NOT NULL,
      upstream TEXT NOT NULL, model TEXT NOT NULL, upstream_id TEXT NOT NULL, cost_usd REAL,
      calls INTEGER NOT NULL, duration_s REAL NOT NULL, error TEXT NOT NULL) WITHOUT ROWID""",
    # Its draws, where they are kept.
    """CREATE TABLE IF NOT EXISTS choices (
      response_id TEXT NOT NULL, choice INTEGER NOT NULL, finish TEXT NOT NULL, body BLOB,
      PRIMARY KEY (response_id, choice)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS feedback (
      feedback INTEGER PRIMARY KEY, feedback_id TEXT NOT NULL, received REAL NOT NULL,
      at REAL NOT NULL, target_kind TEXT NOT NULL, target TEXT NOT NULL, choice INTEGER,
      metric TEXT NOT NULL, kind TEXT NOT NULL, value TEXT NOT NULL, source TEXT NOT NULL,
      event_id TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS feedback_by_target ON feedback (target_kind, target)",
    "CREATE INDEX IF NOT EXISTS feedback_by_id ON feedback (feedback_id)",
    "CREATE INDEX IF NOT EXISTS feedback_by_event ON feedback (key, event_id) WHERE event_id <> ''",
    # The state of a route's learning is a fold of these.
    """CREATE TABLE IF NOT EXISTS transitions (
      transition INTEGER PRIMARY KEY, at REAL NOT NULL, route TEXT NOT NULL,
      version INTEGER NOT NULL, event TEXT NOT NULL, who TEXT NOT NULL, reason TEXT NOT NULL,
      body TEXT NOT NULL)""",
    "CREATE UNIQUE INDEX IF NOT EXISTS transitions_in_order ON transitions (route, version)",
    """CREATE TABLE IF NOT EXISTS idempotency (
      key TEXT NOT NULL, endpoint TEXT NOT NULL, idempotency_key TEXT NOT NULL, at REAL NOT NULL,
      digest TEXT NOT NULL, response_id TEXT NOT NULL, status INTEGER NOT NULL,
      headers TEXT NOT NULL, body BLOB NOT NULL,
      PRIMARY KEY (key, endpoint, idempotency_key, at))""",
    # Which requests a group was made of, so that their content can be removed with them.
    """CREATE TABLE IF NOT EXISTS group_responses (
      group_id TEXT NOT NULL, response_id TEXT NOT NULL,
      PRIMARY KEY (response_id, group_id)) WITHOUT ROWID""",
    # Keys of the folder that were withdrawn while it ran, closed groups, settled conflicts.
    """CREATE TABLE IF NOT EXISTS notes (
      note INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
      body TEXT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS notes_by_name ON notes (name)",
)

REQUEST = f"INSERT INTO requests VALUES ({', '.join('?' * 19)})"
REPLY = f"INSERT INTO replies VALUES ({', '.join('?' * 11)})"
CHOICE = "INSERT INTO choices VALUES (?, ?, ?, ?)"
FEEDBACK = (
    "INSERT INTO feedback (feedback_id, received, at, target_kind, target, choice, metric, kind,"
    f" value, source, event_id, key, digest) VALUES ({', '.join('?' * 13)})"
)
TRANSITION = (
    "INSERT INTO transitions (at, route, version, event, who, reason, body)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)
IDEMPOTENCY = "INSERT INTO idempotency VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
GROUP_RESPONSE = "INSERT OR IGNORE INTO group_responses VALUES (?, ?)"
NOTE = "INSERT INTO notes (at, kind, name, body) VALUES (?, ?, ?, ?)"


def add_tables(journal: Journal) -> None:
    """Give a journal the gateway's tables; nothing happens where it has them.

    Raises:
        StoreError: it cannot be written.
    """
    journal.writer.define((*SCHEMA, f"PRAGMA user_version={GATEWAY_VERSION}"))


def rows_as_dicts(journal: Journal, sql: str, values: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
    """Return the rows of a query by column name, which the query lists between SELECT and FROM."""
    names = [part.split()[-1].split(".")[-1] for part in sql[7 : sql.index(" FROM")].split(",")]
    return [dict(zip(names, row, strict=True)) for row in journal.writer.read(sql, values)]
