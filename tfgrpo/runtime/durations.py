"""Seconds in the words that people use.

Does not know what takes so long. Source: own.
"""

from __future__ import annotations

__all__ = ["duration_words"]


def duration_words(seconds: float) -> str:
    """Return a duration with two units at most.

    >>> [duration_words(s) for s in (0.4, 47, 90, 3600, 12306)]
    ['1 s', '47 s', '1 min 30 s', '1 h', '3 h 25 min']
    """
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return _two(whole // 60, "min", whole % 60, "s")
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return _two(minutes // 60, "h", minutes % 60, "min")


def _two(first: int, unit: str, rest: int, small: str) -> str:
    return f"{first} {unit}" + (f" {rest} {small}" if rest else "")
