"""Levenshtein distance of two sequences. Source: Wagner and Fischer, J. ACM 21(1), 1974."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["edit_ratio"]


def edit_ratio(first: Sequence[Any], second: Sequence[Any]) -> float:
    """Return the edit distance divided by the longer length: 0 equal, 1 nothing in common.

    >>> edit_ratio("abcd", "abxd"), edit_ratio("", "")
    (0.25, 0.0)
    """
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    longest = max(len(first), len(second))
    return row[-1] / longest if longest else 0.0
