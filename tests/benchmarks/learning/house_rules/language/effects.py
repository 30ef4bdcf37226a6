"""Reading what a rule does: the part of the answer, its value, or how the value is changed.

Does not know situations or whole sentences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.benchmarks.learning.house_rules.language.answers import known_value
from tests.benchmarks.learning.house_rules.language.conditions import Condition, content
from tests.benchmarks.learning.house_rules.language.records import number

_LINK = re.compile(
    r"^(?:\s|[:=]|\b(?:is|are|as|to|must|should|be|being|becomes?|gets?|will|written|set|use|the|"
    r"always|it|an?|goes|go|of|put|answer|in)\b)*", re.I,
)  # fmt: skip
_MODIFIERS: tuple[tuple[str, str, float | None], ...] = (
    (r"\b(?:doubled?|doubles|twice)\b", "times", 2.0),
    (r"\b(?:halved?|halves)\b", "times", 0.5),
    (r"\b(?:tripled?|triples)\b", "times", 3.0),
    (r"(?:\btimes|×|multiplied by|multiply by) ?(\d+(?:\.\d+)?)", "times", None),
    (r"\b(?:lower(?:ed)?|reduced?|decreased?|minus|subtract|less|cut|down)\b(?: by)? ?"
     r"(\d+(?:\.\d+)?)", "minus", None),
    (r"\b(?:raised?|increased?|plus|add|more|higher|up)\b(?: by)? ?(\d+(?:\.\d+)?)", "plus", None),
    (r"(\d+(?:\.\d+)?) (?:points? |percent )?(?:less|lower|fewer)\b", "minus", None),
    (r"(\d+(?:\.\d+)?) (?:points? |percent )?(?:more|higher)\b", "plus", None),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Words:
    """The names that a prompt gives."""

    parts: tuple[str, ...]
    fields: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Parts and fields in lower case, without doubles."""
        return tuple(dict.fromkeys(n.lower() for n in (*self.fields, *self.parts)))


@dataclass(frozen=True, slots=True)
class Rule:
    """In a situation, a part of the answer has a value, or its value is changed."""

    part: str
    kind: str
    """`value`, `times`, `plus`, `minus`."""
    value: str
    condition: Condition = field(default_factory=Condition)
    is_strong: bool = False
    source: str = ""
    """The words that state it, as far as they were cut."""


def names_of(words: Words) -> tuple[str, ...]:
    return tuple(n.replace(" ", "_") for n in words.names)


def mentions(text: str, parts: Sequence[str]) -> list[str]:
    """Return the parts that a text names, in order."""
    found = []
    for part in parts:
        token = part.replace(" ", "_")
        m = re.search(pattern_of(token), text, re.I)
        if m:
            found.append((m.start(), part))
    return [p for _, p in sorted(found)]


def pattern_of(part: str) -> str:
    if part.endswith("y"):
        return rf"\b(?:{re.escape(part)}|{re.escape(part[:-1])}ies)\b"
    return rf"\b{re.escape(part)}s?\b"


def left_over(said: str, rules: Sequence[Rule], words: Words) -> str:
    """Return what a saying without "if" or "for" says beside part and value: its situation."""
    if not all(words.options.get(r.part) for r in rules):
        return ""
    rest = said
    for part in words.parts:
        rest = re.sub(pattern_of(part.replace(" ", "_")), " ", rest, flags=re.I)
    for rule in rules:
        rest = re.sub(rf"(?<!\w){re.escape(rule.value)}(?!\w)", " ", rest, flags=re.I)
    for pattern, _, _ in _MODIFIERS:
        rest = re.sub(pattern, " ", rest, flags=re.I)
    return " ".join(w for w in rest.split() if content(w))


def effects_of(said: str, part: str, words: Words) -> list[Rule]:
    """Return what a saying does to the parts that it names, or to the part spoken of before."""
    mentions = []
    for p in words.parts:
        m = re.search(pattern_of(p.replace(" ", "_")), said, re.I)
        if m:
            mentions.append((m.start(), m.end(), p))
    mentions.sort()
    if not mentions:
        if not part:
            part = _part_of(said, words)
        effect = _effect(said, part, words) if part else None
        return [effect] if effect else []
    rules = []
    for i, (start, end, p) in enumerate(mentions):
        stop = mentions[i + 1][0] if i + 1 < len(mentions) else len(said)
        after = re.sub(r",?\s*(?:and|,)?\s*(?:the|a|its)?\s*$", "", said[end:stop])
        before = said[mentions[i - 1][1] if i else 0 : start]
        effect = _effect(after, p, words) or _effect(before, p, words)
        if effect:
            rules.append(effect)
    return rules


def _part_of(said: str, words: Words) -> str:
    """Return the part one of whose values is said."""
    for part, options in words.options.items():
        found = known_value(said, options)
        if found and not found.isdigit():
            return part
    return ""


def _effect(raw: str, part: str, words: Words) -> Rule | None:
    value = value_of(raw, part, words)
    options = words.options.get(part, ())
    is_number = bool(options) and all(number(re.split(r"\s", o)[0]) is not None for o in options)
    if is_number or (not options and any(ch.isdigit() for ch in raw)) or not options:
        for pattern, kind, fixed in _MODIFIERS:
            m = re.search(pattern, raw, re.I)
            if m:
                amount = fixed if fixed is not None else float(m[1])
                return Rule(part, kind, f"{amount:g}")
    return Rule(part, "value", value) if value else None


def value_of(raw: str, part: str, words: Words) -> str:
    """Return the value of a part that words name; empty where they name none."""
    quoted = re.search(r"[\"'“‘]([^\"'”’]+)[\"'”’]", raw)
    options = words.options.get(part, ())
    if options:
        known = known_value(quoted[1] if quoted else raw, options)
        if known:
            return known
        if quoted:
            return quoted[1]
        m = re.match(r"\D{0,12}(-?\d+(?:\.\d+)?)\b", _LINK.sub("", raw))
        return m[1] if m and all(o.replace(".", "").isdigit() for o in options) else ""
    if quoted:
        return quoted[1]
    left = _LINK.sub("", raw).strip(" .,")
    return left if 0 < len(left.split()) <= 8 else ""
