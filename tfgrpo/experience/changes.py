"""What changed between two versions of a library: for undo, for diffs, for the journal.

Does not know how changes are decided. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tfgrpo.experience.entry import Experience


@dataclass(frozen=True, slots=True)
class Change:
    """One entry before and after; None where it was not there."""

    before: Experience | None
    after: Experience | None

    @property
    def experience_id(self) -> str:
        """Which entry."""
        entry = self.after or self.before
        assert entry is not None
        return entry.experience_id


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """What one `apply`, pin, ban or undo did, as a whole."""

    step: int
    label: str
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "step": self.step,
            "label": self.label,
            "changes": [
                [c.before and c.before.to_dict(), c.after and c.after.to_dict()]
                for c in self.changes
            ],
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore from the JSON form."""
        changes = tuple(
            Change(*(None if e is None else Experience.from_dict(e) for e in pair))
            for pair in row["changes"]
        )
        return cls(row["step"], row["label"], changes)


@dataclass(frozen=True, slots=True)
class Diff:
    """How one library differs from another."""

    added: tuple[Experience, ...]
    removed: tuple[Experience, ...]
    changed: tuple[tuple[Experience, Experience], ...]
    """Pairs (before, after) whose words or status differ."""

    @property
    def is_empty(self) -> bool:
        """True when a prompt could not tell the two apart."""
        return not (self.added or self.removed or self.changed)

    def lines(self) -> list[str]:
        """Return the difference for people, one line an entry."""
        return [
            *(f"- {e.experience_id} {e.body}" for e in self.removed),
            *(f"+ {e.experience_id} {e.body}" for e in self.added),
            *(
                f"~ {a.experience_id} [{a.status} -> {b.status}] "
                + (a.body if a.body == b.body else f"{a.body} -> {b.body}")
                for a, b in self.changed
            ),
        ]
