"""Statements of the journal in the server's dialect.

The journal's rows come as SQLite statements with `?`. Reading ones need other marks only, since
views show a run under SQLite's names. Inserts of many rows become one statement a table. A text
that holds a NUL, which the server has no room for, is written in an escaped form and read back.

Does not know what the rows mean. Source: own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

__all__ = ["TABLES", "Bulk", "array_text", "bulk_of", "from_server", "in_dialect", "to_server"]

_BIG, _REAL, _TEXT, _BYTES = "bigint", "double precision", "text", "bytea"

TABLES: Mapping[str, Mapping[str, str]] = {
    "meta": {"name": _TEXT, "value": _TEXT},
    "sessions": {
        "session": _BIG, "event": _TEXT, "at": _REAL, "elapsed_s": _REAL, "pid": _BIG,
        "host": _TEXT,
    },
    "calls": {
        "call": _BIG, "session": _BIG, "at": _REAL, "key": _BYTES, "stage": _TEXT, "model": _TEXT,
        "rollout_id": _TEXT, "n": _BIG, "cost_usd": _REAL, "prompt_tokens": _BIG,
        "completion_tokens": _BIG,
    },
    "results": {
        "call": _BIG, "elapsed_s": _REAL, "duration_s": _REAL, "kind": _TEXT, "n": _BIG,
        "calls": _BIG, "uncached": _BIG, "cache_read": _BIG, "cache_write": _BIG, "text": _BIG,
        "reasoning": _BIG, "cost_usd": _REAL, "estimated": _BIG, "model": _TEXT, "failure": _TEXT,
        "error": _TEXT,
    },
    "completions": {
        "completion": _BIG, "key": _BYTES, "call": _BIG, "finish": _TEXT, "body": _BYTES,
        "digest": _BYTES,
    },
    "hits": {"stage": _TEXT, "model": _TEXT, "n": _BIG},
    "rollouts": {
        "rollout": _BIG, "rollout_id": _TEXT, "verifier_id": _TEXT, "group_id": _TEXT,
        "task_id": _TEXT, "outcome": _TEXT, "reward": _REAL, "truncated": _BIG, "body": _BYTES,
        "digest": _BYTES,
    },
    "texts": {"digest": _BYTES, "body": _BYTES},
    "groups": {
        "grp": _BIG, "group_id": _TEXT, "stage": _TEXT, "task_id": _TEXT, "policy_id": _TEXT,
        "verifier_id": _TEXT, "task": _BYTES, "context": _BYTES, "body": _BYTES, "digest": _BYTES,
    },
    "libraries": {
        "library": _BIG, "version_id": _TEXT, "at": _REAL, "body": _BYTES, "digest": _BYTES,
    },
    "decisions": {
        "decision": _BIG, "kind": _TEXT, "key": _TEXT, "at": _REAL, "body": _BYTES,
        "digest": _BYTES,
    },
    "set_aside": {"tbl": _TEXT, "row": _BIG, "why": _TEXT},
}  # fmt: skip
"""Every table of a journal with its columns, in SQLite's order, and their types on the server."""

_INSERT = re.compile(
    r"INSERT INTO (\w+)(?: \(([^)]*)\))? VALUES \(([?, ]+)\)( ON CONFLICT DO NOTHING)?"
)


@dataclass(frozen=True, slots=True)
class Bulk:
    """One statement that inserts any number of rows of a table."""

    table: str
    columns: tuple[str, ...]
    sql: str

    def arrays(self, rows: Sequence[Sequence[Any]]) -> list[str]:
        """Return the rows as one array a column; raises as `array_text`."""
        types = TABLES[self.table]
        return [
            array_text(column, types[name])
            for name, column in zip(self.columns, zip(*rows, strict=True), strict=True)
        ]


@lru_cache(256)
def bulk_of(sql: str) -> Bulk | None:
    """Return the bulk form of an insert; None for any other statement."""
    match = _INSERT.fullmatch(sql)
    if match is None or match[1] not in TABLES:
        return None
    table, listed = match[1], match[2]
    columns = tuple(c.strip() for c in listed.split(",")) if listed else tuple(TABLES[table])
    if len(columns) != match[3].count("?"):
        return None
    return Bulk(table, columns, insert_sql(table, columns, keeps_first=bool(match[4])))


def insert_sql(table: str, columns: Sequence[str], *, keeps_first: bool = False) -> str:
    """Return the statement that inserts arrays, one a column."""
    names = ", ".join(columns)
    arrays = ", ".join(f"%s::{TABLES[table][c]}[]" for c in columns)
    sql = f"INSERT INTO tfgrpo.{table} ({names}) SELECT {names} FROM unnest({arrays}) AS u({names})"
    if keeps_first:  # in the order of the key, so that two writers cannot wait for each other
        sql += f" ORDER BY {columns[0]} ON CONFLICT DO NOTHING"
    return sql


@lru_cache(512)
def in_dialect(sql: str) -> str:
    """Return a statement with the driver's marks."""
    return sql.replace("%", "%%").replace("?", "%s").replace(" old.", " tfgrpo_old.")


def array_text(values: Iterable[Any], type_: str) -> str:
    """Return values as the text of an array, which costs a fifth of the driver's own way.

    Raises:
        TypeError, ValueError, OverflowError: a value that such a column cannot hold.
    """
    write = _WRITERS[type_]
    return "{" + ",".join(["NULL" if v is None else write(v) for v in values]) + "}"


def _bytes_text(value: bytes | str) -> str:
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return f'"\\\\x{raw.hex()}"'


def _text_text(value: str) -> str:
    text: str = to_server(value)
    if '"' in text or "\\" in text:
        text = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


_WRITERS: Mapping[str, Callable[[Any], str]] = {
    _BIG: lambda v: str(int(v)),
    _REAL: lambda v: repr(float(v)),
    _TEXT: _text_text,
    _BYTES: _bytes_text,
}


def to_server(value: Any) -> Any:
    """Return a value as the server takes it as a parameter of a query."""
    if isinstance(value, str) and ("\x00" in value or "\x01" in value):
        return value.replace("\x01", "\x01\x01").replace("\x00", "\x01\x02")
    return value


def from_server(value: Any) -> Any:
    """Return what `to_server` was given."""
    if isinstance(value, str) and "\x01" in value:
        return re.sub("\x01([\x01\x02])", lambda m: "\x00" if m[1] == "\x02" else "\x01", value)
    return value
