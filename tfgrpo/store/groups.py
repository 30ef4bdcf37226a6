"""The rollouts and groups of a run.

A group's row holds the ids of its rollouts; its task and context are kept once, however many groups
share them. Does not know who made a rollout or why. Source: own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfgrpo.context import Context
from tfgrpo.group_figures import GroupFigures, OneOfEach
from tfgrpo.rollout import Rollout, RolloutGroup, Task
from tfgrpo.runtime.canonical import jsonable
from tfgrpo.runtime.redaction import redact_known
from tfgrpo.store.checked_values import DAMAGED, Values
from tfgrpo.store.codec import column_text, form_of, from_column, pack
from tfgrpo.store.rows import RowStore, Statement

__all__ = ["NOTHING_BUILDS_ON", "UNFINISHED", "GroupJournal"]

UNFINISHED = frozenset({"provider_failed", "cancelled", "verifier_failed"})
"""Outcomes that a resume tries again, unless their group is closed."""
NOTHING_BUILDS_ON = frozenset({"eval", "test"})
"""Stages whose closed groups are tried again, too: they are read and never built on."""

_IDS_A_QUERY = 200


_AT_ONCE = 500
"""Rows of a reading of all groups."""


@dataclass(slots=True)
class _Closings:
    """Which groups are closed."""

    groups: set[str] = field(default_factory=set)
    """Those closed under any verifier."""
    final: set[tuple[str, str]] = field(default_factory=set)
    """Closed groups that others may have built on, with their verifier."""

    def add(self, group: str, verifier: str, stage: str) -> None:
        self.groups.add(group)
        if from_column(stage) not in NOTHING_BUILDS_ON:
            self.final.add((group, verifier))


class GroupJournal:
    """Writes and finds rollouts and groups.

    Args:
        extra_rows: further rows to write in the same transaction, taken when it is made.
    """

    def __init__(
        self, writer: RowStore, values: Values, extra_rows: Callable[[], list[Statement]]
    ) -> None:
        self._writer = writer
        self._values = values
        self._extra_rows = extra_rows
        self._lock = threading.Lock()
        self._closings: _Closings | None = None
        self._fresh: dict[tuple[str, str, str], Rollout] = {}
        """Rollouts of open groups as this session recorded them."""
        self._has_rollouts = writer.is_shared or bool(writer.read("SELECT 1 FROM rollouts LIMIT 1"))
        """False spares looking for what cannot be there: none recorded before this session, and
        nobody else records any."""
        self._absent: set[tuple[str, str]] = set()
        """Rollouts that were looked for and not there."""

    def _closed(self) -> _Closings:
        """What is closed so far; read once it is asked for, which who only looks never does."""
        with self._lock:
            if self._closings is None:
                self._closings = _Closings()
                for row in self._writer.read("SELECT group_id, verifier_id, stage FROM groups"):
                    self._closings.add(*row)
            return self._closings

    def expect_rollouts(self) -> None:
        """Tell that rollouts were written by another way."""
        self._has_rollouts = True

    def find_rollout(self, rollout_id: str, verifier_id: str) -> Rollout | None:
        """Return a finished rollout as it was graded by that verifier, if there is one.

        A rollout that failed for the provider, the verifier or a cancellation is not finished, so
        that a resume tries it again; but in a closed group of a stage that others build on it is.
        """
        found = self._newest_rollout(rollout_id, verifier_id)
        if found is None:
            self._absent.add((rollout_id, verifier_id))
            return None
        self._absent.discard((rollout_id, verifier_id))
        rollout, group_id = found
        if rollout.outcome in UNFINISHED and not self._is_final(group_id, verifier_id):
            return None
        return rollout

    def _is_final(self, group: str, verifier_id: str) -> bool:
        verifier = column_text(verifier_id)
        if self._writer.is_shared:  # others close groups, too
            rows = self._writer.read(
                "SELECT stage FROM groups WHERE group_id = ? AND verifier_id = ?", (group, verifier)
            )
            for (stage,) in rows:
                self._closed().add(group, verifier, stage)
        return (group, verifier) in self._closed().final

    def find_rollouts(self, rollout_ids: Sequence[str], verifier_id: str) -> dict[str, Rollout]:
        """Return the finished rollouts among several, as `find_rollout` would one by one."""
        rows: dict[str, list[tuple[Any, ...]]] = {}
        if self._has_rollouts or self._fresh or self._closed().groups:
            self._writer.flush()
            rows = self._rows_of(rollout_ids)
        found: dict[str, Rollout] = {}
        for name in rollout_ids:
            newest = self._newest_sound(rows.get(column_text(name), ()), verifier_id, None)
            if newest is None:
                self._absent.add((name, verifier_id))
                continue
            self._absent.discard((name, verifier_id))
            rollout, group = newest
            if rollout.outcome not in UNFINISHED or self._is_final(group, verifier_id):
                found[name] = rollout
                # It is recorded as it is: its group need not look for it again.
                self._fresh[column_text(name), column_text(verifier_id), group] = rollout
        return found

    def _newest_rollout(
        self, rollout_id: str, verifier_id: str | None, group_id: str | None = None
    ) -> tuple[Rollout, str] | None:
        if not (self._has_rollouts or self._fresh or self._closed().groups):
            return None
        self._writer.flush()
        rows = self._rows_of([rollout_id]).get(column_text(rollout_id), ())
        return self._newest_sound(rows, verifier_id, group_id)

    def _rows_of(self, rollout_ids: Sequence[str]) -> dict[str, list[tuple[Any, ...]]]:
        """Return the rows of rollouts by id, newest first."""
        found: dict[str, list[tuple[Any, ...]]] = {}
        for start in range(0, len(rollout_ids), _IDS_A_QUERY):
            names = tuple(map(column_text, rollout_ids[start : start + _IDS_A_QUERY]))
            for name, *row in self._writer.read(
                "SELECT rollout_id, rollout, verifier_id, group_id, body, digest FROM rollouts"
                f" WHERE rollout_id IN ({', '.join('?' * len(names))}) ORDER BY rollout DESC",
                names,
            ):
                found.setdefault(name, []).append(tuple(row))
        return found

    def _newest_sound(
        self, rows: Iterable[tuple[Any, ...]], verifier_id: str | None, group_id: str | None
    ) -> tuple[Rollout, str] | None:
        for row, its_verifier, its_group, body, mark in rows:
            if verifier_id is not None and its_verifier != column_text(verifier_id):
                continue
            if group_id is not None and its_group != group_id:
                continue
            value = self._values.get("rollouts", row, body, mark)
            if value is not DAMAGED:
                return Rollout.from_dict(value), its_group
        return None

    def record_rollout(self, rollout: Rollout, *, group_id: str, verifier_id: str) -> None:
        """See `Journal.record_rollout`."""
        row = self._rollout_row(rollout, group_id, verifier_id)
        if row is not None:
            self._writer.put_this_turn([*self._extra_rows(), row])

    def _rollout_row(self, rollout: Rollout, group_id: str, verifier_id: str) -> Statement | None:
        """Return the row to write, or None where an equal one is the newest."""
        name, group, verifier = map(column_text, (rollout.rollout_id, group_id, verifier_id))
        if self._fresh.get((name, verifier, group)) is rollout:
            return None
        what = f"rollout {rollout.rollout_id!r}"
        body, mark = pack(form_of(rollout, what), what)
        is_absent = (rollout.rollout_id, verifier_id) in self._absent
        self._absent.discard((rollout.rollout_id, verifier_id))
        if not is_absent and (self._has_rollouts or group in self._closed().groups):
            kept = self._writer.read(
                "SELECT digest FROM rollouts WHERE rollout_id = ? AND verifier_id = ?"
                " AND group_id = ? ORDER BY rollout DESC LIMIT 1",
                (name, verifier, group),
            )
            if kept and kept[0][0] == mark:
                return None
        self._fresh[name, verifier, group] = rollout
        values = (
            name,
            verifier,
            group,
            column_text(rollout.task_id),
            rollout.outcome,
            rollout.reward,
            int(rollout.is_truncated),
            body,
            mark,
        )
        return (
            "INSERT INTO rollouts (rollout_id, verifier_id, group_id, task_id, outcome, reward,"
            " truncated, body, digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        )

    def record_group(self, group: RolloutGroup) -> None:
        """Keep a closed group; rollouts of it that are not kept yet are kept with it.

        Raises:
            StoreError: it could not be written.
        """
        what = f"group {group.group_id!r}"
        verifier_id = str(group.metadata.get("verifier_id", ""))
        if self._is_kept(group, verifier_id):
            return
        rows = self._extra_rows()
        for rollout in group.rollouts:
            row = self._rollout_row(rollout, group.group_id, verifier_id)
            if row is not None:
                rows.append(row)
        task, task_mark = pack(form_of(group.task, what), what)
        context, context_mark = pack(form_of(group.context, what), what)
        rows += [
            ("INSERT INTO texts VALUES (?, ?) ON CONFLICT DO NOTHING", (task_mark, task)),
            ("INSERT INTO texts VALUES (?, ?) ON CONFLICT DO NOTHING", (context_mark, context)),
        ]
        body, mark = pack(
            {
                "rollouts": [r.rollout_id for r in group.rollouts],
                "metadata": jsonable(dict(group.metadata)),
                "figures": GroupFigures.of(group).to_dict(),
            },
            f"group {group.group_id!r}",
        )
        name = column_text(group.group_id)
        kept = (
            self._writer.read(
                "SELECT grp, digest FROM groups WHERE group_id = ? ORDER BY grp DESC LIMIT 1",
                (name,),
            )
            if name in self._closed().groups or self._writer.is_shared
            else []
        )
        if not kept or kept[0][1] != mark or self._values.is_aside("groups", kept[0][0]):
            rows.append(
                (
                    "INSERT INTO groups (group_id, stage, task_id, policy_id, verifier_id, task,"
                    " context, body, digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        name,
                        column_text(str(group.metadata.get("stage", ""))),
                        column_text(group.task.task_id),
                        column_text(redact_known(group.policy_id)),
                        column_text(verifier_id),
                        task_mark,
                        context_mark,
                        body,
                        mark,
                    ),
                )
            )
        self._writer.put_this_turn(rows)
        stage = column_text(str(group.metadata.get("stage", "")))
        self._closed().add(name, column_text(verifier_id), stage)
        for rollout in group.rollouts:
            key = (column_text(rollout.rollout_id), column_text(verifier_id), name)
            self._fresh.pop(key, None)

    def _is_kept(self, group: RolloutGroup, verifier_id: str) -> bool:
        """Whether the newest record of a group says the same, its figures too, which change where a
        rollout was tried again, and all its rollouts are kept: then a resume has nothing to write,
        and need not put the record together to see that."""
        name, verifier = column_text(group.group_id), column_text(verifier_id)
        if name not in self._closed().groups:
            return False
        keys = [(column_text(r.rollout_id), verifier, name) for r in group.rollouts]
        if any(self._fresh.get(k) is not r for k, r in zip(keys, group.rollouts, strict=True)):
            return False
        sql = (
            "SELECT grp, body, digest, task, context FROM groups WHERE group_id = ?"
            " ORDER BY grp DESC LIMIT 1"
        )
        for row, body, mark, *texts in self._writer.read(sql, (name,)):
            value = self._values.get("groups", row, body, mark)
            if value is DAMAGED or value.get("figures") != GroupFigures.of(group).to_dict():
                return False
            if self._values.damaged and not self._are_kept(texts):
                return False
            ids = [r.rollout_id for r in group.rollouts]
            if value["rollouts"] != ids or value["metadata"] != jsonable(dict(group.metadata)):
                return False
            for key in keys:
                self._fresh.pop(key, None)
            return True
        return False

    def _are_kept(self, marks: Sequence[object]) -> bool:
        sql = "SELECT count(*) FROM texts WHERE digest IN (?, ?)"
        return bool(self._writer.read(sql, tuple(marks))[0][0] == len(set(marks)))

    def groups(self, stage: str | None = None) -> Iterator[RolloutGroup]:
        """Yield the closed groups in the order in which they were closed, the newest record of
        each; of one stage, or of all. Bodies are read one group at a time.

        Groups with a damaged row are left out and named in `damaged`.
        """
        self._writer.flush()
        rows = self._writer.read(
            f"SELECT max(grp) FROM groups{'' if stage is None else ' WHERE stage = ?'}"
            " GROUP BY group_id, verifier_id ORDER BY min(grp)",
            () if stage is None else (column_text(stage),),
        )
        for (row,) in rows:
            group = self._group(row)
            if group is not None:
                yield group

    def figures(self, stage: str | None = None) -> Iterator[GroupFigures]:
        """Yield the figures of the groups that `groups` yields, in the same order, without reading
        rollouts, tasks or contexts.

        Groups whose own row is damaged are left out and named in `damaged`.
        """
        shared = OneOfEach()
        for row, group_id, policy_id, body, mark in self._rows(stage):
            value = self._values.get("groups", row, body, mark)
            if value is DAMAGED:
                continue
            if "figures" not in value:  # of an older run
                group = self._group(row)
                if group is not None:
                    yield GroupFigures.of(group)
                continue
            names = from_column(group_id), from_column(policy_id)
            found = GroupFigures.from_dict(value["figures"], *names, value["metadata"])
            yield found.sharing(shared)

    def _rows(self, stage: str | None) -> Iterator[tuple[Any, ...]]:
        """Yield the newest row of each group, in the order in which they were closed, some hundred
        at a time: neither all of them lie in memory, nor is a reading held open."""
        self._writer.flush()
        numbers = self._writer.read(
            f"SELECT max(grp) FROM groups{'' if stage is None else ' WHERE stage = ?'}"
            " GROUP BY group_id, verifier_id ORDER BY min(grp)",
            () if stage is None else (column_text(stage),),
        )
        for start in range(0, len(numbers), _AT_ONCE):
            part = [number for (number,) in numbers[start : start + _AT_ONCE]]
            found = self._writer.read(
                "SELECT grp, group_id, policy_id, body, digest FROM groups WHERE grp IN"
                f" ({', '.join('?' * len(part))})",
                tuple(part),
            )
            by_number = {row[0]: row for row in found}
            yield from (by_number[number] for number in part if number in by_number)

    def tasks(self, stages: Sequence[str]) -> Iterator[Task]:
        """Yield the tasks of the groups of some stages, each once; damaged ones are left out."""
        self._writer.flush()
        marks = self._writer.read(
            "SELECT task, min(grp) FROM groups WHERE stage IN"
            f" ({', '.join('?' * len(stages))}) GROUP BY task ORDER BY min(grp)",
            tuple(map(column_text, stages)),
        )
        for start in range(0, len(marks), _AT_ONCE):
            part = marks[start : start + _AT_ONCE]
            texts = self._texts([mark for mark, _ in part])
            for mark, row in part:
                if mark not in texts:
                    continue
                value = self._values.get("groups", row, texts[mark], mark)
                if value is not DAMAGED:
                    yield Task.from_dict(value)

    def _texts(self, marks: Sequence[Any]) -> dict[Any, object]:
        """Return the stored tasks or contexts of some digests, by digest."""
        sql = f"SELECT digest, body FROM texts WHERE digest IN ({', '.join('?' * len(marks))})"
        return dict(self._writer.read(sql, tuple(marks)))

    def groups_named(self, group_ids: Sequence[str]) -> list[RolloutGroup]:
        """Return closed groups by id, the newest record of each; damaged ones are left out."""
        self._writer.flush()
        found: list[RolloutGroup] = []
        for group_id in group_ids:
            rows = self._writer.read(
                "SELECT max(grp) FROM groups WHERE group_id = ?", (column_text(group_id),)
            )
            group = self._group(rows[0][0]) if rows[0][0] is not None else None
            found += [] if group is None else [group]
        return found

    def _group(self, row: int) -> RolloutGroup | None:
        found = self._writer.read(
            "SELECT group_id, policy_id, verifier_id, g.body, g.digest, t.body, t.digest, c.body,"
            " c.digest FROM groups g JOIN texts t ON t.digest = g.task"
            " JOIN texts c ON c.digest = g.context WHERE grp = ?",
            (row,),
        )
        if not found:
            self._values.set_aside("groups", row, "its task or context is missing")
            return None
        group_id, policy_id, verifier_id, body, mark, task, task_mark, ctx, ctx_mark = found[0]
        value = self._values.get("groups", row, body, mark)
        task_row = self._values.get("groups", row, task, task_mark)
        context_row = self._values.get("groups", row, ctx, ctx_mark)
        if DAMAGED in (value, task_row, context_row):
            return None
        rollouts: list[Rollout] = []
        rows = self._rows_of(value["rollouts"])
        for rollout_id in value["rollouts"]:
            mine = rows.get(column_text(rollout_id), ())
            kept = self._newest_sound(mine, from_column(verifier_id), group_id)
            if kept is None:
                self._values.set_aside("groups", row, f"its rollout {rollout_id!r} is damaged")
                return None
            rollouts.append(kept[0])
        return RolloutGroup(
            group_id=from_column(group_id),
            task=Task.from_dict(task_row),
            rollouts=tuple(rollouts),
            context=Context.from_dict(context_row),
            policy_id=from_column(policy_id),
            metadata=value["metadata"],
        )
