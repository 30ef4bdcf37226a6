"""SQLite's write-ahead log, read frame by frame: which pages it holds, and whether it is damaged.

A log is a header of 32 bytes and frames of a 24-byte header and a page each. The checksum of a
frame goes on from that of the frame before, and SQLite leaves out all that follows the first frame
whose checksum is wrong. A killed process leaves at most frames without a commit at the end; a
wrong checksum before a later commit is damage.

Does not know tables. Source: SQLite's file format documentation; own.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from tfgrpo.store.disk.files import NO_FOLLOW, read_at

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
_MAGIC = 0x377F0682
_WORD = 0xFFFFFFFF
_READINGS = 10
"""Times that a log is read which begins anew while it is read, as a living writer's does."""


class Frame(NamedTuple):
    """Where a frame lies and what its header says."""

    at: int
    """Of the frame's header in the file; the page's content follows it."""
    page: int
    size: int
    """Pages of the database after the commit that this frame ends; 0 ends none."""
    salts: bytes
    """Those of the log it belongs to; of an older one where it was left over from that."""
    sums: tuple[int, int]
    has_turned_salts: bool = False
    """True where its salts are the log's but for one bit: no checksum covers them."""

    @property
    def content_at(self) -> int:
        """Where the page's content begins."""
        return self.at + FRAME_HEADER_BYTES


@dataclass(slots=True)
class Log:
    """What can be believed of a log."""

    pages: dict[int, int] = field(default_factory=dict)
    """Page to where its newest committed content begins in the file."""
    mended: dict[int, bytes] = field(default_factory=dict)
    """Those of them in which a flipped bit was put right."""
    size: int = 0
    """Pages of the database after the last commit; 0 where there is none."""
    why: str = ""
    """What is damaged; empty where nothing is."""
    lost: int = 0
    """Frames that cannot be read."""
    is_torn: bool = False
    """True where it ends within a write: the process was killed then, or the file is cut."""


def log_of(file: Path) -> Path:
    """Return the path of a database's log."""
    return file.with_name(file.name + "-wal")


def read_log(file: Path) -> Log:
    """Return what a database's log holds; in what is damaged, each frame by its own checksum."""
    try:
        handle = os.open(log_of(file), os.O_RDONLY | NO_FOLLOW)
    except FileNotFoundError:
        return Log()
    try:
        for _ in range(_READINGS):
            raw = read_at(handle, HEADER_BYTES, 0)
            log = _read(handle, raw)
            if read_at(handle, HEADER_BYTES, 0) == raw:  # else it has begun anew meanwhile
                break
        return log
    finally:
        os.close(handle)


def _read(handle: int, raw: bytes) -> Log:
    head = Header.parse(raw)
    if head is None:
        has_frames = any(raw) and os.fstat(handle).st_size > HEADER_BYTES + FRAME_HEADER_BYTES
        return Log(why="its log's header", lost=1) if has_frames else Log()
    frames = list(head.frames(handle))
    commits = [i for i, f in enumerate(frames, 1) if f.size and f.salts == head.salts]
    last = commits[-1] if commits else 0
    span = last + len(_beyond(frames, last, head))
    found = list(checked(handle, head, frames[:span]))
    while found and not found[-1].frame.size:  # a write that was never committed, or its rest
        found.pop()
    wrong = sum(not c.is_good for c in found)
    log = Log(why=f"{wrong} pages of its log" if wrong else "")
    if head.is_mended and frames:
        log.why = "its log's header"
    log.lost = sum(c.is_lost for c in found)
    log.is_torn = not log.why and (len(found) < span or head.ends_within(handle, len(frames)))
    _take_frames(log, [(c.frame, c.mended) for c in found if not c.is_lost])
    return log


class Checked(NamedTuple):
    """A frame that was compared with its checksum."""

    frame: Frame
    """With what its header said before a bit of it turned, where that is known."""
    is_good: bool
    mended: bytes | None = None
    """The page's content where a bit has turned and is known, or turned beside it."""

    @property
    def is_lost(self) -> bool:
        """True where the content is not what was written."""
        return not self.is_good and self.mended is None


