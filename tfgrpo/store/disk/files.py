"""The files of a run's folder: how they are made, opened and checked, and what their failures mean.

Does not know what the rows mean or how they are written. Source: SQLite's documentation; own.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tfgrpo.errors import StoreError
from tfgrpo.store.rows import SCHEMA

APPLICATION_ID = 0x54464752
"""`TFGR`: marks a file as a run's journal."""
VERSION = 1
GATEWAY_VERSION = 2
"""Version of a file that has a gateway's tables beside a run's."""

_NETWORK_TYPES = frozenset(
    """nfs nfs4 cifs smb smb2 smb3 smbfs 9p afs ceph lustre gpfs beegfs glusterfs fuse.sshfs
    fuse.s3fs fuse.gcsfuse fuse.glusterfs""".split()  # noqa: SIM905
)


@contextmanager
def store_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn SQLite's and the system's errors into one clear line about `path`.

    Raises:
        StoreError: always in place of `sqlite3.Error` and `OSError`.
    """
    try:
        yield
    except StoreError:
        raise
    except (sqlite3.Error, OSError) as exc:
        raise StoreError(_explain(path, doing, exc)) from exc


def _explain(path: Path, doing: str, exc: Exception) -> str:
    what = f"cannot {doing} {str(path)!r}"
    name = getattr(exc, "sqlite_errorname", "") or errno.errorcode.get(
        getattr(exc, "errno", 0) or 0, ""
    )
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")) or name in ("ENOSPC", "EDQUOT", "EFBIG"):
        return (
            f"{what}: the disk is full or a size limit is reached ({_free(path)} free; at least "
            "16 MB are wanted). What was committed is safe: free some space and run again"
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")) or name in (
        "EROFS",
        "EACCES",
        "EPERM",
    ):
        return f"{what}: it is read-only for this user. Choose another folder or fix its rights"
    if name.startswith("SQLITE_CANTOPEN") or name in ("ENOENT", "ENOTDIR", "EISDIR"):
        return f"{what}: the folder does not exist or cannot be entered ({exc})"
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return (
            f"{what}: the file is damaged or not a journal ({exc}). Move it away and restore a "
            "copy, or start a new run"
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"{what}: another program holds the file. Close it and run again"
    return f"{what}: {type(exc).__name__}: {exc}"


def _free(path: Path) -> str:
    try:
        at = os.statvfs(path if path.exists() else path.parent)
    except (OSError, AttributeError):
        return "unknown"
    return f"{at.f_bavail * at.f_frsize / 1e6:.1f} MB"


def refuse_network_disk(folder: Path) -> None:
    """Refuse a folder on a network file system, where WAL is not safe.

    Raises:
        StoreError: the mount that holds `folder` is of a network type.
    """
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return
    here, best, kind = str(folder.resolve()), "", ""
    for line in mounts.read_text(errors="replace").splitlines():
        _, mount, fs_type, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        inside = here == mount or here.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fs_type
    if kind in _NETWORK_TYPES:
        raise StoreError(
            f"run folder {str(folder)!r} is on a network disk ({kind} at {best}), where a journal "
            "can be damaged: choose a local folder and copy the exported groups afterwards"
        )


class _Connection(sqlite3.Connection):
    """A connection whose file is known to be open in this process until it is closed."""

    _file: tuple[int, int] | None = None

    def opens(self, path: Path) -> None:
        """Count the file as open."""
        self._file = _identity(path)
        with _GUARD:
            _OPEN[self._file] += 1

    def close(self) -> None:
        """Close it, and what was read beside it."""
        super().close()
        file, self._file = self._file, None
        if file is None:
            return
        with _GUARD:
            _OPEN[file] -= 1
            if not _OPEN[file]:
                del _OPEN[file]
                for handle in _LATE.pop(file, {}).values():
                    os.close(handle)


_GUARD = threading.Lock()
_OPEN: Counter[tuple[int, int]] = Counter()
"""How many connections of this process have a file open."""
_LATE: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
"""What was opened beside them, by file: closed with the last connection."""


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


@contextmanager
def opened_beside(path: Path, database: Path) -> Iterator[int]:
    """Open a file for reading that SQLite may have open in this process, too.

    The system drops all locks that a process has on a file when any handle of it is closed, those
    of SQLite included; so a handle is kept until the process has no connection to the database.

    Args:
        path: the database, or its index of the log.
        database: the database.
    """
    own, key = _identity(path), _identity(database)
    with _GUARD:
        handle = _LATE.get(key, {}).get(own)
    if handle is not None:
        yield handle
        return
    handle = os.open(path, os.O_RDONLY | NO_FOLLOW)
    try:
        yield handle
    finally:
        with _GUARD:
            if _OPEN[key] and own not in _LATE.setdefault(key, {}):
                _LATE[key][own] = handle
            elif not _OPEN[key]:
                os.close(handle)


def uri_of(path: Path) -> str:
    """Return the address under which SQLite changes nothing of a journal, nor of its log."""
    immutable = "" if path.with_name(path.name + "-wal").exists() else "&immutable=1"
    return f"{path.resolve().as_uri()}?mode=ro{immutable}"


def connect(path: Path, *, readonly: bool = False, durable: bool = False) -> sqlite3.Connection:
    """Open a journal file with the settings that every connection of ours has."""
    uri = uri_of(path) if readonly else f"{path.resolve().as_uri()}?mode=rw"
    connection = sqlite3.connect(
        uri,
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
        factory=_Connection,
    )
    connection.opens(path)
    connection.execute("PRAGMA busy_timeout=10000")
    if not readonly:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("PRAGMA secure_delete=ON")  # what is deleted is in no free page either
    return connection


def create_file(path: Path, schema: str = SCHEMA) -> None:
    """Make an empty journal that only its owner can read; the file appears whole or not at all.

    An unfinished file of a killed process is replaced.
    """
    with store_errors(path, "create"):
        part = path.with_name(path.name + ".part")
        part.unlink(missing_ok=True)
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        connection = sqlite3.connect(part, isolation_level=None)
        try:
            connection.executescript(
                f"BEGIN; PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={VERSION}; "
                f"{schema} COMMIT;"
            )
        finally:
            connection.close()
        os.replace(part, path)


def check_file(connection: sqlite3.Connection, path: Path, *, thorough: bool) -> None:
    """Refuse a file that is not ours, is of another version, or is damaged.

    Raises:
        StoreError: with what was found and what to do.
    """
    with store_errors(path, "read"):
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION_ID:
            raise StoreError(f"{str(path)!r} is an SQLite file, but not a journal of tfgrpo")
        if version not in (VERSION, GATEWAY_VERSION):
            which = "a newer" if version > GATEWAY_VERSION else "another"
            raise StoreError(
                f"{str(path)!r} has journal version {version}, this tfgrpo reads {VERSION} and "
                f"{GATEWAY_VERSION}: "
                f"use {which} tfgrpo, or start a new run"
            )
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0] if thorough else "ok"
        if found != "ok":
            raise StoreError(
                f"{str(path)!r} is damaged ({found}): restore a copy, or start a new run"
            )


RESERVED_BYTES = 16_000_000
"""Disk space held while a run goes on, so that replies in flight are kept when it is full."""


def reserve_space(folder: Path) -> Path:
    """Hold `RESERVED_BYTES` of disk in a file of the folder; the next opener takes over what a
    killed process left.

    Raises:
        StoreError: there is not so much room; nothing has been paid for.
    """
    path = folder / "reserve"
    with store_errors(path, "reserve space at"):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, RESERVED_BYTES)
            elif os.fstat(handle).st_size < RESERVED_BYTES:
                os.write(handle, bytes(RESERVED_BYTES))
        except OSError as exc:
            path.unlink(missing_ok=True)
            if exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
        finally:
            os.close(handle)
    return path


NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags of every file that is opened in a run's folder: a link there is never followed."""


