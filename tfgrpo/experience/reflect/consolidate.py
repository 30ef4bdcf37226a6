"""Bringing rules together without losing what they say.

A rule is about a subject: the heading of its table, or the situation that it names. Rewriting a
topic as a whole is allowed only where every value and label of its confirmed entries still stands
in the new text. Pure. Does not know prompts or who is asked. Source: own; against the collapse of
context that ACE describes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tfgrpo.experience.edits import Edit
from tfgrpo.experience.entry import Experience, Provenance
from tfgrpo.experience.library import Library
from tfgrpo.experience.patterns import STOP_WORDS
from tfgrpo.experience.reflect.conventions import values_of
from tfgrpo.experience.reflect.reply import Rule
from tfgrpo.experience.similarity import words

_CLAUSE = re.compile(r"^(?:when|if|for|where|in|on|unless)\b[^:]*?,\s", re.IGNORECASE)


def subject_of(text: str) -> str:
    """Return what a rule is about: the head of a table, the situation, or its first words.

    >>> subject_of("hours by priority: 1 → 8; 2 → 4.")
    'hours by priority'
    >>> subject_of("When the caller is new, the queue is HW.")
    'when the caller is new'
    """
    clause = _CLAUSE.match(text)
    if clause:
        return " ".join(words(clause[0]))
    head, colon, rest = text.partition(":")
    if colon and rest.strip() and len(head) <= 80:
        return " ".join(words(head))
    return " ".join(words(text)[:4])


def said_values(text: str) -> set[str]:
    """Return what a rule says, as folded words: codes, numbers, quoted text, table cells."""
    found = {w for v in values_of(text) for w in words(v)}
    for cell in re.split(r"[;\n|]|→|->|=>", text) if re.search(r"→|->|=>|\|", text) else ():
        found.update(w for w in words(cell.split(":")[-1]) if w not in STOP_WORDS)
    return found


def lost_values(old: str, new: str) -> list[str]:
    """Return the values and labels of `old` that `new` no longer holds, sorted.

    >>> lost_values("use HW and 24 h", "use HW and 48 h")
    ['24']
    """
    return sorted(said_values(old) - set(words(new)))


def crowded_topics(library: Library, least: int) -> list[tuple[str, list[Experience]]]:
    """Return topics with at least `least` active lessons, with their entries; none for 0."""
    if not least:
        return []
    topics: dict[str, list[Experience]] = {}
    for entry in library.shown:
        if entry.kind == "lesson" and entry.status == "active" and entry.claim.topic:
            topics.setdefault(entry.claim.topic, []).append(entry)
    return [(topic, entries) for topic, entries in topics.items() if len(entries) >= least]


def read_rewrite(
    rules: Sequence[Rule], entries: Sequence[Experience], topic: str
) -> tuple[list[Edit], str]:
    """Return the edits of a topic's rewrite, or none and why it is refused.

    The first entry that a rule replaces gets the new words, the others go.
    """
    by_id = {e.experience_id: e for e in entries}
    named = [key for rule in rules for key in rule.replaces]
    if not rules or len(rules) >= len(entries):
        return [], "the rewrite has not fewer rules than the topic had"
    if len(set(named)) != len(named) or set(named) != set(by_id):
        return [], "the rewrite does not name every entry once"
    whole = "\n".join(rule.text for rule in rules)
    for entry in entries:
        lost = lost_values(entry.text, whole)
        if entry.claim.state != "provisional" and lost:
            return [], f"the rewrite loses {', '.join(lost[:5])} of {entry.experience_id}"
    edits: list[Edit] = []
    for rule in rules:
        if not rule.replaces:
            return [], "a rule of the rewrite replaces no entry"
        first, *others = [by_id[key] for key in rule.replaces]
        claim, provenance = first.claim, Provenance()
        for entry in others:
            claim = claim.joined(entry.claim)
            provenance = provenance | entry.provenance
        reason = f"the topic {topic} was rewritten"
        edits.append(
            Edit("update", rule.text, first.experience_id, provenance=provenance, claim=claim,
                 reason=reason)
        )  # fmt: skip
        edits += [Edit("delete", target=e.experience_id, reason=reason) for e in others]
    return edits, ""
