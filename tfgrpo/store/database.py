"""The SQLite file of a run: its tables, how it is opened, and the one way to write to it.

Every table is append-only. Writes are grouped: whatever asyncio tasks hand over in one turn of the
event loop is one transaction, and `commit` returns when it is in the file. WAL with
`synchronous=NORMAL` survives the death of the process at any moment; `durable=True` (`FULL`) also
the loss of power. Transactions run in the thread that writes: one takes some 25 µs, less than
handing it to another thread, whose every statement would wait for the interpreter's lock
(`tests/benchmarks/runs/journal.py` measures both). The slow part, moving the log into the file,
has a thread of its own.

Does not know what the rows mean. Source: SQLite's documentation on WAL; own.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tfgrpo.errors import StoreError

log = logging.getLogger(__name__)

APPLICATION_ID = 0x54464752
"""`TFGR`: marks a file as a run's journal."""
VERSION = 1
GATEWAY_VERSION = 2
"""Version of a file that has a gateway's tables beside a run's."""
BATCH_S = 0.02
"""Longest time in seconds that a row which nobody waits for stays out of the file."""
CHECKPOINT_EVERY = 4000
"""Rows between two moves of the log into the file."""
LOG_BYTES = 32_000_000
"""Size of the log from which it is emptied; at `MOST_LOG_BYTES` the writer waits for that."""
MOST_LOG_BYTES = 160_000_000

Statement = tuple[str, tuple[Any, ...]]


class Claim(NamedTuple):
    """Which call may be sent."""

    call: int | None
    """Its number; None where other writers ask for all of its draws, or have their replies."""
    keys: Collection[bytes] | None = None
    """The draws that are its own; None is all."""


SCHEMA = """
CREATE TABLE meta (name TEXT NOT NULL, value TEXT NOT NULL);
CREATE TABLE sessions (
  session INTEGER NOT NULL, event TEXT NOT NULL, at REAL NOT NULL, elapsed_s REAL NOT NULL,
  pid INTEGER NOT NULL, host TEXT NOT NULL);
CREATE TABLE calls (
  call INTEGER PRIMARY KEY, session INTEGER NOT NULL, at REAL NOT NULL, key BLOB NOT NULL,
  stage TEXT NOT NULL, model TEXT NOT NULL, rollout_id TEXT NOT NULL, n INTEGER NOT NULL,
  cost_usd REAL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL);
CREATE TABLE results (
  call INTEGER PRIMARY KEY REFERENCES calls DEFERRABLE INITIALLY DEFERRED,
  elapsed_s REAL NOT NULL, duration_s REAL NOT NULL,
  kind TEXT NOT NULL, n INTEGER NOT NULL, calls INTEGER NOT NULL,
  uncached INTEGER NOT NULL, cache_read INTEGER NOT NULL, cache_write INTEGER NOT NULL,
  text INTEGER NOT NULL, reasoning INTEGER NOT NULL, cost_usd REAL, estimated INTEGER NOT NULL,
  model TEXT NOT NULL, failure TEXT NOT NULL, error TEXT NOT NULL);
CREATE TABLE completions (
  completion INTEGER PRIMARY KEY, key BLOB NOT NULL, call INTEGER, finish TEXT NOT NULL,
  body NOT NULL, digest BLOB NOT NULL);
CREATE INDEX completions_by_key ON completions (key);
CREATE TABLE hits (stage TEXT NOT NULL, model TEXT NOT NULL, n INTEGER NOT NULL);
CREATE TABLE rollouts (
  rollout INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, verifier_id TEXT NOT NULL,
  group_id TEXT NOT NULL, task_id TEXT NOT NULL, outcome TEXT NOT NULL, reward REAL,
  truncated INTEGER NOT NULL, body NOT NULL, digest BLOB NOT NULL);
CREATE INDEX rollouts_by_id ON rollouts (rollout_id);
CREATE TABLE texts (digest BLOB PRIMARY KEY, body NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
  grp INTEGER PRIMARY KEY, group_id TEXT NOT NULL, stage TEXT NOT NULL, task_id TEXT NOT NULL,
  policy_id TEXT NOT NULL, verifier_id TEXT NOT NULL, task BLOB NOT NULL,
  context BLOB NOT NULL, body NOT NULL, digest BLOB NOT NULL);
CREATE INDEX groups_by_id ON groups (group_id);
CREATE TABLE libraries (
  library INTEGER PRIMARY KEY, version_id TEXT NOT NULL, at REAL NOT NULL,
  body NOT NULL, digest BLOB NOT NULL);
CREATE TABLE decisions (
  decision INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, at REAL NOT NULL,
  body NOT NULL, digest BLOB NOT NULL);
CREATE INDEX decisions_by_kind ON decisions (kind, key);
CREATE TABLE set_aside (tbl TEXT NOT NULL, row INTEGER NOT NULL, why TEXT NOT NULL);
"""

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


