"""A library version under construction: one edit after the other, then the caps.

Does not know versions, logs or who proposed an edit. Source: own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tfgrpo.experience.edits import Edit, EditOutcome
from tfgrpo.experience.entry import Experience, Revision, lowest_trust
from tfgrpo.experience.similarity import is_near, normal

ENTRY_OVERHEAD_TOKENS = 6
"""What the list mark or the turn markers of one entry take beside its words."""

TokenCounter = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Caps:
    """How large a library may grow, counted over what reaches prompts."""

    entries: int | None = 40
    """Most entries; the least valued ones leave first."""
    tokens: int | None = 4000
    """Of the rendered entries, by the counter given to `apply`."""


def number_of(experience_id: str) -> int:
    """Return the number in an id.

    Raises:
        ValueError: not an id of ours.
    """
    match = re.fullmatch(r"E([1-9]\d*)", experience_id)
    if match is None:
        raise ValueError(f"{experience_id!r} is not an experience id; they read E1, E2, …")
    return int(match[1])


@dataclass
class Draft:
    """The version under construction."""

    entries: dict[str, Experience]
    next_number: int
    step: int
    created: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)

    def one(
        self, edit: Edit, caps: Caps | None, count: TokenCounter, deduplicate: bool
    ) -> EditOutcome:
        if edit.op == "add":
            return self._add(edit, caps, count, deduplicate)
        if edit.op == "keep":
            return EditOutcome(edit, "applied", "nothing to change", edit.target)
        why_not = self._untouchable(edit.target)
        if why_not:
            return EditOutcome(edit, "rejected", why_not, edit.target)
        if edit.op == "mark":
            return self._mark(edit)
        if edit.op == "delete":
            del self.entries[edit.target]
            self.deleted.add(edit.target)
            return EditOutcome(edit, "applied", edit.reason or "deleted", edit.target)
        return self._update(edit, caps, count, deduplicate)

    def _untouchable(self, target: str) -> str:
        if target in self.deleted:
            return f"{target} was deleted in the same step"
        entry = self.entries.get(target)
        if entry is None:
            return f"there is no experience {target!r}"
        return "" if entry.status == "active" else f"{target} is {entry.status}"

    def _add(
        self, edit: Edit, caps: Caps | None, count: TokenCounter, deduplicate: bool
    ) -> EditOutcome:
        entry = Experience(
            experience_id=f"E{self.next_number}",
            kind=edit.kind,
            text=edit.text,
            turns=edit.turns,
            provenance=edit.provenance,
            trust=edit.trust,
            status="quarantined" if edit.quarantine else "active",
            status_reason=edit.quarantine,
            created_step=self.step,
            updated_step=self.step,
            history=(Revision(self.step, "add", edit.reason, edit.text),),
            claim=edit.claim,
        )
        if not entry.body.strip():
            return EditOutcome(edit, "rejected", "there are no words in it")
        too_long = _too_long(entry, caps, count)
        if too_long:
            return EditOutcome(edit, "rejected", too_long)
        twin = self._twin(entry) if deduplicate else None
        if twin is not None:
            return self._merge(edit, twin)
        self.entries[entry.experience_id] = entry
        self.created.add(entry.experience_id)
        self.next_number += 1
        return EditOutcome(edit, "applied", edit.quarantine, entry.experience_id)

    def _update(
        self, edit: Edit, caps: Caps | None, count: TokenCounter, deduplicate: bool
    ) -> EditOutcome:
        old = self.entries[edit.target]
        if old.kind == "exemplar" or edit.kind == "exemplar":
            return EditOutcome(edit, "rejected", "an exemplar is added or deleted, never rewritten")
        if not edit.text.strip():
            return EditOutcome(edit, "rejected", "there are no words in it", edit.target)
        if normal(edit.text) == normal(old.text):
            return self._merge(edit, old)
        new = old.revised(
            self.step,
            "update",
            edit.reason,
            text=edit.text,
            provenance=old.provenance | edit.provenance,
            trust=lowest_trust([old.trust, edit.trust]),
            value=None,
            replayed=None,
            claim=old.claim if edit.claim.is_empty else old.claim.joined(edit.claim),
        )
        if edit.quarantine:
            reason = f"the update was held back: {edit.quarantine}"
            return EditOutcome(edit, "rejected", reason, edit.target)
        why_not = _too_long(new, caps, count)
        twin = self._twin(new) if deduplicate else None
        if twin is not None and not why_not:
            why_not = f"would repeat {twin.experience_id}"
        if why_not:
            return EditOutcome(edit, "rejected", why_not, edit.target)
        self.entries[edit.target] = new
        return EditOutcome(edit, "applied", edit.reason, edit.target)

    def _mark(self, edit: Edit) -> EditOutcome:
        """Bring up to date what an entry rests on."""
        old = self.entries[edit.target]
        claim = old.claim.joined(edit.claim)
        if claim.state == old.claim.state:
            self.entries[edit.target] = replace(old, claim=claim)
        else:
            self.entries[edit.target] = old.revised(self.step, "mark", claim.state, claim=claim)
        return EditOutcome(edit, "applied", edit.reason or claim.state, edit.target)

    def _twin(self, entry: Experience) -> Experience | None:
        for other in self.entries.values():
            if other.experience_id != entry.experience_id and other.kind == entry.kind:
                same = normal(other.body) == normal(entry.body)
                if same or (entry.kind == "lesson" and is_near(other.body, entry.body)):
                    return other
        return None

    def _merge(self, edit: Edit, twin: Experience) -> EditOutcome:
        if twin.status == "banned":
            reason = f"the same as {twin.experience_id}, which is banned"
            return EditOutcome(edit, "rejected", reason, twin.experience_id)
        self.entries[twin.experience_id] = replace(
            twin,
            merged=twin.merged + 1,
            provenance=twin.provenance | edit.provenance,
            trust=lowest_trust([twin.trust, edit.trust]),
            claim=twin.claim if edit.claim.is_empty else twin.claim.joined(edit.claim),
        )
        return EditOutcome(
            edit, "merged", f"says the same as {twin.experience_id}", twin.experience_id
        )

    def enforce(self, caps: Caps, count: TokenCounter) -> list[Experience]:
        """Evict by measured value, then age; what this step added goes last, pinned never."""
        sizes = {
            key: count(e.body) + ENTRY_OVERHEAD_TOKENS
            for key, e in self.entries.items()
            if e.is_shown
        }
        order = sorted(
            (self.entries[key] for key in sizes if self.entries[key].status != "pinned"),
            key=lambda e: (
                e.experience_id in self.created,
                e.value.estimate if e.value else 0.0,
                e.created_step,
                number_of(e.experience_id),
            ),
        )
        evicted: list[Experience] = []
        for entry in order:
            few_enough = caps.entries is None or len(sizes) <= caps.entries
            if few_enough and (caps.tokens is None or sum(sizes.values()) <= caps.tokens):
                break
            del sizes[entry.experience_id]
            evicted.append(self.entries.pop(entry.experience_id))
        return evicted


def _too_long(entry: Experience, caps: Caps | None, count: TokenCounter) -> str:
    if caps is None or caps.tokens is None:
        return ""
    tokens = count(entry.body) + ENTRY_OVERHEAD_TOKENS
    if tokens <= caps.tokens:
        return ""
    return f"{tokens} tokens alone are more than the library's cap of {caps.tokens}"
