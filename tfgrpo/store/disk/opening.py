"""Opens the journal in a run's folder: a file, its lock and its reserve.

Does not know what a run holds. Source: own.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from tfgrpo.errors import StoreError
from tfgrpo.store.budget import Ledger
from tfgrpo.store.disk.database import DatabaseWriter
from tfgrpo.store.disk.files import (
    check_file,
    connect,
    create_file,
    refuse_links,
    refuse_network_disk,
    reserve_space,
    store_errors,
)
from tfgrpo.store.disk.lock import RunLock
from tfgrpo.store.disk.log_frames import HEADER_BYTES, Log, log_of
from tfgrpo.store.disk.mending import Looked, look_at_damaged, look_over, mend
from tfgrpo.store.disk.page_sums import PageSums, sums_of
from tfgrpo.store.rows import FILE, OpenRun

__all__ = ["open_file"]

log = logging.getLogger(__name__)

_FILES = (
    *(FILE + end for end in ("", "-wal", "-shm", "-sums", "-sums.part", ".part", ".new")),
    "lock",
    "reserve",
)


def open_file(
    folder: Path, ledger: Ledger, *, create: bool, readonly: bool, durable: bool
) -> OpenRun:
    """Open a folder's journal; see `Journal.open`.

    Raises:
        StoreError: no journal, in use, damaged, read-only, disk full, network disk.
    """
    if not (create or os.path.exists(folder / FILE)):  # False where this user may not look
        raise StoreError(
            f"there is no run in {str(folder)!r} (no {FILE}): give a run's folder, which "
            "its config names as run.folder"
        )
    return _look(folder, ledger) if readonly else _open(folder, ledger, durable=durable)


def _open(folder: Path, ledger: Ledger, *, durable: bool) -> OpenRun:
    file = folder / FILE
    with store_errors(folder, "use the run folder"):
        if not folder.exists():
            folder.mkdir(parents=True, mode=0o700)
        refuse_network_disk(folder)
        refuse_links(folder, *_FILES, overwritten=("lock", "reserve"))
        lock = RunLock(folder / "lock")
    try:
        existed = file.exists()
        reserve = reserve_space(folder)
        if existed and lock.was_killed:
            _tell_of_a_missing_log(file, HEADER_BYTES)
        looked = _sound(file) if existed else Looked(None, Log())
        if not existed:
            sums_of(file).unlink(missing_ok=True)
            create_file(file)
        with store_errors(file, "open"):
            connection = connect(file, durable=durable)
        try:
            sums = looked.sums
            check_file(connection, file, thorough=lock.was_killed and sums is None)
            with store_errors(file, "read"):
                sums = sums or PageSums.make(file, connection)
            sums.seal(connection)
            writer = DatabaseWriter(connection, file, reserve, sums)
            newest = writer.read(
                "SELECT coalesce(max(session), 0) FROM sessions WHERE typeof(session) = 'integer'"
            )
            writer.session = int(newest[0][0]) + 1
            is_sound = looked.sums is not None
            return OpenRun(writer, ledger, existed, lock, is_sound=is_sound)
        except BaseException:
            connection.close()
            raise
    except BaseException:
        lock.release()
        raise


def _tell_of_a_missing_log(file: Path, most_bytes: int) -> None:
    """Warn where the process that wrote a journal was killed and left no log, or one of so few
    bytes: it always has one, but in the moments when it has moved all of it into the file."""
    try:
        is_missing = log_of(file).stat().st_size <= most_bytes
    except FileNotFoundError:
        is_missing = True
    if is_missing and sums_of(file).exists():
        log.warning(
            "%s is empty or not there, although the process that wrote it was killed: unless all "
            "of it has been moved into %s, the newest rows are lost",
            log_of(file),
            file.name,
        )


def _sound(file: Path) -> Looked:
    """Return what is found of a journal's file, mended where it was damaged."""
    looked = look_over(file, is_alone=True)
    if not looked.why:
        return looked
    mend(file, looked)
    return Looked(None, Log())


def _look(folder: Path, ledger: Ledger) -> OpenRun:
    file = folder / FILE
    damage = ""
    with store_errors(file, "open"):
        refuse_links(folder, *_FILES)
        if (folder / "lock").exists() and (folder / "lock").stat().st_size:
            _tell_of_a_missing_log(file, -1)  # a living writer's may just have been emptied
        looked = look_over(file, is_alone=False)
        if looked.why:
            connection, damage = look_at_damaged(file, looked)
        else:
            connection = connect(file, readonly=True)
    try:
        check_file(connection, file, thorough=False)
        return OpenRun(DatabaseWriter(connection, file), ledger, True, damage=damage)
    except BaseException:
        connection.close()
        raise
