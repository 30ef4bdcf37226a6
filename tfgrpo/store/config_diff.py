"""What may be kept: values without secrets; and two configs side by side.

Does not know what a key means. Source: own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfgrpo.runtime.redaction import redact

ABSENT = object()


def without_secrets(value: Any) -> Any:
    """Return a JSON value with every text redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: without_secrets(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class ResumeRule:
    """How the settings of a resumed run may differ from the kept ones; by default not at all."""

    may_change: Collection[str] = ()
    """Dotted config keys that may change; a section covers its keys."""
    defaults: Mapping[str, Any] | None = None
    """Default settings: a key that an older run lacks is unchanged at its default."""


def without_keys(value: Any, keys: Collection[str], *path: str) -> Any:
    """Return settings without some dotted keys; a section covers its keys.

    >>> without_keys({"lm": "a", "cap": {"usd": 1}, "f": {"x": {"at": 1}}}, {"cap", "f.*.at"})
    {'lm': 'a', 'f': {'x': {}}}
    """
    if not isinstance(value, Mapping):
        return value
    return {
        name: without_keys(item, keys, *path, name)
        for name, item in value.items()
        if not any(_covers(key.split("."), [*path, name]) for key in keys)
    }


def difference(
    kept: Any,
    asked: Any,
    may_change: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return one line for each key that differs, by dotted path, except those that may.

    A key that the kept settings lack, since they are older than it, is unchanged where it has its
    default value; so is one that said nothing (None) and is gone.

    >>> difference({"lm": "a"}, {"lm": "a", "new": 1}, defaults={"new": 1})
    []
    >>> difference({"lm": "a", "cap": 1}, {"lm": "b", "cap": 2}, {"cap"})
    ["lm: 'a' -> 'b'"]
    >>> difference({"f": {"x": {"at": 1}}}, {"f": {"x": {"at": 2}}}, {"f.*.at"})
    []
    """
    lines = []
    for path, old, new in _changes("", kept, asked, defaults or {}):
        if not any(_covers(rule.split("."), path.split(".")) for rule in may_change):
            lines.append(f"{path}: {_words(old)} -> {_words(new)}")
    return lines


def _covers(rule: Sequence[str], path: Sequence[str]) -> bool:
    """Tell whether a dotted rule names a key or a section around it; `*` stands for any name."""
    return len(rule) <= len(path) and all(r in ("*", p) for r, p in zip(rule, path))


def _changes(
    path: str, old: Any, new: Any, default: Any = ABSENT
) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            inner = f"{path}.{name}" if path else name
            usual = default.get(name, ABSENT) if isinstance(default, Mapping) else ABSENT
            yield from _changes(inner, old.get(name, ABSENT), new.get(name, ABSENT), usual)
    elif old is ABSENT:
        if default is ABSENT or new != default:
            yield path, old, new
    elif new is ABSENT:
        if old is not None:
            yield path, old, new
    elif old != new:
        yield path, old, new


def _words(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