def connect(path: Path, *, readonly: bool = False, durable: bool = False) -> sqlite3.Connection:
    """Open a journal file with the settings that every connection of ours has."""
    if readonly:
        immutable = "" if path.with_name(path.name + "-wal").exists() else "&immutable=1"
        uri = f"{path.resolve().as_uri()}?mode=ro{immutable}"
    else:
        uri = f"{path.resolve().as_uri()}?mode=rw"
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    connection.execute("PRAGMA busy_timeout=10000")
    if not readonly:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA wal_autocheckpoint=0")
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


_BAD_ROW = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,
    OverflowError,
    TypeError,
    ValueError,
)
"""What a row does that no journal can hold: a number beyond 64 bits, a type that SQLite has not, a
reference to a row that was set aside."""
_NOT_THE_DISK = (*_BAD_ROW, sqlite3.OperationalError)


def statement_words(statement: Statement, exc: Exception) -> str:
    """Return a statement that failed in words."""
    sql, values = statement
    shown = ", ".join(repr(v)[:40] for v in values[:4])
    return f"{' '.join(sql.split())[:60]} ({shown}, …): {type(exc).__name__}: {exc}"


def aside_row(statement: Statement, words: str) -> Statement:
    """Return the row that names one which no table can hold."""
    table = statement[0].split("INTO")[-1].split()
    why = "could not be written: " + words
    return (
        "INSERT INTO set_aside VALUES (?, ?, ?)",
        (table[0].partition("(")[0] if table else "", 0, why.encode("utf-8", "replace").decode()),
    )


def _is_full(exc: Exception) -> bool:
    name = getattr(exc, "sqlite_errorname", "") or ""
    return name.startswith(("SQLITE_FULL", "SQLITE_IOERR"))


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


NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags of every file that is opened in a run's folder: a link there is never followed."""


def refuse_links(folder: Path, *names: str) -> None:
    """Refuse a run folder whose files are links, or that belongs to somebody else.

    Raises:
        StoreError: naming the link, or the owner.
    """
    for name in names:
        if (folder / name).is_symlink():
            raise StoreError(
                f"{str(folder / name)!r} is a link; a run's files are never links. Remove it, or "
                "choose another folder"
            )
    if hasattr(os, "getuid") and os.getuid() and folder.stat().st_uid not in (os.getuid(), 0):
        raise StoreError(
            f"run folder {str(folder)!r} belongs to another user (uid {folder.stat().st_uid}): "
            "choose a folder of your own"
        )


