"""What a step proposes, with the books: every proposal applied, merged or rejected with a reason.

`close_books` applies a flow's edits to the library and accounts for them; `stalled` says when steps
no longer come to anything. Does not know how edits are found. Source: own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tfgrpo.experience.critic.asker import CallBooks, CallNote
from tfgrpo.experience.draft import TokenCounter
from tfgrpo.experience.edits import Edit, EditCounts, EditOutcome, RejectedRow
from tfgrpo.experience.entry import Experience
from tfgrpo.experience.informative import Teaching
from tfgrpo.experience.library import Library
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.rollout import RolloutGroup


class Proposer(Protocol):
    """A flow from groups to a proposed library.

    Contract: `propose` changes nothing outside; equal calls in equal order give equal proposals as
    long as its LM replies alike.
    """

    async def propose(
        self, groups: Sequence[RolloutGroup], library: Library, *, step: int | None = None
    ) -> LibraryProposal:
        """Return the library that these groups speak for."""
        ...


@dataclass(frozen=True, slots=True)
class LibraryProposal:
    """What one step proposes and how it came about."""

    before: Library
    library: Library
    """The proposed version; equal to `before` where nothing can be learnt."""
    outcomes: tuple[EditOutcome, ...] = ()
    """One a proposal; see `counts`."""
    rejected: tuple[RejectedRow, ...] = ()
    """Parts of replies that never were a proposal."""
    evicted: tuple[Experience, ...] = ()
    notes: tuple[CallNote, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)
    """How often: `calls`, `calls:STAGE`, `cut`, `reasked`, `shortened`, `failed`, `unusable`,
    `not_asked` (groups that were given up)."""
    groups: int = 0
    informative: int = 0
    differing: int = 0
    """Groups whose rewards differ."""
    message: str = ""
    """One line for people."""
    rewrite: Library | None = None
    """The proposed version with crowded topics rewritten; competes with `library` at the gate."""
    replayed: tuple[RolloutGroup, ...] = ()
    """Practice tasks that were rolled again under proposed rules."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the flow `reflect` adds for reports: `panels`, `replays`, `verdicts`, `questions`."""

    @property
    def counts(self) -> EditCounts:
        """The books: proposed = applied + merged + rejected."""
        return EditCounts.of(self.outcomes)

    @property
    def has_change(self) -> bool:
        """True when a prompt would differ."""
        return not self.before.diff(self.library).is_empty

    @property
    def applied(self) -> tuple[Edit, ...]:
        """The edits that changed the library, for trying them in smaller sets."""
        return tuple(o.edit for o in self.outcomes if o.result == "applied" and o.edit.op != "keep")

    @property
    def is_in_vain(self) -> bool:
        """True when rules were tried again on their tasks and not one turned any."""
        checks = self.details.get("replays", ())
        return bool(checks) and not any(c["turned"] or c["already_right"] for c in checks)

    @property
    def is_unusable(self) -> bool:
        """True when something was proposed or asked in vain: an honest empty list is neither."""
        tried = bool(self.outcomes or self.rejected or self.notes)
        return tried and not any(o.result != "rejected" for o in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form for a journal; libraries by version only."""
        return {
            "before": self.before.version_id,
            "proposed": self.library.version_id,
            "outcomes": [o.to_dict() for o in self.outcomes],
            "rejected": [{"row": r.row, "reason": r.reason} for r in self.rejected],
            "evicted": [e.experience_id for e in self.evicted],
            "notes": [n.to_dict() for n in self.notes],
            "calls": dict(self.calls),
            "groups": self.groups,
            "informative": self.informative,
            "differing": self.differing,
            "message": self.message,
            **self.details,
        }


@dataclass(frozen=True, slots=True)
class Settled:
    """What a flow decided before its edits reach the library."""

    outcomes: tuple[EditOutcome, ...] = ()
    rejected: tuple[RejectedRow, ...] = ()
    books: CallBooks | None = None


def close_books(
    library: Library,
    edits: Sequence[Edit],
    settled: Settled,
    teaching: Teaching,
    settings: ExperienceSettings,
    *,
    step: int,
    count: TokenCounter,
) -> LibraryProposal:
    """Apply a flow's edits and return the proposal with its books."""
    bounded = settings.repairs.bounded_library
    applied = library.apply(
        edits,
        step=step,
        caps=settings.caps if bounded else None,
        count=count,
        deduplicate=bounded,
    )
    outcomes = (*settled.outcomes, *applied.outcomes)
    counts = EditCounts.of(outcomes)
    assert counts.proposed == counts.applied + counts.merged + counts.rejected
    has_news = any(o.result != "rejected" for o in applied.outcomes)
    return LibraryProposal(
        before=library,
        library=applied.library if has_news else library,
        outcomes=outcomes,
        rejected=settled.rejected,
        evicted=applied.evicted if has_news else (),
        notes=tuple(settled.books.notes) if settled.books else (),
        calls=dict(settled.books.counts) if settled.books else {},
        groups=teaching.total,
        informative=len(teaching.informative),
        differing=teaching.differing,
        message=_message(teaching, counts),
    )


def redacted(edit: Edit) -> Edit:
    """Return a refused edit without its words, which may be what must not be kept."""
    return replace(edit, text=f"({len(edit.text)} characters withheld)")


def _message(teaching: Teaching, counts: EditCounts) -> str:
    if not counts.proposed:
        return f"nothing to learn: {teaching.message}"
    return (
        f"{teaching.message}; {counts.proposed} proposals: {counts.applied} applied, "
        f"{counts.merged} merged, {counts.rejected} rejected"
    )


def stalled(steps: Sequence[LibraryProposal], limit: int = 3) -> str:
    """Return why to stop when the last `limit` steps all came to nothing usable, or nothing.

    Steps without an informative group say nothing about the critic and do not count.
    """
    asked = [s for s in steps if s.informative > 0]
    if len(asked) < limit or not all(s.is_unusable for s in asked[-limit:]):
        return ""
    causes: Counter[str] = Counter()
    for step in asked[-limit:]:
        causes.update(n.problem for n in step.notes)
        causes.update(o.reason for o in step.outcomes if o.result == "rejected")
        causes.update(r.reason for r in step.rejected)
    likely = "; ".join(f"{n} times {cause!r}" for cause, n in causes.most_common(3))
    return (
        f"the last {limit} steps gave no usable edit (likely cause: {likely or 'empty replies'}): "
        "try another critic model, a larger reply limit, or experience.lessons = false"
    )
