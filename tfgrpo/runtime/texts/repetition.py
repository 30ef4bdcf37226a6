"""Going round in circles: whether the last marks of a sequence repeat themselves.

Does not know what a mark stands for. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MAX_CYCLES", "MAX_REPEATS", "goes_round"]

MAX_REPEATS = 5
"""Equal marks in a row that are no progress."""
MAX_CYCLES = 3
"""Repetitions of a cycle of marks that are no progress."""
_LONGEST_CYCLE = 8


def goes_round(
    marks: Sequence[str], max_repeats: int = MAX_REPEATS, max_cycles: int = MAX_CYCLES
) -> bool:
    """Return whether the sequence ends in `max_repeats` equal marks, or in `max_cycles` times the
    same cycle of two to eight marks.

    >>> goes_round("aaaaa"), goes_round("aaaa"), goes_round("cababab")
    (True, False, True)
    """
    if _ends_in(marks, 1, max_repeats):
        return True
    return any(_ends_in(marks, length, max_cycles) for length in range(2, _LONGEST_CYCLE + 1))


def _ends_in(marks: Sequence[str], length: int, times: int) -> bool:
    last = marks[-length * times :]
    if times < 2 or len(last) < length * times:
        return False
    return all(mark == last[i % length] for i, mark in enumerate(last))
