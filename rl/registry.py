"""Named pure functions with their provenance: losses, aggregations, advantages, rewards, credit.

A registry is a plain dictionary; `register` is the only way in and refuses an entry that lacks
a source, a formula, a certainty or the test that proves it. Does not know what the functions
compute. Idea: one registry for the variants that elsewhere live in forks (own).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from tfgrpo.errors import ConfigError

Certainty = Literal["code", "paper", "approximation"]
"""Where the formula was read: released code, the paper's text, or our reading of an abstract."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One named function."""

    name: str
    fn: Callable[..., Any]
    source: str
    """Paper or repository, with section or file."""
    formula: str
    """The rule in one line of plain text."""
    certainty: Certainty
    test: str
    """`path::test_name` of the closed-form test."""
    needs: tuple[str, ...] = ()
    """What the trainer must supply or do: `sequence` (the loss of a token depends on its whole
    row), `group` (on its whole group), `entropy`, `reference`, `behaviour` (the engine's own
    log-probs)."""


def register(
    registry: dict[str, Entry],
    name: str,
    *,
    source: str,
    formula: str,
    certainty: Certainty,
    test: str,
    needs: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that files a function in `registry` under `name`.

    Raises:
        ValueError: the name is taken, or a text is empty.
    """
    if name in registry:
        raise ValueError(f"{name!r} is registered twice")
    for field, text in (("source", source), ("formula", formula), ("test", test)):
        if not text.strip():
            raise ValueError(f"entry {name!r} has no {field}")

    def keep(fn: Callable[..., Any]) -> Callable[..., Any]:
        registry[name] = Entry(name, fn, source, formula, certainty, test, needs)
        return fn

    return keep


def lookup(registry: Mapping[str, Entry], kind: str, name: str) -> Entry:
    """Return an entry; a wrong name is a `ConfigError` that suggests the nearest."""
    if name in registry:
        return registry[name]
    near = get_close_matches(name, registry, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"no {kind} {name!r}{hint} Known: {', '.join(sorted(registry))}")
