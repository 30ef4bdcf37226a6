"""What a large run adds up to, kept at its orderly end, so that a list of runs reads a few rows.

It counts only where nothing was added since, and where the file has not been written since its
checksums were; everything else is left to opening the journal.

Does not know what decisions mean. Source: own.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfgrpo.errors import StoreError
from tfgrpo.store.codec import DamagedValue, column_text, pack_line, unpack, unpack_line
from tfgrpo.store.disk.database import DatabaseWriter
from tfgrpo.store.disk.files import check_file, connect
from tfgrpo.store.disk.log_frames import log_of
from tfgrpo.store.disk.page_sums import sums_of
from tfgrpo.store.fold import RunState, newest_numbers, state_of, totals_of
from tfgrpo.store.rows import FILE, Statement

__all__ = ["Kept", "kept_state", "totals_row"]


class Kept(NamedTuple):
    """What a list of runs shows of one."""

    state: RunState
    """Without its library."""
    newest: dict[str, Any]
    """The newest decision of some kinds; a kind without one is not there."""
    damaged: list[str]
    """What was lost to damage, in words."""


def totals_row(writer: DatabaseWriter, state: RunState) -> Statement:
    """Return the row that keeps a state."""
    row = {"at": f"{newest_numbers(writer)}/{writer.session}", "totals": totals_of(state)}
    return ("INSERT INTO meta VALUES (?, ?)", ("totals", pack_line(row, "totals")))


def kept_state(folder: Path, kinds: Sequence[str]) -> Kept | None:
    """Return what a closed run keeps of its state; None where it has to be opened for that."""
    file = folder / FILE
    try:
        if file.is_symlink() or log_of(file).exists():
            return None
        if sums_of(file).stat().st_mtime_ns < file.stat().st_mtime_ns:
            return None
        with contextlib.closing(connect(file, readonly=True)) as connection:
            check_file(connection, file, thorough=False)
            return _read(DatabaseWriter(connection, file), kinds)
    except (OSError, sqlite3.Error, StoreError, DamagedValue, ValueError, KeyError, TypeError):
        return None  # opening the journal tells what is wrong


def _read(reader: DatabaseWriter, kinds: Sequence[str]) -> Kept | None:
    rows = reader.read("SELECT value FROM meta WHERE name = 'totals' ORDER BY rowid DESC LIMIT 1")
    if not rows:
        return None
    row = unpack_line(rows[0][0])
    session, at = reader.read("SELECT max(session), max(at) FROM sessions")[0]
    closed = reader.read("SELECT 1 FROM sessions WHERE session = ? AND event = 'close'", (session,))
    if not closed or row["at"] != f"{newest_numbers(reader)}/{session}":
        return None
    newest: dict[str, Any] = {}
    for kind in kinds:
        sql = "SELECT body, digest FROM decisions WHERE kind = ? ORDER BY decision DESC LIMIT 1"
        for body, mark in reader.read(sql, (column_text(kind),)):
            newest[kind] = unpack(body, mark)
    lost = reader.read("SELECT tbl, why FROM set_aside WHERE tbl = ?", (FILE,))
    damaged = [f"{table} {why}" for table, why in lost]
    return Kept(state_of(row["totals"], float(at)), newest, damaged)