def read_at(handle: int, size: int, at: int) -> bytes:
    """Return bytes of an open file from a place on; fewer where it ends before."""
    if hasattr(os, "pread"):
        return os.pread(handle, size, at)
    os.lseek(handle, at, os.SEEK_SET)
    return os.read(handle, size)


def refuse_links(folder: Path, *names: str, overwritten: Sequence[str] = ()) -> None:
    """Refuse a run folder whose files are links, or that belongs to somebody else.

    Args:
        folder: the run's.
        names: files that may be no symbolic links.
        overwritten: files that may have no second name either: they would be emptied under it, too.

    Raises:
        StoreError: naming the link, or the owner.
    """
    for name in names:
        if (folder / name).is_symlink():
            raise StoreError(
                f"{str(folder / name)!r} is a link; a run's files are never links. Remove it, or "
                "choose another folder"
            )
    for name in overwritten:
        if (folder / name).is_file() and (folder / name).stat().st_nlink > 1:
            raise StoreError(
                f"{str(folder / name)!r} is a hard link: writing to it would change the same file "
                "under its other name. Copy the folder (cp -r) and use the copy, or choose another"
            )
    if hasattr(os, "getuid") and os.getuid() and folder.stat().st_uid not in (os.getuid(), 0):
        raise StoreError(
            f"run folder {str(folder)!r} belongs to another user (uid {folder.stat().st_uid}): "
            "choose a folder of your own"
        )
