"""Copies a run between a folder and a server, both ways, row by row, and proves it.

Every row is copied as it is, numbers included, so that the copy is the run: counts of rows and a
digest of each table are computed on both sides and must be equal, else nothing is kept. A run that
somebody writes to is refused. The digest of a table is the sum of its rows' hashes, so the order in
which a database gives rows does not matter.

Does not know what the rows mean. Source: own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfgrpo.errors import StoreError
from tfgrpo.store.codec import is_compressed
from tfgrpo.store.disk.files import (
    VERSION,
    check_file,
    connect,
    create_file,
    refuse_links,
    refuse_network_disk,
    store_errors,
)
from tfgrpo.store.disk.lock import RunLock
from tfgrpo.store.postgres.address import Address
from tfgrpo.store.postgres.link import Link, explain
from tfgrpo.store.postgres.opening import find_run, refuse_writers
from tfgrpo.store.postgres.places import FILE, POINTER, Place
from tfgrpo.store.postgres.statements import TABLES, array_text, from_server, insert_sql

__all__ = ["Copied", "copy_run"]

_ROWS_AT_ONCE = 500
_LARGEST_NUMBER = 2**62
_SPACE = 2**256
_NUMBERED = {
    "calls": "call", "completions": "completion", "rollouts": "rollout", "groups": "grp",
    "libraries": "library", "decisions": "decision",
}  # fmt: skip
"""The column of each table that numbers its rows."""
_ORDER = {"meta": "rowid", "hits": "rowid", "set_aside": "rowid", "sessions": "rowid"}
_ORDER_ON_SERVER = {"meta": "rowid"}

_IN_A_FILE: dict[str, tuple[type, ...]] = {
    "bigint": (int,), "double precision": (int, float), "text": (str,), "bytea": (bytes,),
}  # fmt: skip

Row = tuple[Any, ...]
_Rows = Callable[[str], Iterator[Sequence[Row]]]
"""Gives a table's rows, some at a time."""


@dataclass(frozen=True, slots=True)
class Copied:
    """What was copied: rows and digest of each table, equal on both sides."""

    rows: dict[str, int]
    digests: dict[str, str]

    @property
    def total(self) -> int:
        """Rows of all tables."""
        return sum(self.rows.values())


class _Sum:
    """Counts rows and adds up their hashes."""

    def __init__(self) -> None:
        self.rows = 0
        self._sum = 0

    def add(self, row: Row) -> None:
        plain = [v.hex() if isinstance(v, bytes) else v for v in row]
        kinds = "".join(type(v).__name__[0] for v in row)
        text = json.dumps([kinds, plain], ensure_ascii=True)
        self._sum += int.from_bytes(hashlib.sha256(text.encode("ascii")).digest(), "big")
        self.rows += 1

    @property
    def digest(self) -> str:
        return f"{self._sum % _SPACE:064x}"


def copy_run(source: Place, target: Place) -> Copied:
    """Copy a run to a place where there is none.

    Raises:
        StoreError: there is no such run, it is in use or damaged, the target is taken, or the copy
            is not equal; nothing is left of it then.
    """
    if str(source) == str(target):
        raise StoreError(f"{str(source)!r} cannot be copied onto itself: choose another place")
    with _reading(source) as rows:
        if target.address is None:
            return _into_folder(rows, target.folder, source)
        return _into_server(rows, target.address, source)


# Reading ----------------------------------------------------------------------------------------


@contextmanager
def _reading(source: Place) -> Iterator[_Rows]:
    """Give a run's tables as they are at one moment; nobody writes to it meanwhile."""
    if source.address is None:
        with _reading_folder(source.folder) as rows:
            yield rows
        return
    address = source.address
    link = Link(address, patience_s=30.0)
    try:
        number, _ = link.retry("read", lambda c: find_run(c, address, create=False))
        link.see(number)
        with _told(address, "read"), link.connection.transaction():
            link.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            link.connection.execute("SELECT FROM tfgrpo.runs WHERE run = tfgrpo.run() FOR UPDATE")
            refuse_writers(link.connection, address, "nothing was copied")
            yield lambda table: _server_rows(link.connection, table)
    finally:
        link.close()


