"""Edits of a library: what they are, and how a model's words become some.

An edit is add, update, delete or keep. Whatever a reply holds is accounted for: a row becomes an
edit or is rejected on its own with a reason that is kept, and a row that merges several entries
becomes one update and some deletes. Does not know the library's content, prompts, who is asked.
Idea: operations on a numbered list (Training-Free GRPO); accounting and aliases (own; defects 1-4
of the published code, see `docs/experience.md`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tfgrpo.experience.claim import Claim
from tfgrpo.experience.entry import Kind, Provenance, Trust
from tfgrpo.messages import Message
from tfgrpo.runtime.lenient_json import ReplyError, json_values

Op = Literal["add", "update", "delete", "keep", "mark"]
"""`mark` changes what an entry rests on and leaves its words."""
Result = Literal["applied", "merged", "rejected"]

_SYNONYMS: Mapping[str, Op | Literal["merge", "drop"]] = {
    "add": "add", "append": "add", "create": "add", "insert": "add", "new": "add",
    "update": "update", "modify": "update", "edit": "update", "revise": "update",
    "replace": "update", "change": "update", "rewrite": "update",
    "delete": "delete", "remove": "delete", "del": "delete", "discard": "delete",
    "keep": "keep", "none": "keep", "noop": "keep", "no_op": "keep", "no-op": "keep",
    "retain": "keep", "unchanged": "keep", "skip": "keep",
    "merge": "merge", "combine": "merge", "unify": "merge",
    "drop": "drop", "reject": "drop", "ignore": "drop",
}  # fmt: skip
_OP_KEYS = ("op", "operation", "action", "decision", "type", "option")
_TEXT_KEYS = (
    "text", "content", "lesson", "experience", "new_text", "new_content", "rule", "insight",
    "value",
)  # fmt: skip
_ID_KEYS = ("id", "target", "experience_id", "target_id", "ids", "targets", "index", "entry")
_SOURCE_KEYS = ("from", "sources", "source", "proposals", "candidates", "merged_from")
_REASON_KEYS = ("reason", "why", "rationale", "explanation", "because")
_EMPTY_TEXTS = frozenset({"", "none", "null", "n/a", "na", "-", "...", "nothing", "no experience"})
_ALIAS = re.compile(r"(?:(?:id|experience|exp|entry|lesson|e|g)[\s_#:.\-]*)?(\d{1,18})")
_TRIM = " \t\r\n[](){}<>\"'`“”‘’.,;:#*"


@dataclass(frozen=True, slots=True)
class Edit:
    """One change that is proposed for a library."""

    op: Op
    text: str = ""
    """The words of an add or update; ignored for a delete."""
    target: str = ""
    """Which entry an update, delete or keep is about."""
    kind: Kind = "lesson"
    turns: tuple[Message, ...] = ()
    """The chat turns of an exemplar that is added."""
    provenance: Provenance = field(default_factory=Provenance)
    trust: Trust = "model"
    reason: str = ""
    """Why the proposer wants it."""
    edit_id: str = ""
    """`C1`, `C2`, … among the proposals of one step."""
    quarantine: str = ""
    """Why it may not reach prompts before a person has looked; empty for most."""
    claim: Claim = field(default_factory=Claim)
    """What it rests on, where the flow says so."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, empty fields left out."""
        row: dict[str, Any] = {"op": self.op, "kind": self.kind, "trust": self.trust}
        for name in ("text", "target", "reason", "edit_id", "quarantine"):
            if getattr(self, name):
                row[name] = getattr(self, name)
        if self.turns:
            row["turns"] = [m.to_dict() for m in self.turns]
        if not self.claim.is_empty:
            row["claim"] = self.claim.to_dict()
        row["provenance"] = self.provenance.to_dict()
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Edit:
        """Restore an edit from its JSON form."""
        return cls(
            op=row["op"],
            text=row.get("text", ""),
            target=row.get("target", ""),
            kind=row.get("kind", "lesson"),
            turns=tuple(Message.from_dict(m) for m in row.get("turns", ())),
            provenance=Provenance.from_dict(row.get("provenance") or {}),
            trust=row.get("trust", "model"),
            reason=row.get("reason", ""),
            edit_id=row.get("edit_id", ""),
            quarantine=row.get("quarantine", ""),
            claim=Claim.from_dict(row.get("claim") or {}),
        )


