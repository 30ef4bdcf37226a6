"""Which tokens of a reply belong to which line, thought or phrase, read off their texts.

Does not know estimators. Source: own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from tfgrpo.runtime.canonical import digest

TextOf = Callable[[Sequence[int]], str]


def lines_of(token_ids: Sequence[int], text_of: TextOf, separator: str) -> tuple[int, ...]:
    """Return the number of the line of each token; the token that ends a separator ends a line.

    >>> lines_of([97, 10, 98, 10], lambda ids: "".join(map(chr, ids)), chr(10))
    (0, 0, 1, 1)
    """
    found, line, tail = [], 0, ""
    for token in token_ids:
        found.append(line)
        tail += text_of([token])
        if separator in tail:
            line, tail = line + 1, ""
        tail = tail[-max(1, len(separator) - 1) :] if tail else tail
    return tuple(found)


def states_of_lines(token_ids: Sequence[int], step_T: Sequence[int]) -> tuple[Hashable, ...]:
    """Return a key of the tokens before each line."""
    first = {step: i for i, step in reversed(list(enumerate(step_T)))}
    return tuple(digest(list(token_ids[: first[k]]), 16) for k in sorted(first))


def thinking_tokens(token_ids: Sequence[int], text_of: TextOf, mark: str = "</think>") -> int:
    """Return how many tokens the thinking takes, its closing mark included; 0 without a mark."""
    if mark not in text_of(token_ids):
        return 0
    low, high = 1, len(token_ids)
    while low < high:
        middle = (low + high) // 2
        if mark in text_of(token_ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return low


def planning(
    token_ids: Sequence[int], text_of: TextOf, phrases: Sequence[str]
) -> tuple[float, ...]:
    """Return 1 for each token that touches a phrase, else 0.

    Tokens are read one by one and compared without white space and case, since a tokenizer may
    drop leading spaces of a lone token.
    """
    pieces = ["".join(text_of([t]).split()).casefold() for t in token_ids]
    text = "".join(pieces)
    ends = np.cumsum([len(p) for p in pieces])
    touched = [0.0] * len(pieces)
    for phrase in phrases:
        wanted = "".join(phrase.split()).casefold()
        for match in re.finditer(re.escape(wanted), text) if wanted else ():
            first = int(np.searchsorted(ends, match.start(), side="right"))
            last = int(np.searchsorted(ends, match.end(), side="left"))
            touched[first : last + 1] = [1.0] * (last + 1 - first)
    return tuple(touched)


def before_first(touched_T: Sequence[float], step_T: Sequence[int]) -> tuple[float, ...]:
    """Return 1 for a step's tokens before its first touched one; 0 in steps without any.

    >>> before_first([0, 0, 1, 0, 0], [0, 0, 0, 1, 1])
    (1.0, 1.0, 0.0, 0.0, 0.0)
    """
    first: dict[int, int] = {}
    for i, (is_touched, step) in enumerate(zip(touched_T, step_T, strict=True)):
        if is_touched:
            first.setdefault(step, i)
    return tuple(float(i < first.get(step, -1)) for i, step in enumerate(step_T))
