"""Notations that any reader knows: of dates, names, amounts and codes, by their usual descriptions.

A target `as:NOTATION` stands for "the field of the part's own name, written so". Does not know
which notation a house wants.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

AS = "as:"
_DATE = re.compile(r"\d{1,2} [A-Z][a-z]+ \d{4}")
_NAME = re.compile(r"[a-z]+ [a-z]+")
_AMOUNT = re.compile(r"\d+\.\d\d")
_CODE = re.compile(r"[a-z]+-\d+")
_DATES = ("YYYY-MM-DD", "DD.MM.YYYY", "MM-DD-YYYY", "YYYY/MM/DD", "DD/MM/YYYY")
_NAMES = ("First Surname", "Surname, First", "SURNAME, First", "F. Surname")
_AMOUNTS: dict[str, Callable[[str], str]] = {
    "two decimals": lambda s: s,
    "cents": lambda s: s.replace(".", "").lstrip("0"),
    "a decimal comma": lambda s: s.replace(".", ","),
    "whole units": lambda s: str(int(float(s))),
}
_CODES: dict[str, Callable[[str], str]] = {
    "lower case with hyphen": lambda s: s,
    "upper case with hyphen": str.upper,
    "upper case without hyphen": lambda s: s.upper().replace("-", ""),
}


def notations(value: str) -> tuple[str, ...]:
    """Return the notations that fit a value, the most usual first; empty for any other value.

    >>> notations("80.25")[1]
    'cents'
    """
    if _DATE.fullmatch(value):
        return _DATES
    if _AMOUNT.fullmatch(value):
        return tuple(_AMOUNTS)
    if _CODE.fullmatch(value):
        return tuple(_CODES)
    if _NAME.fullmatch(value):
        return _NAMES
    return ()


def write(value: str, notation: str) -> str | None:
    """Return a value in a notation, None where the notation does not fit it.

    >>> write("3 March 2024", "DD.MM.YYYY"), write("ab-12", "upper case without hyphen")
    ('03.03.2024', 'AB12')
    """
    if notation not in notations(value):
        return None
    if notation in _AMOUNTS:
        return _AMOUNTS[notation](value)
    if notation in _CODES:
        return _CODES[notation](value)
    if notation in _DATES:
        day = datetime.strptime(value, "%d %B %Y")
        out = notation.replace("YYYY", f"{day.year}").replace("MM", f"{day.month:02d}")
        return out.replace("DD", f"{day.day:02d}")
    first, surname = value.split()
    out = notation.replace("FIRST", first.upper()).replace("SURNAME", surname.upper())
    out = out.replace("First", first.capitalize()).replace("F.", first[0].upper() + ".")
    return out.replace("Surname", surname.capitalize())


def read_notation(words: str, value: str) -> str | None:
    """Return the notation of `value` that words describe, by name, by pattern or by example."""
    best = ""
    text = words.lower().replace(",", "").replace("capitals", "upper case")
    text = text.replace("capital letters", "upper case").replace("uppercase", "upper case")
    text = text.replace("lowercase", "lower case").replace("hyphens", "hyphen")
    text = text.replace("letters ", "").replace("and no hyphen", "without hyphen")
    text = text.replace("no hyphen", "without hyphen").replace("and without", "without")
    text = text.replace("case, without", "case without").replace("the hyphen", "hyphen")
    for notation in notations(value):
        exact = notation in words or (notation not in _NAMES and notation.lower() in text)
        if exact and len(notation) > len(best):
            best = notation
    if best:
        return best
    if _AMOUNT.fullmatch(value):
        if re.search(r"whole|without (?:any )?decimals|no decimals|rounded down", text):
            return "whole units"
        if re.search(r"comma", text):
            return "a decimal comma"
    return None


def targets(part: str, literal: str, record: dict[str, str]) -> tuple[str, ...]:
    """Return what could be meant by a part's value: the literal, or a notation that yields it."""
    value = next((v for k, v in record.items() if k.lower() == part.lower()), None)
    if value is None:
        return (literal,)
    fits = [AS + n for n in notations(value) if write(value, n) == literal]
    return (*fits, literal)