def _take_frames(log: Log, frames: list[tuple[Frame, bytes | None]]) -> None:
    waiting: list[tuple[Frame, bytes | None]] = []
    for frame, content in frames:
        waiting.append((frame, content))
        if not frame.size and not log.why:  # the frame of a commit may be the damaged one
            continue
        for known, mended in waiting:
            log.pages[known.page] = known.content_at
            log.mended.pop(known.page, None)
            if mended is not None:
                log.mended[known.page] = mended
        log.size = frame.size or log.size
        waiting.clear()


def _beyond(frames: list[Frame], last: int, head: Header) -> list[Frame]:
    """Return the frames of this log that follow its last commit."""
    return list(takewhile(lambda frame: frame.salts == head.salts, frames[last:]))


def checked(
    handle: int, head: Header, frames: list[Frame], before: tuple[int, int] | None = None
) -> Iterator[Checked]:
    """Yield for each frame whether its checksum goes on from the frame before it, and where it does
    not, what it says with the one flipped bit put right, if that is all that is wrong.

    A wrong frame does not make those after it wrong.
    """
    stored = computed = head.sums if before is None else before
    for number, frame in enumerate(frames, 1):
        data = head.summed(handle, frame)
        if data is None:  # emptied meanwhile
            yield Checked(frame, is_good=False)
            continue
        sums = head.checksum(data, stored)
        if frame.sums != sums and stored != computed:
            other = head.checksum(data, computed)
            sums = other if frame.sums == other else sums
        if frame.sums == sums and not frame.has_turned_salts:
            yield Checked(frame, is_good=True)
        else:
            after = frames[number] if number < len(frames) else None
            yield _mended(handle, head, frame, after, (data, sums))
        stored, computed = frame.sums, sums


def _mended(
    handle: int,
    head: Header,
    frame: Frame,
    after: Frame | None,
    is_now: tuple[bytes, tuple[int, int]],
) -> Checked:
    """Return a frame with its one flipped bit put right, or lost where several bits could be it.

    Args:
        after: the next frame, which goes on from the checksum that was written.
        is_now: what the checksum covers, as it stands there, and the checksum of that.
    """
    data, sums = is_now
    is_as_written, is_lost = Checked(frame, False, data[8:]), Checked(frame, False)
    if frame.sums == sums:  # its salts
        return is_as_written
    found = head.with_each_bit_turned(data, sums, frame.sums)
    if _is_one_bit_apart(struct.pack(">II", *sums), struct.pack(">II", *frame.sums)):
        # A bit of the checksum itself, which some bits of a page look like.
        following = None if after is None else head.summed(handle, after)
        if not found:
            return is_as_written
        if after is None or following is None:
            return is_lost
        if head.checksum(following, sums) == after.sums:
            return is_as_written
    if len(found) != 1:
        return is_lost
    page, size = (int.from_bytes(found[0][at : at + 4], "big") for at in (0, 4))
    return Checked(frame._replace(page=page, size=size), False, found[0][8:])


def _is_one_bit_apart(one: bytes, other: bytes) -> bool:
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).bit_count() == 1


