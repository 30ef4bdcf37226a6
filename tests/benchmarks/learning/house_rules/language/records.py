"""Reading a task: the record in square brackets that a task's text holds.

A record is `[name: value; name: value; name: value]`, three pairs or more. Does not know tasks of
any family.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PAIR = r"[A-Za-z][\w \-]*: [^;:\[\]\n]+"
_RECORD = re.compile(rf"\[({_PAIR}(?:; {_PAIR}){{2,}})\]")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

Record = dict[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """A record and where it stands in a text."""

    start: int
    end: int
    record: Record


def find_records(text: str) -> list[Found]:
    """Return every record of a text in order."""
    found = []
    for m in _RECORD.finditer(text):
        pairs = [p.split(": ", 1) for p in m[1].split("; ")]
        found.append(Found(m.start(), m.end(), {k.strip(): v.strip() for k, v in pairs}))
    return found


def number(text: str) -> float | None:
    """Return the number that a text is, or None.

    >>> number("12"), number("twelve")
    (12.0, None)
    """
    return float(text) if _NUMBER.fullmatch(text.strip()) else None


def key_of(record: Record) -> tuple[tuple[str, str], ...]:
    """A record as something that can be compared and hashed."""
    return tuple(sorted(record.items()))
