"""Damage of a journal: found when it is opened, told, and mended by what can still be read.

A damaged journal is never lost as a whole: the rows of its sound pages go into a new file, which
takes its place; the damaged one stays beside it as `run.db.damagedN`. Who only looks gets the same
rows in a database of his own and changes nothing.

Does not know what rows mean, besides the calls: a result whose call is lost still counts as spent.
Source: own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tfgrpo.errors import StoreError
from tfgrpo.store.disk.files import (
    APPLICATION_ID,
    GATEWAY_VERSION,
    NO_FOLLOW,
    check_file,
    connect,
    create_file,
    opened_beside,
    read_at,
    store_errors,
)
from tfgrpo.store.disk.log_frames import Log, log_of, read_log
from tfgrpo.store.disk.page_sums import PageSums, sums_of
from tfgrpo.store.disk.salvage import Pages, rows_of, tables_of
from tfgrpo.store.rows import FILE

__all__ = ["Looked", "damaged_files", "look_at_damaged", "look_over", "mend"]

_KEPT = f"{FILE}.damaged"

log = logging.getLogger(__name__)

_LOOKS = 4
"""How often what looks damaged is looked at again where another process may be writing."""
_PAUSE_S = 0.01
_FOREIGN_PAGES = 2
"""From so many pages on that differ in a file without a fault, another program has written them."""
_SEEN: dict[str, tuple[int, ...]] = {}
"""Files that this process has found sound, by what the system says of them since."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What was found of a journal's file."""

    sums: PageSums | None
    """None for a journal that never had any."""
    log: Log
    wrong: frozenset[int] = frozenset()
    """Pages that are missing or not what was written."""

    @property
    def why(self) -> str:
        """What is damaged, in words; empty where nothing is."""
        parts = [self.log.why] if self.log.why else []
        if self.wrong and self.sums is not None:
            parts.append(f"{len(self.wrong)} of {len(self.sums.sums)} pages")
        return " and ".join(parts)


def look_over(file: Path, *, is_alone: bool) -> Looked:
    """Compare a journal's file and its log with their checksums.

    Args:
        is_alone: no other process writes to it.
    """
    looked = _look(file)
    for _ in range(0 if is_alone else _LOOKS):
        if not (looked.why or looked.log.is_torn):
            break
        time.sleep(_PAUSE_S)
        with _log_held(file):
            looked = _look(file)
    if looked.log.is_torn:
        log.warning(
            "%s ends within a write: the process that wrote it was killed then, or the file was "
            "cut and what came after is lost",
            log_of(file),
        )
    if looked.why and _is_another(file, looked):
        return Looked(None, Log())
    if looked.why and _is_foreign(file, looked):
        log.warning(
            "%s was written by another program, or replaced by a copy (%s): it is taken as it is",
            file,
            looked.why,
        )
        return Looked(None, looked.log)
    return looked


def _look(file: Path) -> Looked:
    sums = PageSums.read(file)
    if sums is None:
        return Looked(None, Log())
    with store_errors(file, "read"), opened_beside(file, file) as handle:
        mark = _mark(handle, file)
        found = read_log(file)
        if _SEEN.get(str(file)) == mark:
            return Looked(sums, found)
        wrong = frozenset(sums.wrong_pages(handle, found.pages))
        if not (wrong or found.why) and mark == _mark(handle, file):
            _SEEN[str(file)] = mark
        return Looked(sums, found, wrong)


def _mark(handle: int, file: Path) -> tuple[int, ...]:
    """Return what the system says of a file and its checksums."""
    at = [os.fstat(handle)]
    with contextlib.suppress(OSError):
        at.append(sums_of(file).stat())
    return tuple(part for s in at for part in (s.st_ino, s.st_size, s.st_mtime_ns))


@contextlib.contextmanager
def _log_held(file: Path) -> Iterator[None]:
    """Keep a living writer's log from beginning anew: while a reader is in the middle of a
    transaction, what the file lacks stays in the log."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(sqlite3.Error):  # of a damaged file there may be no reader
            reader = stack.enter_context(contextlib.closing(connect(file, readonly=True)))
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield


def _is_another(file: Path, looked: Looked) -> bool:
    """Tell whether a file is a database that is not of this journal's kind, or of another version,
    and not a damaged one: then it is refused and left alone."""
    sums = looked.sums
    if sums is None or 1 not in looked.wrong:
        return False
    with opened_beside(file, file) as handle:
        head = read_at(handle, sums.page_size, 0)
    if not head.startswith(b"SQLite format 3\0") or len(head) < 100:
        return False
    kind = int.from_bytes(head[68:72], "big"), int.from_bytes(head[60:64], "big")
    if kind == (APPLICATION_ID, sums.version):
        return False
    return sums.with_a_bit_turned(1, head) is None


def _is_foreign(file: Path, looked: Looked) -> bool:
    """Tell whether a file differs from its checksums and is a sound journal all the same."""
    if looked.log.why or len(looked.wrong) < _FOREIGN_PAGES:
        return False
    try:
        with contextlib.closing(connect(file, readonly=True)) as connection:
            check_file(connection, file, thorough=True)
    except (StoreError, sqlite3.Error):
        return False
    return True


def mend(file: Path, looked: Looked) -> str:
    """Put what can be read of a damaged journal in its place; return what became of it.

    Raises:
        StoreError: there is no room for it; nothing has changed.
    """
    new, kept = file.with_name(f"{FILE}.new"), _unused(file)
    with store_errors(file, "mend"):
        create_file(new, "")
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
            told = _fill(connection, file, looked)
            words = f"was damaged ({looked.why}): {told}. The damaged file is kept as {kept.name!r}"
            connection.execute("INSERT INTO set_aside VALUES (?, 0, ?)", (FILE, words))
        try:
            os.link(file, kept)
        except OSError:  # a file system without links
            shutil.copyfile(file, kept)
        if log_of(file).exists():
            os.replace(log_of(file), log_of(kept))
        for path in (sums_of(file), file.with_name(f"{FILE}-shm")):
            path.unlink(missing_ok=True)
        os.replace(new, file)
    log.warning("%s %s", file, words)
    return words


def look_at_damaged(file: Path, looked: Looked) -> tuple[sqlite3.Connection, str]:
    """Return what can be read of a damaged journal, in a database that is gone when it is closed,
    and what is wrong in words."""
    connection = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    try:
        with store_errors(file, "read"):
            told = _fill(connection, file, looked)
    except BaseException:
        connection.close()
        raise
    words = f"is damaged ({looked.why}): {told}. It is mended when the run goes on"
    log.warning("%s %s", file, words)
    return connection, words


def damaged_files(folder: Path) -> list[Path]:
    """Return the damaged files that were kept when a run's journal was mended."""
    return sorted(folder.glob(f"{_KEPT}*"))


