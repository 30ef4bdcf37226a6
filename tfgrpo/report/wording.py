"""How the test arms are worded, the same in HTML and Markdown.

Does not know markup. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ARM_WORDS", "best_of_lines", "range_words", "reward_words"]

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
