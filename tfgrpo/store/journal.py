"""`Journal`: the journal of one run, in `run.db` of the run's folder.

Append-only: calls (their intent with the worst case before they are sent, their result after),
replies, rollouts, groups, library versions, decisions. One process writes; it is told apart by a
lock. What was paid for is in the file before anybody acts on it, so the death of the process costs
at most the calls in flight.

Does not know: how calls are made (`journaled`), what a decision or a library means, config keys.
Idea: journal is the truth, everything else a fold of it (own; event sourcing).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tfgrpo.errors import ChangedSettingsError, StoreError
from tfgrpo.rollout import Rollout, RolloutGroup
from tfgrpo.runtime.canonical import canonical_json, jsonable
from tfgrpo.store import fold as folding
from tfgrpo.store.budget import Budget, Ledger
from tfgrpo.store.calls import CallJournal, ledger_amounts
from tfgrpo.store.checked_values import Values
from tfgrpo.store.codec import column_text, pack
from tfgrpo.store.config_diff import ResumeRule, difference, without_secrets
from tfgrpo.store.database import (
    DatabaseWriter,
    Statement,
    check_file,
    connect,
    create_file,
    refuse_links,
    refuse_network_disk,
    reserve_space,
    store_errors,
)
from tfgrpo.store.fold import RunState, SpendRow
from tfgrpo.store.groups import GroupJournal
from tfgrpo.store.lock import RunLock

log = logging.getLogger(__name__)

__all__ = ["FILE", "Journal"]

FILE = "run.db"
"""Name of the journal in a run's folder."""
_AS_IT_WAS = ResumeRule()
_FILES = (FILE, f"{FILE}-wal", f"{FILE}-shm", f"{FILE}.part", "lock", "reserve")


