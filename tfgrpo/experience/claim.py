"""What an entry rests on: its topic, the tasks for and against it, how sure its author is.

An entry of the flow `reflect` has a claim; others have the empty one. Does not know the words of
the entry, prompts or who checks the claim. Source: own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

State = Literal["", "confirmed", "provisional", "refuted"]
"""`confirmed`: two tasks or more stand behind it. `provisional`: one does; shown with a mark and
dropped where no further task confirms it. `refuted`: as many speak against it; never shown."""
STATES: tuple[State, ...] = get_args(State)
CONFIRMED_FROM = 2
"""Tasks that must support an entry before it counts as confirmed."""
_TOPIC_LENGTH = 48


@dataclass(frozen=True, slots=True)
class Claim:
    """The evidence for one entry, by task ids."""

    topic: str = ""
    """A reward part, a kind of task or a tool, as the critic names it."""
    support: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    confidence: float | None = None
    """As the critic says, 0 to 1; shown, never used."""
    state: State = ""
    question: str = ""
    """What would settle it, in the critic's words."""

    @property
    def is_empty(self) -> bool:
        """True for an entry of a flow without claims."""
        return self == Claim()

    def joined(self, other: Claim) -> Claim:
        """Return both claims as one, with the state that their tasks give.

        >>> Claim("hours", ("t1",)).joined(Claim("", ("t2",))).state
        'confirmed'
        """
        against = tuple(dict.fromkeys(self.against + other.against))
        support = tuple(t for t in dict.fromkeys(self.support + other.support) if t not in against)
        confidence = self.confidence if other.confidence is None else other.confidence
        merged = Claim(self.topic or other.topic, support, against, confidence)
        return replace(merged.judged(), question=other.question)

    def judged(self) -> Claim:
        """Return the claim with the state that its tasks give.

        >>> Claim(support=("t1", "t2"), against=("t3",)).judged().state
        'confirmed'
        >>> Claim(support=("t1",), against=("t3",)).judged().state
        'refuted'
        """
        state: State = "confirmed" if len(self.support) >= CONFIRMED_FROM else "provisional"
        if self.against and len(self.against) >= len(self.support):
            state = "refuted"
        return replace(self, state=state)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, empty fields left out."""
        row: dict[str, Any] = {}
        for name in ("topic", "state", "question"):
            if getattr(self, name):
                row[name] = getattr(self, name)
        for name in ("support", "against"):
            if getattr(self, name):
                row[name] = list(getattr(self, name))
        if self.confidence is not None:
            row["confidence"] = self.confidence
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore from the JSON form; the claim of an older file is empty.

        Raises:
            ValueError: an unknown state.
        """
        state = row.get("state", "")
        if state not in STATES:
            raise ValueError(f"claim state is {state!r}; allowed: {', '.join(STATES[1:])}")
        return cls(
            row.get("topic", ""),
            tuple(row.get("support", ())),
            tuple(row.get("against", ())),
            row.get("confidence"),
            state,
            row.get("question", ""),
        )


def clean_topic(raw: object) -> str:
    """Return a topic as one short line without marks that a prompt could mistake.

    >>> clean_topic(" Hours :\\n[2] x")
    'Hours 2 x'
    """
    words = re.sub(r"[^\w /.()+-]", " ", str(raw or "")).split()
    return " ".join(words)[:_TOPIC_LENGTH].strip()


def by_topic(topics: Iterable[str]) -> dict[str, int]:
    """Return the rank of each topic, by first appearance; no topic comes first."""
    return {topic: i for i, topic in enumerate(dict.fromkeys(("", *topics)))}
