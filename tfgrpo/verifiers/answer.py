r"""The answer inside a reply: a pattern's match, the last `\boxed{...}`, a JSON value.

Does not know what is right. Source: own.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.canonical import digest
from tfgrpo.runtime.json_schema import load_json

__all__ = ["boxed", "compiled", "extracted", "find_json", "short", "verifier_name"]

MOST_CHARS = 100_000
"""Longest answer that patterns are tried on; of longer ones the end counts."""


def verifier_name(kind: str, settings: Any) -> str:
    """Return an id that is equal exactly for equal kind and settings."""
    return f"{kind}-{digest(settings, 12)}"


def compiled(pattern: str, where: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """Return a compiled pattern; raises `ConfigError` where it is none."""
    try:
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except re.error as exc:
        raise ConfigError(f"{where}: {pattern!r} is not a regular expression: {exc}") from exc


def extracted(answer: str, pattern: re.Pattern[str] | None) -> str | None:
    """Return the last match of `pattern` (its first group, where it has groups), or None.

    >>> extracted("Answer: 4. Answer: 5", re.compile(r"Answer: (\\d)"))
    '5'
    """
    if pattern is None:
        return answer
    last = deque(pattern.finditer(answer[-MOST_CHARS:]), maxlen=1)
    if not last:
        return None
    found = last[0]
    return next((g for g in found.groups() if g is not None), "") if found.re.groups else found[0]


def boxed(text: str) -> str | None:
    r"""Return what stands in the last complete `\boxed{...}`, braces balanced, or None.

    >>> boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth, first = 0, start + len("\\boxed")
        for i in range(first, len(text)):
            if text[i] == "{":
                depth += 1
            elif text[i] == "}":
                depth -= 1
                if depth == 0:
                    return text[first + 1 : i]
        end = start
    return None


_FENCE = re.compile(r"```[a-zA-Z]*\s*\n(.*?)```", re.DOTALL)


def find_json(text: str) -> Any:
    """Return the JSON value of a reply: the whole, the last fenced block, or the last object in it.

    Raises:
        ValueError: there is none.
    """
    text = text[-MOST_CHARS:].strip()
    fenced = [m[1].strip() for m in _FENCE.finditer(text)]
    for candidate in (text, *reversed(fenced)):
        try:
            return load_json(candidate)
        except ValueError:
            continue
    for candidate in reversed(_objects(text)):
        try:
            return load_json(candidate)
        except ValueError:
            continue
    raise ValueError("no JSON object in the answer")


def _objects(text: str) -> list[str]:
    """Return the outermost balanced `{...}` of a text, braces inside strings left out."""
    found: list[str] = []
    depth, start, in_string, escaped = 0, 0, False, False
    for i, char in enumerate(text):
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif depth and char == '"':
            in_string, escaped = True, False
        elif char == "{":
            start = i if depth == 0 else start
            depth += 1
        elif char == "}" and depth:
            depth -= 1
            if depth == 0:
                found.append(text[start : i + 1])
    return found


def short(value: Any, most: int = 200) -> str:
    """Return a value for feedback, cut in the middle where it is long."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > most:
        half = (most - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return repr(text) if isinstance(value, str) else text
