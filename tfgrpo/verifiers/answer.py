r"""The answer inside a reply: a pattern's match, the last `\boxed{...}`, a JSON value.

Does not know what is right. Source: own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.canonical import digest, integer_text, repr_of
from tfgrpo.runtime.json_text import best_json
from tfgrpo.verifiers.patterns import try_pattern

__all__ = ["UnitVerifier", "boxed", "compiled", "extracted", "find_json", "short", "verifier_name"]

MOST_CHARS = 100_000
"""Longest answer that patterns are tried on; of longer ones the end counts."""


def verifier_name(kind: str, settings: Any) -> str:
    """Return an id that is equal exactly for equal kind and settings."""
    return f"{kind}-{digest(settings, 12)}"


class UnitVerifier:
    """Base of a verifier whose rewards lie from 0 to 1 and whose id its kind and options fix."""

    def __init__(self, kind: str, settings: Any) -> None:
        self._verifier_id = verifier_name(kind, settings)

    @property
    def verifier_id(self) -> str:
        """Fixed by the kind and by every option that can change a score."""
        return self._verifier_id

    @property
    def reward_range(self) -> tuple[float, float]:
        """0 to 1."""
        return 0.0, 1.0


def compiled(pattern: str, where: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """Return a compiled pattern; raises `ConfigError` where it is none."""
    try:
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except re.error as exc:
        raise ConfigError(f"{where}: {pattern!r} is not a regular expression: {exc}") from exc


async def extracted(answer: str, pattern: re.Pattern[str] | None) -> str | None:
    """Return the last match of `pattern` (its first group, where it has groups), or None.

    Without a pattern the answer itself. Raises `VerifierError` where matching finds no end.
    """
    if pattern is None:
        return answer
    found: str | None = await try_pattern(pattern, answer[-MOST_CHARS:], "last")
    return found


_BOX = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def boxed(text: str) -> str | None:
    r"""Return what stands in the last complete `\boxed{...}`, braces balanced, or None.

    >>> boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    opened: list[int] = []  # where each open brace's content begins; negative: no box
    last = (-1, -1)
    for found in _BOX.finditer(text):
        if found[0] == "}":
            if opened and (start := opened.pop()) > last[0]:
                last = (start, found.start())
        elif found[0] == "{":
            opened.append(-1)
        elif found[0].endswith("{") and len(found[0]) > 2:
            opened.append(found.end())
    return None if last[0] < 0 else text[last[0] : last[1]]


def find_json(text: str, fits: Callable[[Any], float]) -> Any:
    """Return the JSON value of a reply that fits best in shape (see `json_text.best_json`).

    Raises:
        ValueError: there is none.
    """
    found = best_json(text[-MOST_CHARS:], fits)
    if found is None:
        raise ValueError("no JSON value in the answer")
    return found.value


def reference_text(value: Any) -> str:
    """Return a reference that is a text or a number as text."""
    return integer_text(value) if type(value) is int else str(value)


def short(value: Any, most: int = 200) -> str:
    """Return a value for feedback, cut in the middle where it is long."""
    text = value if isinstance(value, str) else repr_of(value)
    if len(text) > most:
        half = (most - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return repr(text) if isinstance(value, str) else text