class DatabaseWriter:
    """The one way to write to a journal in a file: a `RowStore`; safe from any thread.

    Rows are written in the order in which they were handed over, also across the three methods.
    Rows whose transaction failed are kept and tried again ahead of the next ones, so that freed
    disk space saves results that were paid for.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path, reserve: Path | None = None
    ) -> None:
        self.connection = connection
        self.path = path
        self.session = 0
        """The number of the writing session."""
        self.rows = 0
        """Rows committed by this writer."""
        self.failure: StoreError | None = None
        """Why the newest write failed; None after one that did not."""
        self.is_full = False
        """True once the reserved space had to be given up: nothing new may be paid for."""
        self._reserve = reserve
        self._lock = threading.RLock()
        self._queue: list[Statement] = []
        """Rows handed over and not written, in order."""
        self._waiting: list[asyncio.Future[None]] = []
        self._flush_due_in: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._checkpoint_at = CHECKPOINT_EVERY
        self._log = path.with_name(path.name + "-wal")
        self._empty_again_at = 0
        self._has_work = threading.Event()
        self._keeper: threading.Thread | None = None
        self._next_call = 0

    is_shared = False
    """A file has one writer."""

    @property
    def name(self) -> str:
        """How messages call it."""
        return str(self.path)

    async def start_call(
        self,
        intent: Callable[[int, int], Statement],
        unsent: Callable[[int], list[Statement]],
        keys: Sequence[bytes] = (),
    ) -> Claim:
        """Write a call's intent; see `RowStore.start_call`. With one writer every draw is its own.

        Raises:
            StoreError: it could not be written, so the call must not be sent.
        """
        if not self._next_call:
            self._next_call = int(self.read("SELECT coalesce(max(call), 0) FROM calls")[0][0]) + 1
        call = self._next_call
        self._next_call += 1
        row = intent(call, self.session)
        try:
            await self.commit([row])
        except StoreError:
            self.drop([row])
            raise
        except asyncio.CancelledError:
            self.put(unsent(call))
            raise
        return Claim(call)

    def lease_group(self, group_id: str, verifier_id: str) -> bool:
        """Return True: with one writer every group is its own."""
        return True

    def put(self, statements: Sequence[Statement]) -> None:
        """Hand rows over without waiting; they are in the file within `BATCH_S`."""
        with self._lock:
            self._queue.extend(statements)
        self._wake_keeper()

    def put_this_turn(self, statements: Sequence[Statement]) -> None:
        """Hand rows over without waiting; they are in the file when this turn of the running event
        loop ends, or at once where no loop runs.

        Whatever is handed over later is written later, so nothing that anybody commits on the
        strength of these rows can be in the file without them.

        Raises:
            StoreError: without a loop, they could not be written.
        """
        loop = _running_loop()
        if loop is None:
            self.commit_now(statements)
            return
        with self._lock:
            self._queue.extend(statements)
            self._flush_this_turn(loop)

    async def commit(self, statements: Sequence[Statement]) -> None:
        """Hand rows over and return when they are in the file.

        All tasks that commit in the same turn of the event loop share one transaction.

        Raises:
            StoreError: they could not be written; they stay handed over.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._queue.extend(statements)
            self._waiting.append(done)
            self._flush_this_turn(loop)
        await done

    def _flush_this_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._flush_due_in is not loop:
            self._flush_due_in = loop
            loop.call_soon(self._on_turn)

    def commit_now(self, statements: Sequence[Statement]) -> None:
        """Write rows, and all that was handed over before them, in the calling thread.

        Raises:
            StoreError: they could not be written; they stay handed over.
        """
        with self._lock:
            self._queue.extend(statements)
            self.flush()

    def flush(self) -> None:
        """Write everything that was handed over."""
        with self._lock:
            if not self._queue:
                self._resolve(None)
                return
            batch, self._queue = self._queue, []
            try:
                self._save(batch)
            except StoreError as exc:
                self._queue = batch + self._queue
                self.failure = exc
                self._resolve(exc)
                raise
            self.failure = None
            self._resolve(None)
            size = self._log_bytes()
            if size >= max(MOST_LOG_BYTES, self._empty_again_at):
                self._empty_log()
            elif self.rows >= self._checkpoint_at or size >= LOG_BYTES:
                self._wake_keeper()

    def _log_bytes(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def _empty_log(self) -> None:
        """Move what is left of the log into the file and give its space back.

        While rows are written a log only grows: it begins anew only where all of it has been moved,
        which here waits for nobody. A reader that holds it open is tried again later.
        """
        with self._lock:
            if self._is_closed:
                return
            try:
                self.connection.execute("PRAGMA busy_timeout=0")
                self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.Error as exc:
                log.debug("%s: the log stays as it is: %s", self.path, exc)
            finally:
                self.connection.execute("PRAGMA busy_timeout=10000")
            size = self._log_bytes()
            self._empty_again_at = 0 if size < LOG_BYTES else size + LOG_BYTES

    def _save(self, batch: list[Statement]) -> None:
        """Write a batch; rows that no journal can hold are set aside and named, never the rest.

        Raises:
            StoreError: the disk or the file is at fault; nothing of the batch is written.
        """
        with store_errors(self.path, "write to"):
            try:
                self._write(batch)
                return
            except _NOT_THE_DISK as exc:
                if isinstance(exc, sqlite3.OperationalError):
                    if not self._make_room(exc):
                        raise
                    self._write(batch)
                    return
            for statement in batch:
                try:
                    self._write([statement])
                except _BAD_ROW as exc:
                    words = statement_words(statement, exc)
                    self._write([aside_row(statement, words)])
                    log.error("%s: a row cannot be kept and is set aside: %s", self.path, words)

    def _make_room(self, exc: Exception) -> bool:
        """Give up the reserved space where the disk is full; False where there is none."""
        reserve = self._reserve
        if reserve is None or not _is_full(exc):
            return False
        self._reserve = None
        self.is_full = True
        reserve.unlink(missing_ok=True)
        log.error(
            "%s: the disk is full; what was paid for is kept, nothing new is asked", self.path
        )
        return True

    def drop(self, statements: Sequence[Statement]) -> None:
        """Take rows back that could not be written yet."""
        with self._lock:
            gone = {id(s) for s in statements}
            self._queue = [s for s in self._queue if id(s) not in gone]

    def read(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query over what is in the file."""
        with self._lock, store_errors(self.path, "read"):
            try:
                return self.connection.execute(sql, values).fetchall()
            except sqlite3.OperationalError as exc:
                if "decode to UTF-8" not in str(exc):
                    raise
            # A flipped bit in a text: read on, its digest tells which row it is.
            self.connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
            return self.connection.execute(sql, values).fetchall()

    def copy_from(self, source: Path, statements: Iterable[str]) -> None:
        """Run copying statements against another journal, attached as `old`, all or nothing."""
        with self._lock, store_errors(self.path, "write to"):
            self.flush()
            self.connection.execute("ATTACH DATABASE ? AS old", (str(source),))
            try:
                self._write([(sql, ()) for sql in statements])
            finally:
                self.connection.execute("DETACH DATABASE old")

    def define(self, statements: Iterable[str]) -> None:
        """Add tables or indices, all or nothing.

        Raises:
            StoreError: they could not be added.
        """
        with self._lock, store_errors(self.path, "write to"):
            self.flush()
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                for statement in statements:
                    self.connection.execute(statement)
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Write what is left, move the log into the file and close it."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._has_work.set()
        if self._keeper is not None:
            self._keeper.join()
        with self._lock:
            try:
                self.flush()
            finally:
                if self._reserve is not None:
                    self._reserve.unlink(missing_ok=True)
                with store_errors(self.path, "close"):
                    self.connection.close()

    def abandon(self) -> None:
        """Forget what was not written and close the file, as a killed process does."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            self.connection.close()

    def _write(self, batch: Sequence[Statement]) -> None:
        execute = self.connection.execute
        by_sql: dict[str, list[tuple[Any, ...]]] = {}
        for sql, values in batch:
            by_sql.setdefault(sql, []).append(values)
        execute("BEGIN IMMEDIATE")
        try:
            for sql, rows in by_sql.items():  # each table in the order handed over
                self.connection.executemany(sql, rows)
            execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                execute("ROLLBACK")
            raise
        self.rows += len(batch)

    def _on_turn(self) -> None:
        with self._lock:
            self._flush_due_in = None
            self._try_flush()

    def _wake_keeper(self) -> None:
        if self._keeper is None and not self._is_closed:
            with self._lock:
                self._keeper = threading.Thread(target=self._keep, daemon=True, name="journal")
                self._keeper.start()
        self._has_work.set()

    def _keep(self) -> None:
        """Write what nobody waits for, and move the log into the file when it has grown."""
        while not self._is_closed:
            self._has_work.wait()
            self._has_work.clear()
            if self._is_closed:
                return
            time.sleep(BATCH_S)
            with self._lock:
                if self._is_closed:
                    return
                self._try_flush()
            if self.rows >= self._checkpoint_at or self._log_bytes() >= LOG_BYTES:
                self._checkpoint_at = self.rows + CHECKPOINT_EVERY
                _checkpoint(self.path)  # most of it, while others write on
                if self._log_bytes() >= max(LOG_BYTES, self._empty_again_at):
                    self._empty_log()

    def _try_flush(self) -> None:
        try:
            self.flush()
        except StoreError:
            # Whoever waits has it; rows without a waiter are tried again, `close` raises.
            return

    def _resolve(self, error: StoreError | None) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        here = _running_loop()
        for done in waiting:
            loop = done.get_loop()
            if loop is here and error is None:
                if not done.done():
                    done.set_result(None)
            elif loop is here:
                _finish(done, error)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(_finish, done, error)


def _checkpoint(path: Path) -> None:
    """Move the log into the file; a failure leaves the log as it is, which loses nothing."""
    try:
        connection = connect(path)
        try:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        finally:
            connection.close()
    except sqlite3.Error:
        return


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _finish(done: asyncio.Future[None], error: StoreError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