@contextmanager
def _told(address: Address, doing: str) -> Iterator[None]:
    try:
        yield
    except (StoreError, OSError, ValueError):
        raise
    except Exception as exc:
        raise explain(address, doing, exc) from exc


@contextmanager
def _reading_folder(folder: Path) -> Iterator[_Rows]:
    file = folder / FILE
    if not file.exists():
        raise StoreError(
            f"there is no run in {str(folder)!r} (no {FILE}): give a run's folder, which "
            "its config names as run.folder"
        )
    with store_errors(file, "read"):
        refuse_links(folder, FILE, "lock")
        lock = RunLock(folder / "lock")
    try:
        with store_errors(file, "read"):
            connection = connect(file)
        try:
            check_file(connection, file, thorough=True)
            if connection.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                raise StoreError(
                    f"{str(file)!r} is a gateway's journal, which stays in its file: only runs are "
                    "copied"
                )
            with store_errors(file, "read"):
                connection.execute("BEGIN")
                yield lambda table: _file_rows(connection, table, file)
        finally:
            connection.close()
    finally:
        if lock.was_killed:
            lock.abandon()  # who opens it next is told
        else:
            lock.release()


def _file_rows(connection: Any, table: str, file: Path) -> Iterator[Sequence[Row]]:
    columns = TABLES[table]
    order = _ORDER.get(table) or next(iter(columns))
    cursor = connection.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY {order}")
    while rows := cursor.fetchmany(_ROWS_AT_ONCE):
        for row in rows:
            _check_types(row, table, str(file))
        yield [_plain(row, table) for row in rows]


def _check_types(row: Row, table: str, name: str) -> None:
    """Refuse what a flipped bit made of a value: no table of a server holds it."""
    for value, (column, type_) in zip(row, TABLES[table].items(), strict=True):
        wanted = (str, bytes) if column == "body" else _IN_A_FILE[type_]
        if value is not None and not isinstance(value, wanted):
            raise StoreError(
                f"{name!r} is damaged: {table}.{column} holds {value!r:.60}, no {type_}: nothing "
                "was copied"
            )


def _server_rows(connection: Any, table: str) -> Iterator[Sequence[Row]]:
    columns = TABLES[table]
    order = _ORDER_ON_SERVER.get(table) or next(iter(columns))
    with connection.cursor(name=f"copy_{table}") as cursor:
        cursor.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY {order}")
        while rows := cursor.fetchmany(_ROWS_AT_ONCE):
            yield [_plain(tuple(map(from_server, row)), table) for row in rows]


def _plain(row: Row, table: str) -> Row:
    """Return a row in the one form that both kinds give: bodies as text where they are text, whole
    numbers and fractions told apart by their column."""
    found: list[Any] = []
    for value, (column, type_) in zip(row, TABLES[table].items(), strict=True):
        if value is None:
            found.append(None)
        elif column == "body":
            found.append(_body(value))
        elif type_ == "double precision":
            found.append(float(value))
        else:
            found.append(value)
    return tuple(found)


def _body(value: str | bytes) -> str | bytes:
    if isinstance(value, str) or is_compressed(value):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value


# Writing ----------------------------------------------------------------------------------------


def _copy(
    rows: _Rows, write: Callable[[str, Sequence[Row]], None], back: _Rows, target: str
) -> Copied:
    """Copy every table and compare what is read back.

    Raises:
        StoreError: they differ.
    """
    sums = {table: _Sum() for table in TABLES}
    for table, found in sums.items():
        for some in rows(table):
            for row in some:
                found.add(row)
                if table in _NUMBERED and not 0 <= int(row[0]) <= _LARGEST_NUMBER:
                    raise StoreError(f"{table} holds a row of number {row[0]}: it is damaged")
            write(table, some)
    for table, found in sums.items():
        copied = _Sum()
        for some in back(table):
            for row in some:
                copied.add(row)
        if (copied.rows, copied.digest) != (found.rows, found.digest):
            raise StoreError(
                f"the copy in {target!r} is not equal: {table} has {copied.rows} rows of digest "
                f"{copied.digest[:12]}, not {found.rows} of {found.digest[:12]}; nothing was kept"
            )
    return Copied(
        {table: found.rows for table, found in sums.items()},
        {table: found.digest for table, found in sums.items()},
    )