def _unused(file: Path) -> Path:
    number = 1
    while (kept := file.with_name(f"{_KEPT}{number}")).exists():
        number += 1
    return kept


def _fill(target: sqlite3.Connection, file: Path, looked: Looked) -> str:
    """Copy all rows that can be read; return what is lost, in words."""
    sums = looked.sums
    assert sums is not None
    tables = tables_of(sums.schema)
    indices = [sql for sql in sums.schema if not sql.lstrip().upper().startswith("CREATE TABLE")]
    target.execute("BEGIN")
    target.execute(f"PRAGMA application_id={APPLICATION_ID}")
    target.execute(f"PRAGMA user_version={sums.version}")
    for sql in sums.schema:
        if sql not in indices:
            target.execute(sql)
    with _pages(file, looked, sums) as pages:
        for table, rows in rows_of(pages, tables):
            target.executemany(table.insert, rows)
        unread = len(pages.wrong) + looked.log.lost
    for sql in indices:
        target.execute(sql)
    told = _lost(target, unread) if unread else "every flipped bit was found, so nothing is lost"
    target.execute(_CALLS_OF_RESULTS)
    target.execute("COMMIT")
    return told


@contextlib.contextmanager
def _pages(file: Path, looked: Looked, sums: PageSums) -> Iterator[Pages]:
    with contextlib.ExitStack() as stack:
        handle = stack.enter_context(opened_beside(file, file))
        log_handle = None
        if looked.log.pages:
            log_handle = os.open(log_of(file), os.O_RDONLY | NO_FOLLOW)
            stack.callback(os.close, log_handle)
        mended = dict(looked.log.mended)
        for page in looked.wrong:
            content = read_at(handle, sums.page_size, (page - 1) * sums.page_size)
            whole = sums.with_a_bit_turned(page, content)
            if whole is not None:
                mended[page] = whole
        yield Pages(
            handle,
            log_handle,
            looked.log.pages,
            mended,
            looked.wrong.difference(mended),
            page_size=sums.page_size,
            count=max(looked.log.size or len(sums.sums), *looked.log.pages, 1),
        )


_WORDS = {
    "meta": "settings",
    "sessions": "session marks",
    "calls": "calls",
    "rollouts": "rollouts",
    "groups": "groups",
    "libraries": "library versions",
    "decisions": "decisions",
}
_REPLIES_KEPT = """
SELECT sum(r.n) FROM results r JOIN calls c ON c.call = r.call
WHERE r.kind = 'ok' AND c.completion_tokens > 0
"""
"""Replies that calls of an LM left: attempts of a function reserve no tokens and leave none, and a
gateway keeps its replies in tables of its own."""
_CALLS_OF_RESULTS = """
INSERT INTO calls SELECT r.call,
  coalesce((SELECT session FROM calls b WHERE b.call < r.call ORDER BY b.call DESC LIMIT 1), 1),
  0.0, x'', 'other', r.model, '', r.n, r.cost_usd,
  r.uncached + r.cache_read + r.cache_write, r.text + r.reasoning
FROM results r LEFT JOIN calls c ON c.call = r.call WHERE c.call IS NULL
"""
"""What a lost call cost is still known by its result."""


def _lost(target: sqlite3.Connection, unread: int) -> str:
    """Return what is missing, in words, as far as it shows: rows have numbers and are never
    deleted."""

    def number(sql: str) -> int:
        return int(target.execute(sql).fetchone()[0] or 0)

    lost: dict[str, int] = {}
    for table, words in _WORDS.items():
        lost[words] = number(f"SELECT max(rowid) - count(*) FROM {table}")
    kept = number("SELECT count(*) FROM completions WHERE call IS NOT NULL")
    paid = 0 if number("PRAGMA user_version") == GATEWAY_VERSION else number(_REPLIES_KEPT)
    gaps = number("SELECT max(completion) - count(*) FROM completions")
    lost["replies"] = max(gaps, paid - kept, 0)
    lost["results of calls, which now count at their worst case"] = number(
        "SELECT count(*) FROM calls WHERE call NOT IN (SELECT call FROM results)"
    )
    parts = [f"{n} {words}" for words, n in lost.items() if n > 0]
    among = f", at least {', '.join(parts)} among it" if parts else ""
    return (
        f"what stood in {unread} pages is lost{among}; a lost reply is asked, and paid for, again "
        "when it is needed"
    )
