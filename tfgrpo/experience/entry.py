"""One thing that was learnt, with where it came from and how far it may be trusted.

A lesson is text; an exemplar is a worked example kept as chat turns. Records are frozen: a change
is a new record with one more revision in its history, and the id stays.

Does not know: the library it stands in, how it was found, prompts around it.
Idea: numbered tips (Training-Free GRPO) with stable ids, lineage and trust as the minimum over
that lineage (own).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from tfgrpo.context import ContextPart
from tfgrpo.experience.claim import Claim
from tfgrpo.messages import Message

if TYPE_CHECKING:
    from tfgrpo.statistics import Interval

Kind = Literal["lesson", "exemplar"]
Status = Literal["active", "pinned", "banned", "quarantined"]
"""`active` and `pinned` reach prompts; `banned` never comes back, not even as a new entry of the
same text; `quarantined` waits for a person."""
Trust = Literal["third_party", "model", "verified", "human"]
"""Who stands behind the words, weakest first: text of a tool or page, the critic model, a rollout
that a verifier accepted, a person."""

TRUST_ORDER: tuple[Trust, ...] = get_args(Trust)
STATUSES: tuple[Status, ...] = get_args(Status)

_CONTINUATION = "    "
_ON_TRIAL = " (seen in one task only)"


def lowest_trust(classes: Iterable[Trust], default: Trust = "model") -> Trust:
    """Return the minimum over a lineage.

    >>> lowest_trust(["human", "third_party", "model"])
    'third_party'
    """
    ranked = sorted(classes, key=TRUST_ORDER.index)
    return ranked[0] if ranked else default


@dataclass(frozen=True, slots=True)
class Provenance:
    """What an experience was drawn from: ids only, in order of first mention."""

    rollout_ids: tuple[str, ...] = ()
    group_ids: tuple[str, ...] = ()
    task_ids: tuple[str, ...] = ()

    def __or__(self, other: Provenance) -> Provenance:
        """Both lineages together, without repeats."""
        return Provenance(
            tuple(dict.fromkeys(self.rollout_ids + other.rollout_ids)),
            tuple(dict.fromkeys(self.group_ids + other.group_ids)),
            tuple(dict.fromkeys(self.task_ids + other.task_ids)),
        )

    def to_dict(self) -> dict[str, list[str]]:
        """Return the JSON form."""
        return {
            "rollout_ids": list(self.rollout_ids),
            "group_ids": list(self.group_ids),
            "task_ids": list(self.task_ids),
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore from the JSON form."""
        return cls(
            tuple(row.get("rollout_ids", ())),
            tuple(row.get("group_ids", ())),
            tuple(row.get("task_ids", ())),
        )