def _into_folder(rows: _Rows, folder: Path, source: Place) -> Copied:
    file, part = folder / FILE, folder / "copy.part"
    if file.exists():
        raise StoreError(f"there is a run in {str(folder)!r} already: choose another folder")
    with store_errors(file, "write"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        refuse_network_disk(folder)
        refuse_links(folder, FILE, part.name)
        part.unlink(missing_ok=True)
    create_file(part)
    try:
        with store_errors(file, "write"):
            connection = connect(part)
            try:
                copied = _copy(
                    rows,
                    lambda table, some: _write_file(connection, table, some),
                    lambda table: _file_rows(connection, table, part),
                    str(folder),
                )
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                connection.execute("PRAGMA journal_mode=DELETE")
            finally:
                connection.close()
            os.replace(part, file)
            if source.address is not None and source.folder == folder:
                (folder / POINTER).unlink(missing_ok=True)
            return copied
    finally:
        for name in (part.name, f"{part.name}-wal", f"{part.name}-shm"):
            (folder / name).unlink(missing_ok=True)


def _write_file(connection: Any, table: str, rows: Sequence[Row]) -> None:
    columns = TABLES[table]
    connection.execute("BEGIN")
    connection.executemany(
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", rows
    )
    connection.execute("COMMIT")


def _into_server(rows: _Rows, address: Address, source: Place) -> Copied:
    link = Link(address, patience_s=30.0)
    try:
        connection = link.retry("write to", lambda c: c)
        with _told(address, "write to"), connection.transaction():
            number, existed = find_run(connection, address, create=True)
            link.see(number)
            connection.execute("SET LOCAL lock_timeout = '10s'")
            connection.execute("SELECT FROM tfgrpo.runs WHERE run = tfgrpo.run() FOR UPDATE")
            refuse_writers(connection, address, "nothing was copied")
            if existed and any(_has_rows(connection, table) for table in TABLES):
                raise StoreError(
                    f"there is a run {address.run!r} in {address.shown!r} already: choose another "
                    f"name, as in {address.shown}#another"
                )
            copied = _copy(
                rows,
                lambda table, some: _write_server(connection, table, some),
                lambda table: _server_rows(connection, table),
                str(address),
            )
            _go_on_above(connection)
        return copied
    finally:
        link.close()


def _has_rows(connection: Any, table: str) -> bool:
    return connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is not None


def _write_server(connection: Any, table: str, rows: Sequence[Row]) -> None:
    columns = TABLES[table]
    arrays = [
        array_text(column, type_)
        for type_, column in zip(columns.values(), zip(*rows, strict=True), strict=True)
    ]
    connection.execute(insert_sql(table, tuple(columns)), arrays)


def _go_on_above(connection: Any) -> None:
    """Let new rows have larger numbers than the copied ones."""
    numbered = " UNION ALL ".join(
        f"SELECT max({column}) AS n FROM {table}"
        for table, column in _NUMBERED.items()
        if table != "calls"
    )
    connection.execute(
        "SELECT setval('tfgrpo.row_number', greatest(coalesce(max(n), 0), last_value))"
        f" FROM ({numbered}) r, tfgrpo.row_number GROUP BY last_value"
    )
    connection.execute(
        "SELECT setval('tfgrpo.call_block',"
        "  greatest(1000 * (1 + coalesce(max(call), 0) / 1000), last_value))"
        " FROM calls, tfgrpo.call_block GROUP BY last_value"
    )
