"""`Journal`: the journal of one run, in `run.db` of the run's folder or on a PostgreSQL server.

Append-only: calls (their intent with the worst case before they are sent, their result after),
replies, rollouts, groups, library versions, decisions. A file has one writer, told apart by a lock;
a server lets several write, each with a seat of its own. What was paid for is written before
anybody acts on it, so the death of a process costs at most its calls in flight.

Does not know: how calls are made (`journaled`), what a decision or a library means, config keys.
Idea: journal is the truth, everything else a fold of it (own; event sourcing).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tfgrpo.errors import BudgetError, ChangedSettingsError, StoreError
from tfgrpo.group_figures import GroupFigures
from tfgrpo.rollout import Rollout, RolloutGroup, Task
from tfgrpo.runtime.canonical import canonical_json, jsonable
from tfgrpo.store import fold as folding
from tfgrpo.store.budget import Budget, Ledger, Reservation
from tfgrpo.store.calls import CallJournal, ledger_amounts
from tfgrpo.store.checked_values import Values
from tfgrpo.store.codec import column_text, pack
from tfgrpo.store.config_diff import ResumeRule, difference, without_secrets
from tfgrpo.store.disk.database import DatabaseWriter
from tfgrpo.store.disk.listing import totals_row
from tfgrpo.store.disk.opening import open_file
from tfgrpo.store.finish import finish_row, read_finish
from tfgrpo.store.fold import RunState, SpendRow
from tfgrpo.store.groups import GroupJournal
from tfgrpo.store.postgres.address import is_address
from tfgrpo.store.postgres.database import PostgresDatabase
from tfgrpo.store.postgres.opening import (
    look_at_run,
    open_run,
    refuse_a_left_behind_file,
)
from tfgrpo.store.postgres.places import FILE, Place, place_of, point_to
from tfgrpo.store.postgres.seat import Terms
from tfgrpo.store.postgres.tranches import Refusal, SharedLedger
from tfgrpo.store.rows import OpenRun, Statement

log = logging.getLogger(__name__)

__all__ = ["FILE", "Journal", "OpenOptions"]

Role = Literal["learner", "writer"]
_LARGE = 20_000
"""Rollouts from which a run keeps what it adds up to."""
_ASK_AGAIN_S = 0.25
"""How long to wait for what other writers may give back, before asking again."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How a journal is opened, where it is not as usual."""

    store: str = ""
    """The address of the database that keeps the folder's run; empty takes the one that the folder
    names, else the folder itself."""
    durable: bool = False
    """Survive the loss of power, at 150 µs instead of 25 µs a transaction; a server's always
    does."""
    resume: ResumeRule = field(default_factory=ResumeRule)
    """How the settings may differ from the kept ones."""
    terms: Terms | None = None
    """Of a writer's seat on a server."""


_DEFAULTS = OpenOptions()


