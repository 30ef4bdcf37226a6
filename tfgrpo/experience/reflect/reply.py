"""From a critic's reply to rules and verdicts: what is no rule never becomes one.

A rule is an object with a text, in a list named `rules` (or `lessons`), or in a bare list. Brackets
in prose, single words and objects without a text are passed over with a reason. Task ids that the
panel did not show are dropped. Does not know the library's words, guards or prompts. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tfgrpo.experience.claim import clean_topic
from tfgrpo.experience.edits import RejectedRow, resolve
from tfgrpo.runtime.lenient_json import ReplyError, json_values

_LISTS = ("rules", "lessons", "experiences", "entries_new")
_TEXTS = ("text", "rule", "lesson", "content", "experience")
_VERDICTS = {
    "confirmed": "confirmed", "confirm": "confirmed", "supported": "confirmed",
    "refuted": "refuted", "refute": "refuted", "contradicted": "refuted",
    "ignored": "ignored", "ignore": "ignored", "unused": "ignored",
}  # fmt: skip
_LEAST_WORDS = 3


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as a critic wrote it, its ids resolved."""

    text: str
    topic: str = ""
    entry_id: str = ""
    """The entry (or shown rule) that it rewrites; empty for a new one."""
    support: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    confidence: float | None = None
    question: str = ""
    replaces: tuple[str, ...] = ()
    """Entries that it unites, in a rewrite of a topic."""


@dataclass(frozen=True, slots=True)
class EntryVerdict:
    """What a panel says about an entry in force."""

    entry_id: str
    verdict: Literal["confirmed", "refuted", "ignored"]
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PanelReply:
    """Everything usable in one reply, and what was not."""

    rules: tuple[Rule, ...] = ()
    verdicts: tuple[EntryVerdict, ...] = ()
    rejected: tuple[RejectedRow, ...] = ()


def read_reply(text: str, task_ids: Sequence[str], entry_ids: Sequence[str] = ()) -> PanelReply:
    """Read a reply to a panel, a replay or a rewrite.

    Args:
        text: the visible reply.
        task_ids: tasks that may be cited.
        entry_ids: entries, or rules by their shown ids, that may be named.

    Raises:
        ReplyError: no JSON of the form asked for; the message suits a second asking.

    >>> read_reply('{"rules": [{"text": "a is written b.", "support": ["T1"]}]}', ["t1"]).rules
    (Rule(text='a is written b.', topic='', entry_id='', support=('t1',), against=(), \
confidence=None, question='', replaces=()),)
    """
    tasks = {t.casefold(): t for t in task_ids}
    entries = {e: e for e in entry_ids}
    rules: dict[tuple[str, str], Rule] = {}
    verdicts: list[EntryVerdict] = []
    rejected: list[RejectedRow] = []
    is_form = False
    for value in json_values(text):
        rows, judged, fits = _lists(value)
        is_form = is_form or fits
        for row in rows:
            rule = _rule(row, tasks, entries)
            if isinstance(rule, str):
                rejected.append(RejectedRow(repr(row)[:160], rule))
            else:
                rules.setdefault((rule.text, rule.entry_id), rule)
        verdicts += [v for v in (_verdict(r, tasks, entries) for r in judged) if v is not None]
    if not is_form:
        raise ReplyError('the reply has not the form asked for: {"rules": [{"text": "..."}], ...}')
    if rejected and not rules and not verdicts:
        raise ReplyError(rejected[0].reason)
    return PanelReply(tuple(rules.values()), tuple(verdicts), tuple(rejected))


def _lists(value: Any) -> tuple[list[Any], list[Any], bool]:
    """Return rows that may be rules, rows that may be verdicts, and whether the form fits."""
    if isinstance(value, list):
        rows = [r for r in value if isinstance(r, dict) and _text(r)]
        return rows, [], bool(rows) or not value
    if not isinstance(value, dict):
        return [], [], False
    folded = {str(k).strip().casefold(): v for k, v in value.items()}
    named = [folded[k] for k in _LISTS if isinstance(folded.get(k), list)]
    judged = folded.get("entries")
    rows = [row for rows in named for row in rows]
    if not named and _text(value):
        rows = [value]
    judged = judged if isinstance(judged, list) else []
    return rows, judged, bool(named or rows or judged)


def _rule(row: Any, tasks: Mapping[str, str], entries: Mapping[str, str]) -> Rule | str:
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, dict):
        return "a rule is an object with a text"
    text = _text(row)
    if len(text.split()) < _LEAST_WORDS:
        return "a rule without a sentence"
    return Rule(
        text=text,
        topic=clean_topic(row.get("topic")),
        entry_id=resolve(row.get("id"), entries) or "",
        support=_ids(row.get("support"), tasks),
        against=_ids(row.get("against"), tasks),
        confidence=_share(row.get("confidence")),
        question=_question(row.get("open_question")),
        replaces=tuple(
            key for key in (resolve(r, entries) for r in _as_list(row.get("replaces"))) if key
        ),
    )


def _verdict(row: Any, tasks: Mapping[str, str], entries: Mapping[str, str]) -> EntryVerdict | None:
    if not isinstance(row, dict):
        return None
    entry = resolve(row.get("id"), entries)
    said = _VERDICTS.get(str(row.get("verdict", "")).strip().casefold())
    if entry is None or said is None:
        return None
    cited = _ids(row.get("tasks", row.get("support")), tasks)
    return EntryVerdict(entry, said, cited)  # type: ignore[arg-type]


def _text(row: Mapping[Any, Any]) -> str:
    for key in _TEXTS:
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            return value.strip()
        if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
            return "\n".join(v.strip() for v in value)
    return ""


def _ids(raw: Any, tasks: Mapping[str, str]) -> tuple[str, ...]:
    found = [tasks.get(str(r).strip(" []().,'\"").casefold()) for r in _as_list(raw)]
    return tuple(dict.fromkeys(t for t in found if t is not None))


def _as_list(raw: Any) -> list[Any]:
    if raw is None:
        return []
    if isinstance(raw, str):
        return [r for r in raw.replace(";", ",").split(",") if r.strip()]
    return raw if isinstance(raw, list) else [raw]


def _share(raw: Any) -> float | None:
    words = {"high": 0.9, "medium": 0.6, "low": 0.3}
    if isinstance(raw, str) and raw.strip().casefold() in words:
        return words[raw.strip().casefold()]
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        return None
    try:
        value = float(raw)
    except (ValueError, OverflowError):
        return None
    return value if 0 <= value <= 1 else None


def _question(raw: Any) -> str:
    return " ".join(raw.split())[:200] if isinstance(raw, str) else ""