class Journal:
    """The journal of one run. Use `open`; close it, or use it as a context manager.

    Implements `protocols.Recorder`. Safe to use from several threads; one process at a time.
    """

    def __init__(
        self,
        folder: Path,
        writer: DatabaseWriter,
        lock: RunLock | None,
        ledger: Ledger,
        *,
        resumed: bool,
    ) -> None:
        self.folder = folder
        self.ledger = ledger
        """What this run has spent, earlier sessions included, under its budget."""
        self.is_resumed = resumed
        """True when the folder held a journal before it was opened."""
        self._writer = writer
        self._lock = lock
        self._session = 0
        self._can_write = lock is not None
        for row in folding.fold_spend(writer):
            for usage in (row.usage, row.booked):
                ledger.charge(**ledger_amounts(usage))
        self._earlier_s = folding.elapsed_seconds(writer)
        ledger.charge(seconds=self._earlier_s)
        if self._can_write:
            rows = writer.read(
                "SELECT coalesce(max(session), 0) FROM sessions WHERE typeof(session) = 'integer'"
            )
            self._session = int(rows[0][0]) + 1
            writer.commit_now([self._session_row("open")])
        self._values = Values(writer, can_write=self._can_write)
        self.calls = CallJournal(writer, self._values, self._session, self._elapsed_s)
        """The calls of the run, for `JournaledLM`."""
        self._groups = GroupJournal(writer, self._values, self.calls.hit_rows)

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        create: bool = False,
        config: Mapping[str, Any] | None = None,
        readonly: bool = False,
        budget: Budget | Ledger | None = None,
        durable: bool = False,
        resume: ResumeRule = _AS_IT_WAS,
    ) -> Journal:
        """Open a run's journal, or make one.

        Args:
            folder: the run's folder; made with access for its owner only.
            create: make the journal where there is none.
            config: the settings, as JSON. Kept with the journal, secrets removed; on a resume they
                must equal the kept ones, except for what `resume` allows; a run without a single
                reply or graded rollout takes any settings.
            readonly: look only; takes no lock, so it works beside a running process.
            budget: the limits of the ledger, or a fresh ledger; spend of earlier sessions counts
                against them.
            durable: survive the loss of power, at 150 µs instead of 25 µs a transaction.
            resume: how the settings may differ from the kept ones.

        Raises:
            StoreError: no journal, in use, damaged, read-only, disk full, network disk.
            ChangedSettingsError: the config differs from the kept one; the message shows how.
        """
        path = Path(folder)
        ledger = budget if isinstance(budget, Ledger) else Ledger(budget or Budget())
        if not (create or os.path.exists(path / FILE)):  # False where this user may not look
            raise StoreError(f"there is no run in {str(path)!r} (no {FILE}): check the folder")
        if readonly:
            return cls._open_readonly(path, ledger)
        store = cls._open_locked(path, ledger, durable=durable)
        try:
            changed = store._changes(config, resume)
            if changed:
                raise ChangedSettingsError(
                    f"run {str(path)!r} was made with other settings:\n  "
                    + "\n  ".join(changed)
                    + "\nuse them again, choose another folder, or fork the run (--fork)"
                )
            store._keep_config(config)
            return store
        except BaseException:
            store.close()
            raise

    @classmethod
    def _open_locked(cls, path: Path, ledger: Ledger, *, durable: bool) -> Journal:
        file = path / FILE
        with store_errors(path, "use the run folder"):
            if not path.exists():
                path.mkdir(parents=True, mode=0o700)
            refuse_network_disk(path)
            refuse_links(path, *_FILES)
            lock = RunLock(path / "lock")
        try:
            existed = file.exists()
            reserve = reserve_space(path)
            if not existed:
                create_file(file)
            with store_errors(file, "open"):
                connection = connect(file, durable=durable)
            try:
                check_file(connection, file, thorough=lock.was_killed)
                return cls(
                    path, DatabaseWriter(connection, file, reserve), lock, ledger, resumed=existed
                )
            except BaseException:
                connection.close()
                raise
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _open_readonly(cls, path: Path, ledger: Ledger) -> Journal:
        file = path / FILE
        with store_errors(file, "open"):
            refuse_links(path, *_FILES)
            connection = connect(file, readonly=True)
        try:
            check_file(connection, file, thorough=False)
            return cls(path, DatabaseWriter(connection, file), None, ledger, resumed=True)
        except BaseException:
            connection.close()
            raise

    def _elapsed_s(self) -> float:
        """Seconds of this session."""
        return max(0.0, self.ledger.elapsed_s - self._earlier_s)

    def _session_row(self, event: str) -> Statement:
        return (
            "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?)",
            (
                self._session,
                event,
                time.time(),
                self._elapsed_s(),
                os.getpid(),
                socket.gethostname(),
            ),
        )

    def _changes(self, config: Mapping[str, Any] | None, resume: ResumeRule) -> list[str]:
        kept = self.config
        if config is None or kept is None or not self._holds_work():
            return []
        asked = without_secrets(jsonable(config))
        return difference(kept, asked, resume.may_change, resume.defaults)

    def _holds_work(self) -> bool:
        """False where nothing came of the run so far: its settings may still be put right."""
        rows = self._writer.read(
            "SELECT EXISTS (SELECT 1 FROM completions) OR EXISTS (SELECT 1 FROM rollouts"
            " WHERE outcome IN ('graded', 'ungraded'))"
        )
        return bool(rows[0][0])

    def _keep_config(self, config: Mapping[str, Any] | None) -> None:
        if config is None:
            return
        asked = without_secrets(jsonable(config))
        if asked != self.config:
            row = ("INSERT INTO meta VALUES ('config', ?)", (canonical_json(asked),))
            self._writer.commit_now([row])

    @property
    def writer(self) -> DatabaseWriter:
        """The one way to write rows, for a room with tables of its own."""
        return self._writer

    @property
    def config(self) -> dict[str, Any] | None:
        """The settings of the run, secrets removed, or None where none were given."""
        rows = self._writer.read(
            "SELECT value FROM meta WHERE name = 'config' ORDER BY rowid DESC LIMIT 1"
        )
        if not rows:
            return None
        try:
            config = json.loads(rows[0][0])
        except (TypeError, ValueError) as exc:
            log.warning("%s: the kept settings are damaged (%s)", self.folder / FILE, exc)
            return None
        return config if isinstance(config, dict) else None

    @property
    def damaged(self) -> list[str]:
        """Rows that did not match their digest and were set aside, in words."""
        return self._values.damaged

    def find_rollout(self, rollout_id: str, verifier_id: str) -> Rollout | None:
        """Return a finished rollout as it was graded by that verifier, if there is one.

        A rollout that failed for the provider, the verifier or a cancellation is not finished, so
        that a resume tries it again; but in a closed group of a stage that others build on it is.
        """
        return self._groups.find_rollout(rollout_id, verifier_id)

    def record_rollout(self, rollout: Rollout, *, group_id: str, verifier_id: str) -> None:
        """Keep a finished rollout; equal to the newest record of it, it is kept once.

        It is in the file when the running turn of the event loop ends (at once without a loop), and
        before anything that is committed after it.

        Raises:
            ConfigError: a value in it has no JSON form.
            StoreError: it could not be written.
        """
        self._groups.record_rollout(rollout, group_id=group_id, verifier_id=verifier_id)

    def record_group(self, group: RolloutGroup) -> None:
        """Keep a closed group; rollouts of it that are not kept yet are kept with it.

        Raises:
            StoreError: it could not be written.
        """
        self._groups.record_group(group)

    def groups(self, stage: str | None = None) -> Iterator[RolloutGroup]:
        """Yield the closed groups in the order in which they were closed, the newest record of
        each; of one stage, or of all. Bodies are read one group at a time.

        Groups with a damaged row are left out and named in `damaged`.
        """
        return self._groups.groups(stage)

    def record_library(self, version_id: str, payload: Any) -> None:
        """Keep a library version; the same one twice in a row is kept once.

        Raises:
            ConfigError: the payload has no JSON form.
            StoreError: it could not be written.
        """
        body, mark = pack(payload, f"library {version_id!r}")
        name = column_text(version_id)
        newest = self._writer.read(
            "SELECT version_id, digest FROM libraries ORDER BY library DESC LIMIT 1"
        )
        if newest != [(name, mark)]:
            sql = "INSERT INTO libraries (version_id, at, body, digest) VALUES (?, ?, ?, ?)"
            self._writer.commit_now([(sql, (name, time.time(), body, mark))])

    def libraries(self) -> list[tuple[str, Any]]:
        """Return (version id, payload) of every recorded version, oldest first."""
        rows = self._writer.read(
            "SELECT library, version_id, body, digest FROM libraries ORDER BY library"
        )
        return self._values.named("libraries", rows)

    def record_decision(self, kind: str, payload: Any, key: str = "") -> None:
        """Keep a decision; one with a key is kept once as long as its payload stays equal.

        Raises:
            ConfigError: the payload has no JSON form.
            StoreError: it could not be written.
        """
        body, mark = pack(payload, f"decision {kind!r}")
        if key:
            newest = self._writer.read(
                "SELECT digest FROM decisions WHERE kind = ? AND key = ?"
                " ORDER BY decision DESC LIMIT 1",
                (column_text(kind), column_text(key)),
            )
            if newest == [(mark,)]:
                return
        sql = "INSERT INTO decisions (kind, key, at, body, digest) VALUES (?, ?, ?, ?, ?)"
        values = (column_text(kind), column_text(key), time.time(), body, mark)
        self._writer.commit_now([(sql, values)])

    def decisions(self, kind: str) -> list[tuple[str, Any]]:
        """Return (key, payload) of every decision of a kind, oldest first."""
        rows = self._writer.read(
            "SELECT decision, key, body, digest FROM decisions WHERE kind = ? ORDER BY decision",
            (column_text(kind),),
        )
        return self._values.named("decisions", rows)

    def spend(self) -> list[SpendRow]:
        """Return what was spent by stage and model, earlier sessions included."""
        self._flush_hits()
        return folding.fold_spend(self._writer)

    def state(self) -> RunState:
        """Return what the journal adds up to."""
        self._flush_hits()
        return folding.fold(self._writer, self._values)

    def _flush_hits(self) -> None:
        if self._can_write:
            self._writer.commit_now(self.calls.hit_rows())

    def take_over(self, source: Path, copies: Iterable[str]) -> None:
        """Run copying statements against another journal, attached as `old`, all or nothing."""
        self._writer.copy_from(source, copies)
        self.calls.expect_replies()
        self._groups.expect_rollouts()
        self.record_decision("fork", {"from": str(source.parent)}, key=str(source.parent))

    def close(self) -> None:
        """Write what is left and leave in order; may be called twice.

        Raises:
            StoreError: something could not be written; the lock is given back all the same.
        """
        try:
            if self._can_write:
                self._can_write = False
                self._writer.put([*self.calls.hit_rows(), self._session_row("close")])
            self._writer.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    def abandon(self) -> None:
        """Leave as a killed process does: nothing more is written, the lock's content stays."""
        self._can_write = False
        self._writer.abandon()
        if self._lock is not None:
            self._lock.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