@cache
def _factors(words: int) -> NDArray[np.uint32]:
    """Return what each word counts by in the checksum of so many: Fibonacci numbers, the largest
    two for the checksum that it goes on from. Each of its two sums adds the other one."""
    import numpy as np

    found = [0, 1]
    while len(found) < words + 2:
        found.append((found[-1] + found[-2]) & _WORD)
    return np.array(found[::-1], np.uint32)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a log."""

    page_size: int
    salts: bytes
    sums: tuple[int, int]
    is_big_endian: bool
    is_mended: bool = False
    """True where one bit of it had to be turned to make its checksum right."""

    @classmethod
    def parse(cls, raw: bytes) -> Header | None:
        """Return the header; one with a flipped bit is mended, another one is None."""
        if len(raw) < HEADER_BYTES:
            return None
        found = cls._exact(raw, is_mended=False)
        if found is not None or not any(raw):
            return found
        for bit in range(8 * HEADER_BYTES):
            turned = bytearray(raw)
            turned[bit // 8] ^= 1 << (bit % 8)
            found = cls._exact(bytes(turned), is_mended=True)
            if found is not None:
                return found
        return None

    @classmethod
    def _exact(cls, raw: bytes, *, is_mended: bool) -> Header | None:
        magic, _, size, _, _, _, first, second = struct.unpack(">8I", raw)
        if magic & ~1 != _MAGIC or size < 512 or size & (size - 1):
            return None
        head = cls(size, raw[16:24], (first, second), bool(magic & 1), is_mended)
        return head if head.checksum(raw[:24], (0, 0)) == head.sums else None

    def summed(self, handle: int, frame: Frame) -> bytes | None:
        """Return what a frame's checksum covers; None where the file has become shorter."""
        raw = read_at(handle, FRAME_HEADER_BYTES + self.page_size, frame.at)
        if len(raw) < FRAME_HEADER_BYTES + self.page_size:
            return None
        return raw[:8] + raw[FRAME_HEADER_BYTES:]

    def checksum(self, data: bytes, before: tuple[int, int]) -> tuple[int, int]:
        """Return SQLite's checksum of some bytes, going on from another."""
        import numpy as np  # a run that reads no log does without

        words = np.frombuffer(data, ">u4" if self.is_big_endian else "<u4")
        factors, n = _factors(len(words)), len(words)
        first, second = (int((words * factors[i : i + n]).sum(dtype=np.uint64)) for i in (2, 1))
        second += int(factors[1]) * before[0] + int(factors[0]) * before[1]
        first += int(factors[2]) * before[0] + int(factors[1]) * before[1]
        return first & _WORD, second & _WORD

    def with_each_bit_turned(
        self, data: bytes, has: tuple[int, int], wanted: tuple[int, int]
    ) -> list[bytes]:
        """Return the bytes with each bit turned that makes their checksum right.

        Each word adds a multiple of itself to the checksum, by two Fibonacci numbers in a row that
        depend on its place alone; of a word's highest bits they repeat within a page.
        """
        found: list[bytes] = []
        first, second = (wanted[0] - has[0]) & _WORD, (wanted[1] - has[1]) & _WORD
        at, (lower, upper) = len(data) - 4, (0, 1)
        while at >= 0:
            word = int.from_bytes(data[at : at + 4], self._order)
            for bit in range(32):
                change = -(1 << bit) if word >> bit & 1 else 1 << bit
                if change * lower & _WORD == first and change * upper & _WORD == second:
                    turned = (word + change).to_bytes(4, self._order)
                    found.append(data[:at] + turned + data[at + 4 :])
            lower, upper = upper, (lower + upper) & _WORD
            at -= 4
        return found

    @property
    def _order(self) -> Literal["big", "little"]:
        return "big" if self.is_big_endian else "little"

    def ends_within(self, handle: int, frames: int) -> bool:
        """Tell whether a part of a frame follows so many whole ones."""
        rest = read_at(handle, 16, HEADER_BYTES + frames * (FRAME_HEADER_BYTES + self.page_size))
        return bool(rest) and rest[8:] == self.salts[: max(0, len(rest) - 8)]

    def frames(self, handle: int, start: int = 0) -> Iterator[Frame]:
        """Yield the whole frames in the file, from the one of that number on."""
        step = FRAME_HEADER_BYTES + self.page_size
        end = os.fstat(handle).st_size
        at = HEADER_BYTES + start * step
        while at + step <= end:
            raw = read_at(handle, FRAME_HEADER_BYTES, at)
            if len(raw) < FRAME_HEADER_BYTES:
                return
            page, size, first, second = struct.unpack(">II8xII", raw)
            # One salt is drawn anew with each log, so those of an older one are many bits apart.
            has_turned = _is_one_bit_apart(raw[8:16], self.salts)
            salts = self.salts if has_turned else raw[8:16]
            yield Frame(at, page, size, salts, (first, second), has_turned)
            at += step