@dataclass(frozen=True, slots=True)
class Value:
    """Measured effect on the reward of having an experience in the prompt."""

    estimate: float
    """Mean paired difference in reward, with minus without."""
    low: float
    high: float
    n_tasks: int
    level: float = 0.95

    @classmethod
    def of(cls, interval: Interval) -> Self:
        """Take over a measured interval, such as `EntryValue.effect`."""
        return cls(interval.estimate, interval.low, interval.high, interval.n_tasks, interval.level)

    def to_dict(self) -> dict[str, float | int]:
        """Return the JSON form."""
        return {
            "estimate": self.estimate,
            "low": self.low,
            "high": self.high,
            "n_tasks": self.n_tasks,
            "level": self.level,
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore from the JSON form."""
        return cls(row["estimate"], row["low"], row["high"], row["n_tasks"], row.get("level", 0.95))


@dataclass(frozen=True, slots=True)
class Revision:
    """One change of an experience."""

    step: int
    op: str
    """`add`, `update`, `merge`, `mark`, or a status that was set."""
    reason: str = ""
    text: str = ""
    """The words as they were after this change."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"step": self.step, "op": self.op, "reason": self.reason, "text": self.text}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore from the JSON form."""
        return cls(row["step"], row["op"], row.get("reason", ""), row.get("text", ""))


@dataclass(frozen=True, slots=True)
class Experience:
    """One entry of a library."""

    experience_id: str
    """`E1`, `E2`, …: given once, never reused, never renumbered."""
    kind: Kind = "lesson"
    text: str = ""
    """The words of a lesson; for an exemplar a label for people, never part of a prompt."""
    turns: tuple[Message, ...] = ()
    """The worked example of an exemplar: task turns, then the answer."""
    provenance: Provenance = field(default_factory=Provenance)
    trust: Trust = "model"
    status: Status = "active"
    status_reason: str = ""
    """Why it is banned or in quarantine."""
    value: Value | None = None
    """Measured, not declared by a model; None until it was measured."""
    shown: int = 0
    """In how many rollouts it stood in the prompt."""
    merged: int = 0
    """How many further proposals said the same."""
    created_step: int = 0
    updated_step: int = 0
    history: tuple[Revision, ...] = ()
    claim: Claim = field(default_factory=Claim)
    """Topic, tasks for and against, state; empty for exemplars and other flows."""
    replayed: Value | None = None
    """Change on supporting practice tasks that were rolled again under it. They were chosen for
    having failed, so it leans upwards: an early sign, never a reason to accept."""

    def __post_init__(self) -> None:
        if self.kind == "lesson" and self.turns:
            raise ValueError(f"lesson {self.experience_id!r} has chat turns; only exemplars do")
        if self.kind == "exemplar" and not self.turns:
            raise ValueError(f"exemplar {self.experience_id!r} has no chat turns")

    @property
    def is_shown(self) -> bool:
        """True when it may reach a prompt."""
        return self.status == "pinned" or (
            self.status == "active" and self.claim.state != "refuted"
        )

    @property
    def body(self) -> str:
        """Everything that reaches a prompt, as one text: for counting, comparing, embedding."""
        if self.kind == "lesson":
            return self.text
        return "\n".join(f"{m.role}: {m.content}" for m in self.turns)

    @property
    def cue(self) -> str:
        """What a task is compared with for selection: the lesson, or an exemplar's task."""
        if self.kind == "lesson":
            return self.text
        return "\n".join(m.content for m in self.turns if m.role == "user")

    def part(self) -> ContextPart:
        """Return this entry as a part of a context; newlines of a lesson become indented lines."""
        if self.kind == "exemplar":
            return ContextPart("exemplar", turns=self.turns, source=self.experience_id)
        mark = _ON_TRIAL if self.claim.state == "provisional" else ""
        return ContextPart(
            "lesson",
            text=indented(self.text) + mark,
            source=self.experience_id,
            topic=self.claim.topic,
        )

    def revised(self, step: int, op: str, reason: str = "", **changes: Any) -> Experience:
        """Return the entry with some fields changed and the change in its history."""
        text = changes.get("text", self.text)
        revision = Revision(step, op, reason, text)
        return replace(self, updated_step=step, history=(*self.history, revision), **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, defaults left out."""
        row: dict[str, Any] = {
            "experience_id": self.experience_id,
            "kind": self.kind,
            "text": self.text,
            "provenance": self.provenance.to_dict(),
            "trust": self.trust,
            "status": self.status,
            "created_step": self.created_step,
            "updated_step": self.updated_step,
        }
        if self.turns:
            row["turns"] = [m.to_dict() for m in self.turns]
        if self.status_reason:
            row["status_reason"] = self.status_reason
        if self.value is not None:
            row["value"] = self.value.to_dict()
        if self.shown:
            row["shown"] = self.shown
        if self.merged:
            row["merged"] = self.merged
        if self.history:
            row["history"] = [r.to_dict() for r in self.history]
        if not self.claim.is_empty:
            row["claim"] = self.claim.to_dict()
        if self.replayed is not None:
            row["replayed"] = self.replayed.to_dict()
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore an entry from its JSON form.

        Raises:
            ValueError: an unknown kind, status or trust class.
        """
        closed = {"kind": get_args(Kind), "status": STATUSES, "trust": TRUST_ORDER}
        for name, allowed in closed.items():
            if row[name] not in allowed:
                raise ValueError(
                    f"experience {row.get('experience_id')!r}: {name} is {row[name]!r}; "
                    f"allowed: {', '.join(allowed)}"
                )
        value, replayed = row.get("value"), row.get("replayed")
        return cls(
            experience_id=row["experience_id"],
            kind=row["kind"],
            text=row.get("text", ""),
            turns=tuple(Message.from_dict(m) for m in row.get("turns", ())),
            provenance=Provenance.from_dict(row.get("provenance") or {}),
            trust=row["trust"],
            status=row["status"],
            status_reason=row.get("status_reason", ""),
            value=None if value is None else Value.from_dict(value),
            shown=row.get("shown", 0),
            merged=row.get("merged", 0),
            created_step=row.get("created_step", 0),
            updated_step=row.get("updated_step", 0),
            history=tuple(Revision.from_dict(r) for r in row.get("history", ())),
            claim=Claim.from_dict(row.get("claim") or {}),
            replayed=None if replayed is None else Value.from_dict(replayed),
        )


def indented(text: str) -> str:
    """Return a lesson so that no line of it but the first starts at the margin.

    An entry of the rendered list starts at the margin, so a lesson can neither open a further
    entry nor close the list, whatever it says. `undented` restores the text.

    >>> indented("a\\n[2] b")
    'a\\n    [2] b'
    """
    return text.replace("\n", "\n" + _CONTINUATION)


def undented(text: str) -> str:
    """Undo `indented`."""
    return text.replace("\n" + _CONTINUATION, "\n")
