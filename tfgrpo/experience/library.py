"""The library: an immutable list of experiences, changed only by edits that leave a trace.

Applying edits gives a new version; caps in entries and tokens are enforced; every change can be
undone; ids are given once. Entries are always in the order of their ids. Rendering is literal and
can be read back. Does not know who proposed an edit, whether it helps (the gate does), or files.
Idea: the experience library of Training-Free GRPO; stable ids, undo, pin, ban, caps (own).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from tfgrpo.context import Context, Placement
from tfgrpo.errors import ConfigError, EditError
from tfgrpo.experience.changes import Change, ChangeSet, Diff
from tfgrpo.experience.claim import by_topic
from tfgrpo.experience.draft import (
    ENTRY_OVERHEAD_TOKENS,
    Caps,
    Draft,
    TokenCounter,
    number_of,
)
from tfgrpo.experience.edits import Edit, EditOutcome
from tfgrpo.experience.entry import Experience, Status, Value, undented
from tfgrpo.rollout import Task
from tfgrpo.runtime.canonical import digest
from tfgrpo.runtime.token_estimates import estimate_tokens

FORMAT = "tfgrpo.library"
FORMAT_VERSION = 1


class Selector(Protocol):
    """Chooses which entries a task gets.

    Contract: returns ids of shown entries, each at most once, in the order they should stand in;
    equal library and task give equal ids.
    """

    def select(self, library: Library, task: Task) -> Sequence[str]:
        """Return the ids for this task."""
        ...


@dataclass(frozen=True, slots=True)
class Applied:
    """A new version and the books of how it came about."""

    library: Library
    outcomes: tuple[EditOutcome, ...]
    """One an edit, in order."""
    evicted: tuple[Experience, ...] = ()
    """Entries that a cap pushed out, in order."""


@dataclass(frozen=True, slots=True)
class Library:
    """All experiences of one version."""

    entries: tuple[Experience, ...] = ()
    """In the order of their ids, whatever their status."""
    next_number: int = 1
    """The number of the next new entry; numbers are never given twice."""
    step: int = 0
    log: tuple[ChangeSet, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        numbers = [number_of(e.experience_id) for e in self.entries]
        if numbers != sorted(set(numbers)) or (numbers and numbers[-1] >= self.next_number):
            raise ValueError(
                f"library ids {[e.experience_id for e in self.entries]} are not unique, in order "
                f"and below E{self.next_number}"
            )

    def __len__(self) -> int:
        return len(self.shown)

    @property
    def shown(self) -> tuple[Experience, ...]:
        """The entries that may reach a prompt."""
        return tuple(e for e in self.entries if e.is_shown)

    @property
    def version_id(self) -> str:
        """16 hex digits fixed by the words, statuses, lineage and trust of all entries."""
        rows = [
            [e.experience_id, e.kind, e.text, [m.to_dict() for m in e.turns], e.status, e.trust,
             e.provenance.to_dict(), *_shape(e)]
            for e in self.entries
        ]  # fmt: skip
        return digest(rows, 16)

    def get(self, experience_id: str) -> Experience:
        """Return one entry.

        Raises:
            EditError: there is none of that id.
        """
        for entry in self.entries:
            if entry.experience_id == experience_id:
                return entry
        ids = ", ".join(e.experience_id for e in self.entries) or "none"
        raise EditError(f"no experience {experience_id!r} in this library; there are: {ids}")

    def tokens(self, count: TokenCounter = estimate_tokens) -> int:
        """Return how many tokens the shown entries take in a prompt, marks included."""
        return sum(count(e.body) + ENTRY_OVERHEAD_TOKENS for e in self.shown)

    def context(
        self,
        task: Task | None = None,
        selector: Selector | None = None,
        *,
        placement: Placement = "system",
        template: str = "lessons",
    ) -> Context:
        """Return what a policy is given: the whole library, or the selector's choice.

        Lessons stand by topic, confirmed ones first. An exemplar made from `task` itself is left
        out, so that no task is shown its own answer.
        """
        entries = self.shown
        if task is not None and selector is not None:
            entries = tuple(self.get(key) for key in selector.select(self, task))
        ranks = by_topic(e.claim.topic for e in entries)
        entries = tuple(
            sorted(entries, key=lambda e: (ranks[e.claim.topic], e.claim.state == "provisional"))
        )
        parts = tuple(
            e.part()
            for e in entries
            if e.is_shown
            and not (
                task is not None and e.kind == "exemplar" and task.task_id in e.provenance.task_ids
            )
        )
        return Context(parts, placement, template) if parts else Context()

    def apply(
        self,
        edits: Sequence[Edit],
        *,
        step: int | None = None,
        caps: Caps | None = None,
        count: TokenCounter = estimate_tokens,
        deduplicate: bool = True,
    ) -> Applied:
        """Return a new version with each edit applied, merged or rejected on its own.

        Nothing raises for an edit that cannot be applied: its reason is in its outcome.

        Args:
            edits: in the order in which they count.
            step: the step to write into histories; the next one by default.
            caps: limits to enforce afterwards; None enforces none.
            count: tokens of a text.
            deduplicate: merge adds whose words equal or nearly equal an entry's.
        """
        step = self.step + 1 if step is None else step
        draft = Draft({e.experience_id: e for e in self.entries}, self.next_number, step)
        outcomes = [draft.one(edit, caps, count, deduplicate) for edit in edits]
        evicted = draft.enforce(caps, count) if caps is not None else []
        gone = {e.experience_id for e in evicted}
        outcomes = [
            replace(o, result="rejected", reason="no room under the caps of the library")
            if o.experience_id in gone and o.edit.op == "add" and o.result == "applied"
            else o
            for o in outcomes
        ]
        kept = tuple(e for e in evicted if e.experience_id not in draft.created)
        library = self._changed(draft.entries, step, "edits", draft.next_number)
        return Applied(library, tuple(outcomes), kept)

    def with_status(
        self, experience_id: str, status: Status, *, reason: str = "", step: int | None = None
    ) -> Library:
        """Pin, ban, quarantine or activate one entry.

        Raises:
            EditError: there is no such entry.
        """
        step = self.step if step is None else step
        entry = self.get(experience_id)
        if entry.status == status and reason in ("", entry.status_reason):
            return self  # nothing to undo later
        changed = entry.revised(step, status, reason, status=status, status_reason=reason)
        rows = {e.experience_id: e for e in self.entries} | {experience_id: changed}
        return self._changed(rows, step, f"{status} {experience_id}", self.next_number)

    def measured(
        self, values: Mapping[str, Value], shown: Mapping[str, int] | None = None
    ) -> Library:
        """Return the library with measured values and counters brought up to date.

        The version id stays; neither is part of what a prompt holds. `shown` counts are added.
        """
        counts = shown or {}
        entries = tuple(
            replace(
                e,
                value=values.get(e.experience_id, e.value),
                shown=e.shown + counts.get(e.experience_id, 0),
            )
            for e in self.entries
        )
        return replace(self, entries=entries)

    def undo(self, sets: int = 1) -> Library:
        """Return the library before its last `sets` changes, which leave the log.

        Raises:
            EditError: there are fewer changes.
        """
        if not 0 < sets <= len(self.log):
            raise EditError(f"cannot undo {sets} changes: this library has {len(self.log)}")
        rows = {e.experience_id: e for e in self.entries}
        for change_set in reversed(self.log[-sets:]):
            for change in reversed(change_set.changes):
                if change.before is None:
                    rows.pop(change.experience_id, None)
                else:
                    rows[change.experience_id] = change.before
        entries = tuple(sorted(rows.values(), key=lambda e: number_of(e.experience_id)))
        return replace(self, entries=entries, log=self.log[:-sets])

    def diff(self, other: Library) -> Diff:
        """Return what leads from this library to `other`."""
        mine = {e.experience_id: e for e in self.entries}
        theirs = {e.experience_id: e for e in other.entries}
        both = [(e, theirs[key]) for key, e in mine.items() if key in theirs]
        return Diff(
            added=tuple(e for key, e in theirs.items() if key not in mine),
            removed=tuple(e for key, e in mine.items() if key not in theirs),
            changed=tuple(
                (a, b)
                for a, b in both
                if (a.text, a.turns, a.status, a.is_shown)
                != (b.text, b.turns, b.status, b.is_shown)
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; `from_dict` restores an equal library."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "version_id": self.version_id,
            "step": self.step,
            "next_number": self.next_number,
            "entries": [e.to_dict() for e in self.entries],
            "log": [s.to_dict() for s in self.log],
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a library from its JSON form.

        Raises:
            ConfigError: not a library, one of a newer format, or one whose hash does not fit.
        """
        if row.get("format") != FORMAT:
            raise ConfigError(f"format is {row.get('format')!r}; a library says {FORMAT!r}")
        if row.get("format_version", 0) > FORMAT_VERSION:
            raise ConfigError(
                f"library format {row['format_version']} is newer than this package reads "
                f"({FORMAT_VERSION}): install a newer tfgrpo"
            )
        library = cls(
            entries=tuple(Experience.from_dict(e) for e in row["entries"]),
            next_number=row["next_number"],
            step=row["step"],
            log=tuple(ChangeSet.from_dict(s) for s in row.get("log", ())),
        )
        if row.get("version_id", library.version_id) != library.version_id:
            raise ConfigError(
                f"the library says version {row['version_id']} and its entries make "
                f"{library.version_id}: the file was changed by hand or damaged"
            )
        return library

    def _changed(
        self, rows: Mapping[str, Experience], step: int, label: str, next_number: int
    ) -> Library:
        entries = tuple(sorted(rows.values(), key=lambda e: number_of(e.experience_id)))
        before = {e.experience_id: e for e in self.entries}
        keys = sorted(before.keys() | rows.keys(), key=number_of)
        changes = tuple(
            Change(before.get(k), rows.get(k)) for k in keys if before.get(k) != rows.get(k)
        )
        log = (*self.log, ChangeSet(step, label, changes)) if changes else self.log
        return replace(self, entries=entries, next_number=next_number, step=step, log=log)


def _shape(entry: Experience) -> list[str]:
    """Return what of a claim reaches prompts; nothing for entries without one."""
    claim = entry.claim
    return [claim.topic, claim.state] if claim.topic or claim.state else []


EMPTY_LIBRARY = Library()


def parse_rendered(prompt: str) -> list[str]:
    """Read the lessons back from a rendered prompt: the inverse of `Library.context` + render.

    >>> parse_rendered("Lessons:\\n[1] a\\n    [2] still a\\n[2] b")
    ['a\\n[2] still a', 'b']
    """
    found: list[str] = []
    for line in prompt.split("\n"):
        mark = f"[{len(found) + 1}] "
        if line.startswith(mark):
            found.append(line.removeprefix(mark))
        elif found and line.startswith("    "):
            found[-1] += "\n" + line
        elif found and line.endswith(":"):
            continue
        elif found:
            break
    return [undented(text) for text in found]


def from_texts(texts: Iterable[str]) -> Library:
    """Return a library of lessons that a person wrote; equal texts become one entry."""
    edits = [Edit("add", text, trust="human", reason="written by a person") for text in texts]
    return Library().apply(edits, step=0).library