class Journal:
    """The journal of one run. Use `open`; close it, or use it as a context manager.

    Implements `protocols.Recorder`. Safe to use from several threads; on a server by several
    processes at a time.
    """

    def __init__(self, place: Place, opened: OpenRun, *, can_write: bool) -> None:
        writer, ledger, self.is_resumed, self._lock, damage, self._is_sound = opened
        self.place = place
        """Where it is."""
        self.folder = place.folder
        """Where the run writes for people."""
        self._ledger = ledger
        self._earlier_s: float | None = None
        self._writer = writer
        self._can_write = can_write
        if can_write:
            self._charge_earlier()
        if isinstance(ledger, SharedLedger) and isinstance(writer, PostgresDatabase):
            ledger.start(writer.draw)
        if can_write:
            writer.commit_now([self._session_row("open")])
        self._values = Values(writer, can_write=self._can_write, damage=damage)
        self.calls = CallJournal(writer, self._values, self._elapsed_s)
        """The calls of the run, for `JournaledLM`."""
        self._groups = GroupJournal(writer, self._values, self.calls.hit_rows)

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        role: Role = "learner",
        create: bool = False,
        config: Mapping[str, Any] | None = None,
        readonly: bool = False,
        budget: Budget | Ledger | None = None,
        options: OpenOptions = _DEFAULTS,
    ) -> Journal:
        """Open a run's journal, or make one.

        Args:
            folder: the run's folder, made with access for its owner only; or the address of a run
                on a server, `postgresql://…#NAME`.
            role: on a server, `writer` stands beside others; a run has one `learner`.
            create: make the journal where there is none.
            config: the settings, as JSON. Kept with the journal, secrets removed; on a resume they
                must equal the kept ones, except for what `options.resume` allows; a run without a
                single reply or graded rollout takes any settings.
            readonly: look only; takes no lock, so it works beside a running process.
            budget: the limits of the ledger, or a fresh ledger; spend of earlier sessions counts
                against them. On a server the limits of the run as a whole.
            options: what few callers change.

        Raises:
            StoreError: no journal, in use, damaged, read-only, disk full, network disk.
            ChangedSettingsError: the config differs from the kept one; the message shows how.
        """
        place = place_of(folder, options.store)
        limits = budget.budget if isinstance(budget, Ledger) else budget
        clock = budget.clock if isinstance(budget, Ledger) else time.monotonic
        if place.address is None:
            ledger = budget if isinstance(budget, Ledger) else Ledger(limits or Budget())
            opened = open_file(
                place.folder, ledger, create=create, readonly=readonly, durable=options.durable
            )
        elif readonly:
            opened = look_at_run(place.address, budget=limits, clock=clock)
        else:
            if options.store:
                refuse_a_left_behind_file(place, create=create)
            opened = open_run(
                place.address,
                create=create,
                role=role,
                budget=limits,
                terms=options.terms,
                clock=clock,
            )
        try:
            journal = cls(place, opened, can_write=not readonly)
        except BaseException:
            opened.database.abandon()
            if opened.lock is not None:
                opened.lock.release()
            raise
        if readonly:
            if budget is not None:  # it is the caller's, who may look at it without the journal
                journal._charge_earlier()
            return journal
        try:
            changed = journal._changes(config, options.resume)
            if changed:
                raise ChangedSettingsError(
                    f"run {str(place)!r} was made with other settings:\n  "
                    + "\n  ".join(changed)
                    + "\nuse them again, choose another folder, or fork the run (--fork)"
                )
            journal._keep_config(config)
            if not is_address(folder):
                point_to(place)
            return journal
        except BaseException:
            journal.close()
            raise

    @property
    def ledger(self) -> Ledger:
        """What this run has spent, earlier sessions included, under its budget; who only looks has
        it added up when it is asked for."""
        self._charge_earlier()
        return self._ledger

    def _charge_earlier(self) -> float:
        """Charge the ledger, once, with what earlier sessions spent; return their seconds."""
        if self._earlier_s is None:
            for row in folding.fold_spend(self._writer):
                for usage in (row.usage, row.booked):
                    self._ledger.charge(**ledger_amounts(usage))
            self._earlier_s = folding.elapsed_seconds(self._writer)
            self._ledger.charge(seconds=self._earlier_s)
        return self._earlier_s

    def _elapsed_s(self) -> float:
        """Seconds of this session."""
        earlier_s = self._charge_earlier()
        return max(0.0, self._ledger.elapsed_s - earlier_s)

    def _session_row(self, event: str) -> Statement:
        return (
            "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?)",
            (
                self._writer.session,
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
            row = ("INSERT INTO meta VALUES (?, ?)", ("config", canonical_json(asked)))
            self._writer.commit_now([row])

    @property
    def writer(self) -> DatabaseWriter:
        """The one way to write rows, for a room with tables of its own.

        Raises:
            StoreError: the journal is on a server, which has the run's tables only.
        """
        if not isinstance(self._writer, DatabaseWriter):
            raise StoreError(
                f"{str(self.place)!r} is on a server: only a journal in a file has other tables"
            )
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
            log.warning("%s: the kept settings are damaged (%s)", self._writer.name, exc)
            return None
        return config if isinstance(config, dict) else None

    @property
    def damaged(self) -> list[str]:
        """Rows that did not match their digest and were set aside, in words."""
        return self._values.damaged

    async def reserve(self, **amounts: float) -> Reservation:
        """Hold the worst case of a call; wait while only worst cases of calls in flight stand in
        the way, or what other writers of the run hold.

        Raises:
            BudgetError: a limit would be passed, also when the calls in flight end.
            StoreError: the server cannot be reached.
        """
        ledger, calls = self.ledger, self.calls
        while True:
            try:
                if not isinstance(ledger, SharedLedger):
                    return ledger.reserve(**amounts)
                return ledger.reserve_here(**amounts)
            except BudgetError as exc:
                if isinstance(ledger, SharedLedger):
                    drawing = ledger.draw_soon(exc, amounts)
                    if drawing is not None:
                        refusal = await asyncio.wrap_future(drawing)
                        if refusal is not None:
                            await self._wait_for_room(refusal)
                        continue
                if not (calls.any_in_flight and ledger.could_fit(**amounts)):
                    raise
            await calls.wait_for_an_end()

    async def _wait_for_room(self, refusal: Refusal) -> None:
        """Wait until calls end here, or others may have given back what they hold.

        Raises:
            BudgetError: neither can make room.
        """
        if refusal.could_fit and self.calls.any_in_flight:
            await self.calls.wait_for_an_end(_ASK_AGAIN_S)
        elif refusal.could_fit and refusal.held_by_others:
            await asyncio.sleep(_ASK_AGAIN_S)
        else:
            raise refusal.error()

    def lease_group(self, group_id: str, verifier_id: str) -> bool:
        """Return True where this process is the one to make a group: always in a file; on a server
        where no other writer that lives makes it. Held until the journal is closed.

        Raises:
            StoreError: the server cannot be reached.
        """
        return self._writer.lease_group(group_id, verifier_id)

    def find_rollout(self, rollout_id: str, verifier_id: str) -> Rollout | None:
        """Return a finished rollout as it was graded by that verifier, if there is one.

        A rollout that failed for the provider, the verifier or a cancellation is not finished, so
        that a resume tries it again; but in a closed group of a stage that others build on it is.
        """
        return self._groups.find_rollout(rollout_id, verifier_id)

    def find_rollouts(self, rollout_ids: Sequence[str], verifier_id: str) -> dict[str, Rollout]:
        """Return the finished rollouts among several, by id; one reading for all of them."""
        return self._groups.find_rollouts(rollout_ids, verifier_id)

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

    def figures(self, stage: str | None = None) -> Iterator[GroupFigures]:
        """Yield the figures of the groups that `groups` yields, in the same order; no text is
        read, so that a run of any size is added up in moments."""
        return self._groups.figures(stage)

    def tasks(self, *stages: str) -> Iterator[Task]:
        """Yield the tasks of the groups of some stages, each once."""
        return self._groups.tasks(stages)

    def groups_named(self, group_ids: Sequence[str]) -> list[RolloutGroup]:
        """Return closed groups by their ids; unknown and damaged ones are left out."""
        return self._groups.groups_named(group_ids)

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

    def keep_finish(self, key: str, payload: Any) -> None:
        """Keep what the run came to, for who asks with the same key while nothing is added; on a
        server, whose rows nobody compares with checksums, nothing is kept.

        Raises:
            ConfigError: the payload has no JSON form.
            StoreError: it could not be written.
        """
        if self._writer.is_shared:
            return
        self._writer.flush()
        row = finish_row(self._writer, key, payload)
        if row is not None:
            self._writer.commit_now([row])

    def finish(self, key: str) -> Any | None:
        """Return what the run came to; None where it was kept under another key, anything was
        added since, or anything is damaged or could not be checked as it was opened: then it is to
        be made again, which finds and mends what is missing."""
        if not self._is_sound or self.damaged:
            return None
        self._writer.flush()
        return read_finish(self._writer, key)

    def change_mark(self) -> str:
        """Return a text that changes when calls, rollouts, groups or decisions are added."""
        return folding.newest_numbers(self._writer)

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

    def _totals(self) -> list[Statement]:
        """Return the row that keeps what a large run adds up to, so that it is listed at once."""
        if not isinstance(self._writer, DatabaseWriter):
            return []
        try:
            newest = self._writer.read("SELECT max(rollout) FROM rollouts")[0][0]
            is_large = isinstance(newest, int) and newest >= _LARGE
            return [totals_row(self._writer, self.state())] if is_large else []
        except StoreError as exc:  # what is wrong is found and told when it is opened again
            log.debug("%s: no totals are kept: %s", self._writer.name, exc)
            return []

    def take_over(self, source: Place, copies: Iterable[str]) -> None:
        """Run copying statements against another journal of the same kind, which they call `old`,
        all or nothing."""
        self._writer.copy_from(source.address or source.folder / FILE, copies)
        self.calls.expect_replies()
        self._groups.expect_rollouts()
        self.record_decision("fork", {"from": str(source)}, key=str(source))

    def close(self) -> None:
        """Write what is left and leave in order; may be called twice.

        Raises:
            StoreError: something could not be written; the lock is given back all the same.
        """
        try:
            if self._can_write:
                totals = self._totals()
                self._can_write = False
                self._writer.put([*self.calls.hit_rows(), *totals, self._session_row("close")])
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
