"""Rows read out of the pages of a damaged SQLite file, without SQLite.

Every leaf page is read by itself and its rows are told apart by the types of their columns, so that
what is damaged costs the rows in it and nothing else: no index, inner page or first page is needed.
Of a page that is known to be damaged only rows are taken whose content proves itself.

Does not know what rows mean. Source: SQLite's file format documentation; own.
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tfgrpo.store.codec import DamagedValue, unpack
from tfgrpo.store.disk.files import read_at

__all__ = ["Pages", "Table", "rows_of", "tables_of"]

_TABLE_LEAF, _INDEX_LEAF, _INDEX_INNER = 0x0D, 0x0A, 0x02
_FREE_LIST_AT = 32
_PROVEN = "completions"
"""The table whose rows need nothing but their body and its digest to be of use."""


class Pages:
    """The newest pages of a database, from its file and its log.

    Args:
        file: the open database file.
        log: the open log, or None.
        in_log: page to where its content lies in the log.
        mended: the content of pages that are damaged where they lie and known all the same.
        wrong: pages of the file that are damaged.
        page_size: in bytes.
        count: how many pages there are.
    """

    def __init__(
        self,
        file: int,
        log: int | None,
        in_log: Mapping[int, int],
        mended: Mapping[int, bytes],
        wrong: Collection[int],
        *,
        page_size: int,
        count: int,
    ) -> None:
        self._file, self._log, self._in_log, self._mended = file, log, in_log, mended
        self.wrong = wrong
        self.page_size, self.count = page_size, count

    def get(self, page: int) -> bytes:
        """Return a page's content; fewer bytes, or none, where it is cut off."""
        if page in self._mended:
            return self._mended[page]
        at = self._in_log.get(page)
        if at is not None and self._log is not None:
            return read_at(self._log, self.page_size, at)
        return read_at(self._file, self.page_size, (page - 1) * self.page_size)

    def is_wrong(self, page: int) -> bool:
        """Tell whether a page is damaged."""
        return page in self.wrong or not 0 < page <= self.count

    def free(self) -> set[int]:
        """Return the pages that hold nothing any more, as far as the first page tells."""
        found: set[int] = set()
        trunk = int.from_bytes(self.get(1)[_FREE_LIST_AT : _FREE_LIST_AT + 4], "big")
        while trunk and trunk not in found and not self.is_wrong(trunk) and not self.is_wrong(1):
            found.add(trunk)
            raw = self.get(trunk)
            trunk, leaves = struct.unpack_from(">II", raw)
            leaves = min(leaves, self.page_size // 4 - 2)
            found.update(struct.unpack_from(f">{leaves}I", raw, 8))
        return found


@dataclass(frozen=True, slots=True)
class Table:
    """A table as its rows look in a file."""

    name: str
    columns: tuple[str, ...]
    """In the order in which a row holds them."""
    types: tuple[str, ...]
    may_be_null: tuple[bool, ...]
    number: int | None
    """Place of the column that stands for the row's number; None where it has none of its own."""
    has_rowid: bool

    def fits(self, values: list[Any]) -> bool:
        """Tell whether a row can be this table's."""
        if len(values) != len(self.types):
            return False
        for i, value in enumerate(values):
            if i == self.number:
                if value is not None:
                    return False
            elif value is None:
                if not self.may_be_null[i]:
                    return False
            elif self.types[i] and not isinstance(value, _OF_TYPE[self.types[i]]):
                return False
        return True

    def proves_itself(self, values: list[Any]) -> bool:
        """Tell whether the row's body matches its digest; True without both."""
        if "digest" not in self.columns or "body" not in self.columns:
            return True
        try:
            unpack(values[self.columns.index("body")], values[self.columns.index("digest")])
        except (DamagedValue, ValueError):
            return False
        return True

    def has_digest(self) -> bool:
        """Tell whether rows can prove themselves."""
        return {"body", "digest"} <= set(self.columns) and (
            self.types[self.columns.index("digest")] == "BLOB"
        )

    @property
    def insert(self) -> str:
        """The statement that keeps a row: its number first where it has one."""
        names = ["rowid", *self.columns] if self.has_rowid else list(self.columns)
        if self.number is not None:
            del names[self.number + 1]
        marks = ", ".join("?" * len(names))
        return f"INSERT OR IGNORE INTO {self.name} ({', '.join(names)}) VALUES ({marks})"


_OF_TYPE: dict[str, tuple[type, ...]] = {
    "TEXT": (str,),
    "BLOB": (bytes,),
    "INTEGER": (int,),
    "REAL": (float, int),
}


def tables_of(schema: Collection[str]) -> list[Table]:
    """Return the tables that statements make."""
    connection = sqlite3.connect(":memory:")
    with contextlib.closing(connection):
        for sql in schema:
            connection.execute(sql)
        made = connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
        ).fetchall()
        return [
            _table(connection, name, has_rowid="WITHOUT ROWID" not in sql.upper())
            for name, sql in made
            if name.isidentifier()
        ]


def _table(connection: sqlite3.Connection, name: str, *, has_rowid: bool) -> Table:
    found = connection.execute(f"PRAGMA table_info({name})").fetchall()
    if not has_rowid:  # the key's columns come first
        found.sort(key=lambda row: (row[5] == 0, row[5]))
    keys = [i for i, row in enumerate(found) if row[5]]
    numbered = [i for i in keys if has_rowid and len(keys) == 1 and found[i][2] == "INTEGER"]
    return Table(
        name,
        tuple(row[1] for row in found),
        tuple(row[2] for row in found),
        tuple(not row[3] and not (row[5] and not has_rowid) for row in found),
        numbered[0] if numbered else None,
        has_rowid,
    )


