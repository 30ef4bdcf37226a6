"""What a finished run came to, kept with the place up to which its journal had been written.

It counts only while nothing has come to the journal since; who keeps it says under which key, and
another key finds nothing. Does not know what a run comes to. Source: own.
"""

from __future__ import annotations

from typing import Any

from tfgrpo.store.codec import DamagedValue, pack_line, unpack_line
from tfgrpo.store.fold import newest_numbers
from tfgrpo.store.rows import RowStore, Statement

__all__ = ["finish_row", "read_finish"]

_NAME = "finish"


def finish_row(writer: RowStore, key: str, value: Any) -> Statement | None:
    """Return the row that keeps a value as of now, or None where the newest one says the same."""
    row = {"key": key, "at": _place(writer), "value": value}
    kept = pack_line(row, "what a run came to")
    if _newest(writer) == kept:
        return None
    return ("INSERT INTO meta VALUES (?, ?)", (_NAME, kept))


def read_finish(writer: RowStore, key: str) -> Any | None:
    """Return what was kept under a key, None where anything was written since or it is damaged."""
    kept = _newest(writer)
    if not isinstance(kept, str):
        return None
    try:
        row = unpack_line(kept)
    except (DamagedValue, ValueError):
        return None
    return row["value"] if (row["key"], row["at"]) == (key, _place(writer)) else None


def _newest(writer: RowStore) -> object:
    rows = writer.read(
        "SELECT value FROM meta WHERE name = ? ORDER BY rowid DESC LIMIT 1", (_NAME,)
    )
    return rows[0][0] if rows else None


def _place(writer: RowStore) -> str:
    """Return a text that changes with every row that a run could learn from."""
    sql = "SELECT (SELECT max(library) FROM libraries), (SELECT count(*) FROM set_aside)"
    libraries, aside = writer.read(sql)[0]
    return f"{newest_numbers(writer)}-{libraries or 0}-{aside}"
