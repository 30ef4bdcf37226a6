"""Figures and data as words for people, the same in HTML and Markdown.

Does not know markup. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfgrpo.runtime.durations import duration_words

__all__ = [
    "ARM_WORDS",
    "best_of_lines",
    "count_words",
    "plain_lines",
    "range_words",
    "reward_words",
    "span_words",
    "time_words",
]

ARM_WORDS = {"empty": "no library", "final": "with the library"}


def best_of_lines(s: Mapping[str, Any]) -> list[str]:
    """Return one line an arm on its best of k draws, where there are draws enough."""
    lines = []
    for arm in s["arms"]:
        name = "pass" if arm["is_binary"] else "max"
        parts = [
            f"{name}@{row['k']} {reward_words(row)} ({range_words(row)})" for row in arm["best_of"]
        ]
        if parts:
            lines.append(f"{ARM_WORDS[arm['arm']]}: " + ", ".join(parts))
    return lines


def reward_words(row: Mapping[str, Any]) -> str:
    """The estimate."""
    return f"{row['estimate']:.3f}"


def range_words(row: Mapping[str, Any]) -> str:
    """The interval's ends."""
    return f"{row['low']:.3f} to {row['high']:.3f}"


def count_words(n: int, noun: str) -> str:
    """Return a count with its noun.

    >>> count_words(1, "step"), count_words(1200, "step"), count_words(2, "entry")
    ('1 step', '1,200 steps', '2 entries')
    """
    many = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{n:,} {noun if n == 1 else many}"


def span_words(low: float | None, high: float | None, form: str = ",.0f") -> str:
    """Return a range of numbers; one where both ends are the same.

    >>> span_words(2, 1200), span_words(3, 3), span_words(None, 3)
    ('2 to 1,200', '3', 'unknown')
    """
    if low is None or high is None:
        return "unknown"
    ends = [format(low, form), format(high, form)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def time_words(low: float | None, high: float | None) -> str:
    """Return a range of durations."""
    if low is None or high is None:
        return "unknown"
    ends = ["under 1 s" if x < 1 else duration_words(x) for x in (low, high)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def plain_lines(value: Any, lead: str = "") -> list[str]:
    """Return JSON as lines that a person reads.

    >>> plain_lines({"order": 4711, "items": ["tea", "milk"], "gift": None})
    ['order: 4711', 'items:', '  - tea', '  - milk', 'gift: none']
    """
    if isinstance(value, Mapping):
        lines = []
        for name, part in value.items():
            if isinstance(part, (Mapping, list)) and part:
                lines += [f"{lead}{name}:", *plain_lines(part, lead + "  ")]
            else:
                lines.append(f"{lead}{name}: {_plain(part)}")
        return lines
    if isinstance(value, list):
        return [
            line
            for part in value
            for line in (
                [f"{lead}-", *plain_lines(part, lead + "  ")]
                if isinstance(part, (Mapping, list))
                else [f"{lead}- {_plain(part)}"]
            )
        ]
    return [f"{lead}{_plain(value)}"]


def _plain(value: Any) -> str:
    if isinstance(value, (Mapping, list)):
        return "nothing"
    if value is None:
        return "none"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
