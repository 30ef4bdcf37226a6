"""When two replies have the same final answer, whatever is right.

Does not know references. Source: own.
"""

from __future__ import annotations

from decimal import Decimal

from tfgrpo.verifiers.answer import boxed, compiled
from tfgrpo.verifiers.numbers import CONTEXT, numbers_in, whole_number
from tfgrpo.verifiers.patterns import try_pattern_now

__all__ = ["answer_class"]


def _plain(value: Decimal) -> str:
    """Return a number's one text: equal for equal numbers."""
    return format(value.normalize(CONTEXT), "f") if abs(value.adjusted()) < 100 else str(value)


def answer_class(text: str, pattern: str = "", where: str = "pattern") -> str:
    r"""Return what makes two final answers the same: a match of a pattern, a box, a number, all.

    >>> answer_class(r"so \boxed{1/2}"), answer_class("it is 1,200."), answer_class(" Paris ")
    ('0.5', '1200', 'paris')
    """
    if pattern:
        found = try_pattern_now(compiled(pattern, where), text, "last")
        return " ".join((text if found is None else found).split()).casefold()
    in_box = boxed(text)
    if in_box is not None:
        value = whole_number(in_box)
        return "".join(in_box.split()) if value is None else _plain(value)
    numbers = numbers_in(text)
    if numbers:
        return _plain(numbers[-1][0])
    return " ".join(text.split()).casefold()