@dataclass(frozen=True, slots=True)
class EditOutcome:
    """What became of one proposal."""

    edit: Edit
    result: Result
    reason: str = ""
    """Why it was merged or rejected, or what applying it meant."""
    experience_id: str = ""
    """The entry that was made, changed or found equal."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "edit": self.edit.to_dict(),
            "result": self.result,
            "reason": self.reason,
            "experience_id": self.experience_id,
        }


@dataclass(frozen=True, slots=True)
class EditCounts:
    """The books of one step: `proposed = applied + merged + rejected`."""

    proposed: int
    applied: int
    merged: int
    rejected: int

    @classmethod
    def of(cls, outcomes: Sequence[EditOutcome]) -> EditCounts:
        """Count outcomes."""
        count = {r: sum(o.result == r for o in outcomes) for r in ("applied", "merged", "rejected")}
        return cls(len(outcomes), count["applied"], count["merged"], count["rejected"])


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A part of a reply that is no edit."""

    row: str
    """The part as text, shortened."""
    reason: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of a reply after reading: an edit and the proposals it claims to come from."""

    edit: Edit
    sources: tuple[str, ...] = ()
    """Proposal ids, resolved."""
    is_drop: bool = False
    """The row asks to leave its sources out."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Everything that one reply proposes."""

    operations: tuple[Operation, ...]
    rejected: tuple[RejectedRow, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits alone."""
        return tuple(o.edit for o in self.operations if not o.is_drop)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A lesson as a critic wrote it, before any check."""

    text: str
    attempts: tuple[int, ...] = ()
    """Which attempts it was drawn from, by the numbers shown to the critic, from 1."""


Resolver = Callable[[object, Mapping[str, str]], str | None]


def resolve(raw: object, labels: Mapping[str, str]) -> str | None:
    """Return the id that a model meant, or None when nothing fits.

    Args:
        raw: what the model wrote.
        labels: label shown in the prompt -> id.

    >>> labels = {"G0": "E1", "G1": "E5"}
    >>> [resolve(raw, labels) for raw in ("G0", "[G0]", "g0", 0, "[G0].", "G7", "C0", True)]
    ['E1', 'E1', 'E1', 'E1', 'E1', None, None, None]
    """
    if isinstance(raw, bool) or raw is None:
        return None
    if isinstance(raw, float) and raw.is_integer():
        raw = int(raw)
    if not isinstance(raw, (str, int)):
        return None
    text = str(raw).strip(_TRIM).casefold()
    folded = {label.casefold(): key for label, key in labels.items()}
    if text in folded:
        return folded[text]
    match = _ALIAS.fullmatch(text)
    if match is None:
        return None
    numbered = [key for label, key in folded.items() if _number_of(label) == int(match[1])]
    return numbered[0] if len(numbered) == 1 else None


def exact(raw: object, labels: Mapping[str, str]) -> str | None:
    """Match an id letter by letter, as the published code does (defect 2)."""
    return labels.get(raw) if isinstance(raw, str) else None


def _number_of(label: str) -> int | None:
    digits = re.search(r"(\d+)$", label)
    return int(digits[1]) if digits else None


def read_operations(
    text: str,
    labels: Mapping[str, str],
    *,
    proposals: Mapping[str, str] | None = None,
    strings_are_adds: bool = False,
    resolver: Resolver | None = None,
) -> Operations:
    """Read every operation of a reply; each row stands or falls alone.

    Args:
        text: the visible reply.
        labels: label of a library entry as shown -> its id.
        proposals: label of a proposal as shown -> its id, where the reply may name proposals.
        strings_are_adds: take bare strings as adds (only where lessons were asked for).
        resolver: how ids are matched; `resolve` by default.

    Raises:
        ReplyError: no JSON, or nothing in it is an operation; the message suits a second asking.
    """
    rows = _rows(json_values(text))
    found = operations_of(rows, labels, proposals or {}, strings_are_adds, resolver or resolve)
    if rows and not found.operations and all("is no operation" in r.reason for r in found.rejected):
        raise ReplyError(found.rejected[0].reason)
    return found


def operations_of(
    rows: Sequence[Any],
    labels: Mapping[str, str],
    proposals: Mapping[str, str],
    strings_are_adds: bool,
    resolver: Resolver,
) -> Operations:
    """Make operations of decoded rows, each on its own."""
    operations: list[Operation] = []
    rejected: list[RejectedRow] = []
    for row in rows:
        try:
            operations.extend(_operations_of(row, labels, proposals, strings_are_adds, resolver))
            rejected.extend(_missing_ids(row, labels, proposals))
        except ReplyError as exc:
            rejected.append(RejectedRow(_short(row), str(exc)))
    return Operations(tuple(operations), tuple(rejected))


def _missing_ids(
    row: Any, labels: Mapping[str, str], proposals: Mapping[str, str]
) -> list[RejectedRow]:
    """Tell of ids that fit nothing in a row that stands all the same."""
    raws = _as_list(_first(row, _ID_KEYS)) if isinstance(row, dict) else []
    op = _SYNONYMS.get(str(_first(row, _OP_KEYS)).casefold()) if len(raws) > 1 else None
    if op in (None, "add", "keep", "drop"):
        return []
    return [
        RejectedRow(_short(raw), f"unknown id in a {op} of several; the rest of it was used")
        for raw in raws
        if resolve(raw, labels) is None and not _resolved([raw], proposals)
    ]


def _rows(values: Iterable[Any]) -> list[Any]:
    rows: dict[str, Any] = {}
    for value in values:
        for row in _unwrapped(value):
            rows.setdefault(json.dumps(row, sort_keys=True), row)
    return list(rows.values())


def _unwrapped(value: Any) -> list[Any]:
    """Take the list out of whatever object the model put around it."""
    if isinstance(value, list):
        return [row for item in value for row in (_unwrapped(item) if _is_wrap(item) else [item])]
    if not isinstance(value, dict):
        return [value]
    if _is_wrap(value):
        rows: list[Any] = []
        for key, inner in value.items():
            op = _SYNONYMS.get(str(key).casefold())
            if op is not None and isinstance(inner, list):
                rows.extend(_with_op(op, item) for item in inner)
            elif isinstance(inner, (list, dict)):
                rows.extend(_unwrapped(inner))
        return rows
    return [value]


def _is_wrap(value: Any) -> bool:
    if not isinstance(value, dict) or _first(value, _OP_KEYS) is not None:
        return False
    if isinstance(_first(value, _TEXT_KEYS), str) or _first(value, _ID_KEYS) is not None:
        return False
    return any(isinstance(inner, (list, dict)) for inner in value.values())


def _with_op(op: str, item: Any) -> Any:
    if isinstance(item, dict):
        return {"op": op} | item
    return {"op": op, ("id" if op == "delete" else "text"): item}


def _first(row: Mapping[Any, Any], keys: Iterable[str]) -> Any:
    folded = {str(k).strip().casefold(): v for k, v in row.items()}
    return next((folded[k] for k in keys if folded.get(k) is not None), None)


def _operations_of(
    row: Any,
    labels: Mapping[str, str],
    proposals: Mapping[str, str],
    strings_are_adds: bool,
    resolver: Resolver,
) -> list[Operation]:
    if isinstance(row, str) and strings_are_adds:
        row = {"op": "add", "text": row}
    if not isinstance(row, dict):
        raise ReplyError(
            f"{_short(row)} is no operation: write an object with op, id and text, in a list"
        )
    named = _first(row, _OP_KEYS)
    text = _text_of(_first(row, _TEXT_KEYS))
    raw_ids = _as_list(_first(row, _ID_KEYS))
    op = _op_of(named, text, raw_ids, row)
    reason = _text_of(_first(row, _REASON_KEYS))
    raw_sources = _as_list(_first(row, _SOURCE_KEYS))
    sources = _resolved([*raw_sources, *raw_ids], proposals)
    if op == "drop":
        return [Operation(Edit("keep", reason=reason), sources, is_drop=True)]
    if op in ("add", "update", "merge") and text.casefold() in _EMPTY_TEXTS:
        raise ReplyError(f"{op} without text")
    targets = [resolver(raw, labels) for raw in [*raw_ids, *(raw_sources if op == "merge" else ())]]
    known = list(dict.fromkeys(t for t in targets if t is not None))
    if op == "merge":
        return _merge(text, known, sources, reason)
    if op == "add":
        return [Operation(Edit("add", text, reason=reason), sources)]
    if op == "keep":
        return [Operation(Edit("keep", target=t, reason=reason), sources) for t in known or [""]]
    if not raw_ids:
        raise ReplyError(f"{op} without an id")
    if not known and op == "update" and resolver is exact:
        return [Operation(Edit("add", text, reason=reason), sources)]
    if not known:
        shown = ", ".join(labels) or "none, the library is empty"
        raise ReplyError(f"{op} of unknown id {_short(raw_ids[0])}; ids: {shown}")
    if op == "delete":
        return [Operation(Edit("delete", text, t, reason=reason), sources) for t in known]
    return _merge(text, known, sources, reason)


def _merge(
    text: str, known: Sequence[str], sources: tuple[str, ...], reason: str
) -> list[Operation]:
    if not known:
        return [Operation(Edit("add", text, reason=reason), sources)]
    keep, *others = known
    first = Operation(Edit("update", text, keep, reason=reason), sources)
    why = reason or f"merged into {keep}"
    return [first, *(Operation(Edit("delete", text, t, reason=why), sources) for t in others)]


def _op_of(
    named: Any, text: str, raw_ids: Sequence[Any], row: Any
) -> Op | Literal["merge", "drop"]:
    if named is None:
        if text and raw_ids:
            return "update"
        if text:
            return "add"
        raise ReplyError(f"{_short(row)} is no operation: op is missing")
    op = _SYNONYMS.get(str(named).strip(_TRIM).casefold())
    if op is None:
        raise ReplyError(f"unknown operation {_short(named)}; allowed: add, update, delete, keep")
    return op


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return " ".join(v.strip() for v in value)
    if isinstance(value, dict):
        return _text_of(_first(value, _TEXT_KEYS))
    return ""


def _as_list(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    if isinstance(value, str) and "," in value:
        return [v for v in value.split(",") if v.strip(_TRIM)]
    return value if isinstance(value, list) else [value]


def _resolved(raws: Iterable[Any], labels: Mapping[str, str]) -> tuple[str, ...]:
    """Resolve proposal labels, which need their letter: a bare number is a library id."""
    found: list[str] = []
    folded = {label.casefold(): key for label, key in labels.items()}
    for raw in raws:
        key = folded.get(str(raw).strip(_TRIM).casefold())
        if key is not None and key not in found:
            found.append(key)
    return tuple(found)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


def read_lessons(text: str) -> tuple[Lesson, ...]:
    """Read the lessons of a reply to the contrast prompt: strings, or objects with a text.

    An empty list is an answer: nothing to learn. Of several values in a reply those of the best
    form count: objects with a text, then lists of sentences, then other lists.

    Raises:
        ReplyError: no JSON, or rows without any text.

    >>> read_lessons('{"lessons": [{"lesson": "Check units.", "attempts": [1, "2"]}]}')
    (Lesson(text='Check units.', attempts=(1, 2)),)
    """
    values = json_values(text)
    best = max(map(_lesson_form, values))
    lessons: dict[Lesson, None] = {}
    rows = _rows(v for v in values if _lesson_form(v) == best)
    for row in rows:
        words = _text_of(row if isinstance(row, (str, dict)) else None)
        if words.casefold() in _EMPTY_TEXTS:
            continue
        keys = ("attempts", "attempt", "from")
        raw = _as_list(_first(row, keys)) if isinstance(row, dict) else []
        numbers = [re.search(r"\d{1,9}", str(a)) for a in raw if not isinstance(a, bool)]
        lessons[Lesson(words, tuple(int(m[0]) for m in numbers if m))] = None
    if rows and not lessons:
        raise ReplyError('no lesson in the reply: write {"lessons": [{"lesson": "..."}]}')
    return tuple(lessons)


_LEAST_SENTENCE = 8
"""Characters of a sentence in a script that writes several letters as one."""


def _lesson_form(value: Any) -> int:
    """Return how well a value has the form of lessons: 2 with an object, 1 with a sentence."""
    rows = _unwrapped(value)
    if any(isinstance(row, dict) and _text_of(row) for row in rows):
        return 2
    texts = [row.strip() for row in rows if isinstance(row, str)]
    return int(any(" " in t or (len(t) >= _LEAST_SENTENCE and not t.isascii()) for t in texts))


def numbered(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """Return proposals with ids `C1`, `C2`, … in order."""
    return tuple(replace(edit, edit_id=f"C{i}") for i, edit in enumerate(edits, 1))
