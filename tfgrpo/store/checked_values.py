"""Stored values, read with their digest checked; a damaged one is a miss, set aside and told.

Does not know what the values mean. Source: own.
"""

from __future__ import annotations

import logging
from typing import Any

from tfgrpo.store.codec import DamagedValue, from_column, unpack
from tfgrpo.store.rows import FILE, RowStore

log = logging.getLogger(__name__)

DAMAGED = object()
"""Stands for a value that is not what was written."""


class Values:
    """Reads stored values of one journal.

    Args:
        can_write: False leaves what is found damaged unmarked in the file.
        damage: what is wrong with the place of the rows as a whole.
    """

    def __init__(self, writer: RowStore, *, can_write: bool, damage: str = "") -> None:
        self._writer = writer
        self._can_write = can_write
        aside = writer.read("SELECT tbl, row, why FROM set_aside")
        self._aside = {(table, row) for table, row, _ in aside}
        self.damaged: list[str] = [f"{table} {why}" for table, _, why in aside if table == FILE]
        """What was found damaged, in words."""
        self.damaged += [f"{FILE} {damage}"] if damage else []

    def is_aside(self, table: str, row: int) -> bool:
        """Tell whether a row is set aside."""
        return (table, row) in self._aside

    def get(self, table: str, row: int, body: object, mark: object) -> Any:
        """Return a value, or `DAMAGED`."""
        if (table, row) in self._aside:
            return DAMAGED
        try:
            return unpack(body, mark)
        except DamagedValue as exc:
            self.set_aside(table, row, str(exc))
            return DAMAGED

    def named(self, table: str, rows: list[tuple[Any, ...]]) -> list[tuple[str, Any]]:
        """Return (name, value) of rows (number, name, body, digest), damaged ones left out."""
        found: list[tuple[str, Any]] = []
        for row, name, body, mark in rows:
            value = self.get(table, row, body, mark)
            if value is not DAMAGED:
                found.append((from_column(name), value))
        return found

    def set_aside(self, table: str, row: int, why: str) -> None:
        """Tell once that a row is damaged, and never read it again."""
        if (table, row) in self._aside:
            return
        self._aside.add((table, row))
        self.damaged.append(f"{table} row {row} {why}")
        log.warning("%s: %s row %d %s; it is set aside", self._writer.name, table, row, why)
        if self._can_write:
            self._writer.put([("INSERT INTO set_aside VALUES (?, ?, ?)", (table, row, why))])
