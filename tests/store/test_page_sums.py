"""Checksums of a journal's pages while others write to it."""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from array import array
from pathlib import Path

import pytest

from tfgrpo.store.disk.log_frames import Frame, Header, log_of
from tfgrpo.store.disk.page_sums import PageSums


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database with a log, which is held open by the test."""
    return tmp_path / "run.db"


def newest_commit(file: Path) -> Frame:
    """Return the frame of a log that ends its last write."""
    with open(log_of(file), "rb") as opened:
        head = Header.parse(opened.read(32))
        assert head is not None
        return [frame for frame in head.frames(opened.fileno()) if frame.size][-1]


@pytest.mark.parametrize("is_taken_back", [False, True])
def test_a_frame_whose_page_is_not_written_yet_is_taken_when_it_is(
    file: Path, is_taken_back: bool
) -> None:
    """SQLite writes a frame's header before its page, so a reader may see one without the other;
    frames of a larger write that was taken back may follow it."""
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("PRAGMA wal_autocheckpoint=0")
        writer.execute("CREATE TABLE t (x)")
        sums = PageSums.make(file, writer)
        writer.execute("INSERT INTO t VALUES ('x')")
        if is_taken_back:
            writer.execute("PRAGMA cache_size=2")
            writer.execute("BEGIN")
            writer.execute("INSERT INTO t VALUES (?)", ("y" * 100_000,))
            writer.execute("ROLLBACK")
        for i in range(3):
            writer.execute("INSERT INTO t VALUES (?)", ("x" * 3000 * i,))
        frame = newest_commit(file)
        size = log_of(file).stat().st_size
        assert (size > frame.content_at + sums.page_size) == is_taken_back
        with open(log_of(file), "r+b") as opened:
            opened.seek(frame.content_at)
            page = opened.read(sums.page_size)
            opened.seek(frame.content_at)
            opened.write(bytes(len(page)))
            opened.flush()
            sums.take_log(is_written=True)
            opened.seek(frame.content_at)
            opened.write(page)
        sums.take_log(is_written=True)
        assert sums.place[1] > 0
        sums.seal(writer)
        writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with open(file, "rb") as opened:
            assert sums.wrong_pages(opened.fileno(), {}) == set()
            assert len(sums.sums) * sums.page_size == file.stat().st_size


def test_a_file_beyond_the_byte_that_sqlite_locks_is_sound(file: Path) -> None:
    """No log ever holds the page at one gibibyte, so it has no checksum; its neighbours have."""
    page_size = 65_536
    pages = (1 << 30) // page_size + 2
    with open(file, "wb") as opened:
        opened.truncate(pages * page_size)  # of holes
    sums = PageSums(file, page_size, 1, [])
    sums.sums = array("I", [zlib.crc32(bytes(page_size))]) * pages
    sums.sums[pages - 2] = 0
    with open(file, "rb") as opened:
        assert sums.wrong_pages(opened.fileno(), {}) == set()
        sums.sums[pages - 1] ^= 1
        sums.sums[pages - 3] ^= 1
        assert sums.wrong_pages(opened.fileno(), {}) == {pages, pages - 2}