def rows_of(pages: Pages, tables: list[Table]) -> Iterator[tuple[Table, list[list[Any]]]]:
    """Yield the rows that can be read, some at a time, as `Table.insert` takes them."""
    free = pages.free()
    numbered = [t for t in tables if t.has_rowid]
    keyed = [t for t in tables if not t.has_rowid]
    for page in range(1, pages.count + 1):
        if page in free:
            continue
        raw = pages.get(page)
        if len(raw) < pages.page_size:
            continue
        kind = raw[100 if page == 1 else 0]
        if kind == _TABLE_LEAF:
            fitting = numbered
        elif kind in (_INDEX_LEAF, _INDEX_INNER):
            fitting = keyed
        else:
            continue
        found: dict[str, tuple[Table, list[list[Any]]]] = {}
        for cell in _cells(pages, page, raw, kind):
            table = _table_for(cell.values, fitting, is_sure=not pages.is_wrong(page))
            if table is not None:
                rows = found.setdefault(table.name, (table, []))[1]
                rows.append(_as_inserted(table, cell))
        yield from found.values()


class _Cell(NamedTuple):
    number: int
    values: list[Any]


def _table_for(values: list[Any], tables: list[Table], *, is_sure: bool) -> Table | None:
    for table in tables:
        if not table.fits(values):
            continue
        if is_sure and table.has_rowid:
            return table
        if is_sure and not table.has_digest():
            return table
        if (is_sure or table.name == _PROVEN) and table.proves_itself(values):
            return table
    return None


def _as_inserted(table: Table, cell: _Cell) -> list[Any]:
    values = list(cell.values)
    if table.number is not None:
        del values[table.number]
    return [cell.number, *values] if table.has_rowid else values


def _cells(pages: Pages, page: int, raw: bytes, kind: int) -> Iterator[_Cell]:
    """Yield the cells of a page that can be read."""
    start = 100 if page == 1 else 0
    count = int.from_bytes(raw[start + 3 : start + 5], "big")
    pointers = start + (12 if kind == _INDEX_INNER else 8)
    for i in range(min(count, (pages.page_size - pointers) // 2)):
        at = int.from_bytes(raw[pointers + 2 * i : pointers + 2 * i + 2], "big")
        try:
            yield _cell(pages, raw, at, kind)
        except (IndexError, ValueError, struct.error, KeyError):
            continue  # not what was written: this row is lost


def _cell(pages: Pages, raw: bytes, at: int, kind: int) -> _Cell:
    if kind == _INDEX_INNER:
        at += 4
    size, at = _varint(raw, at)
    number = 0
    if kind == _TABLE_LEAF:
        number, at = _varint(raw, at)
    here = _bytes_here(size, pages.page_size, is_table=kind == _TABLE_LEAF)
    payload = raw[at : at + here]
    if here < size:
        following = int.from_bytes(raw[at + here : at + here + 4], "big")
        payload += _overflow(pages, following, size - here)
    if len(payload) != size:
        raise ValueError("cut off")
    return _Cell(_signed(number), _record(payload))


def _bytes_here(size: int, usable: int, *, is_table: bool) -> int:
    """Return how much of a payload lies in its page; the rest lies in overflow pages."""
    most = usable - 35 if is_table else (usable - 12) * 64 // 255 - 23
    if size <= most:
        return size
    least = (usable - 12) * 32 // 255 - 23
    fitting = least + (size - least) % (usable - 4)
    return fitting if fitting <= most else least


def _overflow(pages: Pages, page: int, left: int) -> bytes:
    parts: list[bytes] = []
    while left > 0:
        if pages.is_wrong(page):
            raise ValueError("its rest is damaged")
        raw = pages.get(page)
        part = raw[4 : 4 + left]
        if not part:
            raise ValueError("its rest is cut off")
        parts.append(part)
        left -= len(part)
        page = int.from_bytes(raw[:4], "big")
    return b"".join(parts)


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(8):
        byte = raw[at + i]
        value = (value << 7) | (byte & 0x7F)
        if byte < 0x80:
            return value, at + i + 1
    return (value << 8) | raw[at + 8], at + 9


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
_CONSTANTS: dict[int, Any] = {0: None, 8: 0, 9: 1}


def _record(payload: bytes) -> list[Any]:
    head, at = _varint(payload, 0)
    kinds: list[int] = []
    while at < head:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    at = head
    values: list[Any] = []
    for kind in kinds:
        value, at = _value(payload, at, kind)
        values.append(value)
    if at != len(payload):
        raise ValueError("a row of another size")
    return values


def _value(payload: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind >= 12:
        end = at + (kind - 12) // 2
        if end > len(payload):
            raise ValueError("a value that is cut off")
        raw = payload[at:end]
        return (raw.decode("utf-8") if kind % 2 else raw), end
    if kind in _CONSTANTS:
        return _CONSTANTS[kind], at
    if kind == 7:
        return struct.unpack_from(">d", payload, at)[0], at + 8
    end = at + _INTEGERS[kind]
    return int.from_bytes(payload[at:end], "big", signed=True), end
