"""One writer a run folder: an advisory lock that dies with its process.

The operating system's file lock is the truth: it is gone the moment its owner is, also after
`kill -9`. The file's content (pid, host, start time) only tells a second process whom to blame. An
owner that leaves in order empties the file; a content found by the next owner therefore means that
the last one was killed.

Does not know what is protected. Source: own.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tfgrpo.errors import StoreError
from tfgrpo.store.disk.files import NO_FOLLOW

if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class RunLock:
    """The exclusive right to write to one run folder.

    Raises:
        StoreError: another process (or this one) holds it; the message names pid and host.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o600)
        except OSError as exc:
            if exc.errno != errno.ELOOP:
                raise
            raise StoreError(
                f"{str(path)!r} is a link; a run's files are never links. Remove it, or choose "
                "another folder"
            ) from exc
        if not _try_lock(handle):
            owner = _read(handle)
            os.close(handle)
            raise StoreError(
                f"run {str(path.parent)!r} is in use by {_name(owner)}: wait for it, stop it, "
                "or choose another run folder"
            )
        self._handle: int | None = handle
        self.earlier_owner: dict[str, Any] = _read(handle)
        """Who held it before and was killed; empty after an orderly end."""
        _write(handle, _me())

    @property
    def was_killed(self) -> bool:
        """True when the last owner did not leave in order."""
        return bool(self.earlier_owner)

    def release(self) -> None:
        """Leave in order; may be called twice."""
        if self._handle is not None:
            _write(self._handle, {})
            self.abandon()

    def abandon(self) -> None:
        """Let go as a killed process does, leaving the content."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _me() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _read(handle: int) -> dict[str, Any]:
    os.lseek(handle, 0, os.SEEK_SET)
    text = os.read(handle, 4096).decode("utf-8", "replace").strip()
    if not text:
        return {}
    try:
        owner = json.loads(text)
    except ValueError:
        return {"note": text[:80]}
    return owner if isinstance(owner, dict) else {"note": text[:80]}


def _write(handle: int, owner: dict[str, Any]) -> None:
    os.lseek(handle, 0, os.SEEK_SET)
    os.ftruncate(handle, 0)
    if owner:
        os.write(handle, json.dumps(owner).encode("utf-8"))


def _name(owner: dict[str, Any]) -> str:
    if "pid" not in owner:
        return "another process"
    where = "this process" if owner["pid"] == os.getpid() else f"process {owner['pid']}"
    return f"{where} (pid {owner['pid']} on host {owner.get('host')}, since {owner.get('since')})"
