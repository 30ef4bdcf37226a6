"""A checksum of every page of a journal, in `run.db-sums` beside it.

Pages that the log holds are protected by the log's own checksums; all others must equal what is
written here. That holds at every moment, for a killed process too, because of one rule: before the
log may begin anew, the checksums of all that it holds are written. The file also keeps the
tables' definitions, so that a damaged first page costs nothing.

Does not know rows. Source: own.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import sys
import threading
import zlib
from array import array
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from tfgrpo.store.disk.files import NO_FOLLOW, opened_beside, read_at
from tfgrpo.store.disk.log_frames import HEADER_BYTES, Header, checked, log_of

log = logging.getLogger(__name__)

_MAGIC = b"tfgrpo page sums 1\n"
_PAGES_A_READ = 256
_LOCK_BYTE = 1 << 30
"""Where SQLite locks a file's bytes; the page that holds it is never written, nor read."""
_MAKES = re.compile(r"\s*CREATE\s+(TABLE|INDEX|UNIQUE\s+INDEX)\s", re.IGNORECASE)


class PageSums:
    """The checksums of one journal's pages, as of some commit.

    Safe from several threads. A failure to write them costs the protection and nothing else.
    """

    def __init__(self, file: Path, page_size: int, version: int, schema: list[str]) -> None:
        self.file = file
        self.path = sums_of(file)
        self.page_size = page_size
        self.version = version
        """The journal's."""
        self.schema = schema
        """The statements that make its tables and indices."""
        self.sums = array("I")
        """The checksum of page i + 1."""
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._salts = b""
        self._frames = 0
        """How many frames of the log with these salts are in `sums`."""
        self._chain = (0, 0)
        """Checksum of the last of them, which the next goes on from."""
        self._is_new = True
        """True where what is in memory is not in the file."""

    @classmethod
    def read(cls, file: Path) -> PageSums | None:
        """Return what is kept of a journal; None where nothing is, or nothing sound."""
        try:
            handle = os.open(sums_of(file), os.O_RDONLY | NO_FOLLOW)
        except OSError:
            return None
        with open(handle, "rb") as source:
            raw = source.read()
        if not raw:
            return None
        try:
            if not raw.startswith(_MAGIC) or zlib.crc32(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
                raise ValueError("it does not match its checksum")
            line, _, rest = raw[len(_MAGIC) :].partition(b"\n")
            row: dict[str, Any] = json.loads(line)
            found = cls(file, int(row["page_size"]), int(row["version"]), list(row["schema"]))
            if found.page_size < 512 or not all(map(_MAKES.match, found.schema)):
                raise ValueError("it says what no journal has")
            found.sums.frombytes(rest[:-4])
        except (ValueError, KeyError, TypeError) as exc:
            log.warning("%s is damaged (%s); it is made anew", sums_of(file), exc)
            return None
        if sys.byteorder == "big":
            found.sums.byteswap()
        found._is_new = False
        return found

    @classmethod
    def make(cls, file: Path, connection: sqlite3.Connection) -> PageSums:
        """Return the checksums of a journal as it is, which is believed."""
        page_size = int(connection.execute("PRAGMA page_size").fetchone()[0])
        made = cls(file, page_size, 0, [])
        made._describe(connection)
        step, at = page_size * _PAGES_A_READ, 0
        with opened_beside(file, file) as handle:
            while chunk := read_at(handle, step, at):
                made.sums.extend(_crcs(chunk, page_size))
                at += step
        made.take_log()
        return made

    def _describe(self, connection: sqlite3.Connection) -> None:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        rows = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        schema = [sql for (sql,) in rows]
        if (version, schema) != (self.version, self.schema):
            self.version, self.schema, self._is_new = version, schema, True

    def take_log(self, *, is_written: bool = False) -> None:
        """Take the pages that the log holds by now, committed ones alone.

        Args:
            is_written: others may be writing to it meanwhile.
        """
        with self._lock:
            try:
                handle = os.open(log_of(self.file), os.O_RDONLY | NO_FOLLOW)
            except OSError:
                return
            try:
                self._take(handle, is_written=is_written)
            finally:
                os.close(handle)

    def _take(self, handle: int, *, is_written: bool) -> None:
        head = Header.parse(read_at(handle, HEADER_BYTES, 0))
        if head is None or head.is_mended or head.page_size != self.page_size:
            return
        if head.salts != self._salts:
            self._salts, self._frames, self._chain = head.salts, 0, head.sums
        after = head.frames(handle, self._frames)
        frames = list(takewhile(lambda frame: frame.salts == head.salts, after))
        commits = [i for i, frame in enumerate(frames, 1) if frame.size]
        if is_written:
            # A frame's header is written before its page, so the newest commit's may not be there
            # yet; behind it may stand frames of a longer write that was taken back.
            del commits[-1:]
        del frames[commits[-1] if commits else 0 :]
        waiting: list[tuple[int, int]] = []
        for found in checked(handle, head, frames, self._chain):
            frame, content = found.frame, found.mended
            if content is None:
                content = read_at(handle, self.page_size, frame.content_at)
            # A page that was damaged while it stood in the log gets the checksum of what was
            # written, or one that nothing has: whoever opens the journal next is told.
            waiting.append((frame.page, zlib.crc32(content) ^ found.is_lost))
            self._chain = frame.sums
            if frame.size:
                self._keep(waiting, frame.size)
                self._frames += len(waiting)
                waiting.clear()

    def _keep(self, pages: list[tuple[int, int]], size: int) -> None:
        self._is_new = True
        sums = self.sums
        if len(sums) < size:
            sums.extend([0] * (size - len(sums)))
        del sums[size:]
        for page, crc in pages:
            if page <= size:
                sums[page - 1] = crc

    def write(self, connection: sqlite3.Connection | None = None) -> None:
        """Bring the file up to date, all or nothing, and into the disk; where that fails there is
        no file."""
        with self._lock:
            try:
                if connection is not None:
                    self._describe(connection)
                if self._is_new:
                    self._write()
                    self._is_new = False
            except (OSError, sqlite3.Error) as exc:
                log.warning("%s cannot be written (%s); damage may go unseen", self.path, exc)
                with suppress(OSError):
                    self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        row = {"page_size": self.page_size, "version": self.version, "schema": self.schema}
        sums = self.sums
        if sys.byteorder == "big":
            sums = array("I", sums)
            sums.byteswap()
        body = b"%s%s\n%s" % (_MAGIC, json.dumps(row).encode("ascii"), sums.tobytes())
        part = self.path.with_name(self.path.name + ".part")
        part.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW
        with open(os.open(part, flags, 0o600), "wb") as target:
            target.write(body + zlib.crc32(body).to_bytes(4, "little"))
            target.flush()
            os.fsync(target.fileno())
        os.replace(part, self.path)

    def touch(self) -> None:
        """Make the file newer than the journal's, which has been written for the last time."""
        with suppress(OSError):
            os.utime(self.path)

    def seal(self, connection: sqlite3.Connection | None = None) -> None:
        """Write the checksums of all that is committed: then the log may begin anew.

        A copy of this process, which knows nothing of what is written since, leaves them alone.
        """
        if os.getpid() != self._owner:
            return
        self.take_log()
        self.write(connection)

    @property
    def place(self) -> tuple[bytes, int]:
        """Which log was taken, and how many frames of it."""
        return self._salts, self._frames

    def wrong_pages(self, handle: int, skip: dict[int, int]) -> set[int]:
        """Return the pages of an open database file that are missing or are not what was written,
        leaving out some."""
        wrong: set[int] = set()
        step = self.page_size * _PAGES_A_READ
        sums = self.sums
        for first in range(0, len(sums), _PAGES_A_READ):
            chunk = read_at(handle, step, first * self.page_size)
            whole = len(chunk) - len(chunk) % self.page_size
            found = array("I", _crcs(chunk[:whole], self.page_size))
            wanted = sums[first : first + _PAGES_A_READ]
            if found[: len(wanted)] == wanted:
                continue
            for i, crc in enumerate(wanted):
                if i >= len(found) or found[i] != crc:
                    wrong.add(first + i + 1)
        return wrong.difference(skip, (_LOCK_BYTE // self.page_size + 1,))

    def with_a_bit_turned(self, page: int, content: bytes) -> bytes | None:
        """Return a page with the one bit turned that makes its checksum right; None where one bit
        does not. No two turned bits of a page that short look like one."""
        wanted, turned = self.sums[page - 1], bytearray(content)
        for at, byte in enumerate(content):
            for bit in range(8):
                turned[at] = byte ^ (1 << bit)
                if zlib.crc32(turned) == wanted:
                    return bytes(turned)
            turned[at] = byte
        return None


def sums_of(file: Path) -> Path:
    """Return the path of a journal's checksums."""
    return file.with_name(file.name + "-sums")


def _crcs(chunk: bytes, page_size: int) -> list[int]:
    crc32 = zlib.crc32
    return [crc32(chunk[at : at + page_size]) for at in range(0, len(chunk), page_size)]
