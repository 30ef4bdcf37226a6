"""Names of tools on the wire: what servers accept, one to one with the tools' own names.

Servers demand letters, digits, `_` and `-`, at most 64. Names that fit stay; others are rewritten
and kept apart by a number, so that each name on the wire means one tool. Does not know schemas.
Source: the chat-completions wire format; own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["wire_name", "wire_names"]

_LONGEST = 64


def wire_name(name: str) -> str:
    """Return the form of a tool's name that providers accept: letters, digits, `_`, `-`, 64 long.

    >>> wire_name("math.area")
    'math_area'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_LONGEST] or "_"


def wire_names(names: Iterable[str]) -> dict[str, str]:
    """Return each name's form on the wire; no two are equal, and what fits is unchanged.

    >>> wire_names(["a.b", "a_b", "a/b"])
    {'a.b': 'a_b_2', 'a_b': 'a_b', 'a/b': 'a_b_3'}
    """
    names = list(dict.fromkeys(names))
    taken = {n for n in names if wire_name(n) == n}
    forms: dict[str, str] = {}
    for name in names:
        form, number = wire_name(name), 2
        while form != name and form in taken:
            end = f"_{number}"
            form, number = wire_name(name)[: _LONGEST - len(end)] + end, number + 1
        taken.add(form)
        forms[name] = form
    return forms
