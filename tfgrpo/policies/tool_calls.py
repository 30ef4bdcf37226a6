"""Calls of tools: reading what a model wrote, and comparing calls made with calls expected.

Does not know who made the calls. Source: own; the text form is that of ReAct (Yao et al. 2023).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.messages import ToolCall
from tfgrpo.protocols import ToolSpec
from tfgrpo.rollout import Rollout
from tfgrpo.runtime.canonical import canonical_json, integer_of, repr_of
from tfgrpo.runtime.json_schema import argument_defaults, check_arguments, json_equal, load_json
from tfgrpo.runtime.texts.tool_names import wire_name
from tfgrpo.runtime.thinking import without_thinking

__all__ = [
    "CallMatch",
    "calls_of",
    "match_calls",
    "parse_action",
    "parse_arguments",
    "resolve_name",
    "wire_name",
]


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments object that a model wrote; an empty text is an empty object.

    Raises:
        ValueError: not JSON (see `schema.load_json`), or not an object.
    """
    value = load_json(text) if text.strip() else {}
    if not isinstance(value, dict):
        raise ValueError(f"arguments are {type(value).__name__}, not an object")
    return value


_DECODER = json.JSONDecoder(parse_int=integer_of)
_ACTION = re.compile(r"^[ \t*]*Action[ \t*]*:[ \t*]*`?([\w.\-/]+)`?[ \t]*", re.MULTILINE)
_INPUT = re.compile(r"\s*(?:^[ \t*]*Action Input[ \t*]*:)?\s*\(?\s*", re.MULTILINE)


def parse_action(text: str) -> ToolCall | None:
    """Return the first call in a text of the form `Action: name {"key": value}`, if there is one.

    The arguments may stand on a line of their own after `Action Input:`. Broken JSON is returned
    as it stands, up to the end of its line, so that the error can be shown to the model.

    >>> parse_action('I look it up.\\nAction: find {"q": "a}b"}\\nObservation: made up')
    ToolCall(call_id='', name='find', arguments='{"q": "a}b"}')
    >>> parse_action("The answer is 4.")
    """
    found = _ACTION.search(text)
    if not found:
        return None
    rest = text[found.end() :]
    gap = _INPUT.match(rest)
    start = gap.end() if gap else 0
    if not rest[start:].startswith("{"):
        line = rest.split("\n", 1)[0].strip()
        return ToolCall("", found[1], line.removesuffix("()").strip())
    try:
        _, end = _DECODER.raw_decode(rest, start)
    except (ValueError, RecursionError):
        return ToolCall("", found[1], rest[start:].split("\n", 1)[0])
    return ToolCall("", found[1], rest[start:end])


def calls_of(rollout: Rollout) -> tuple[ToolCall, ...]:
    """Return every call of a rollout in order, native ones and those written as text."""
    calls: list[ToolCall] = []
    for step in rollout.steps:
        if step.action.tool_calls:
            calls.extend(step.action.tool_calls)
        elif (call := parse_action(without_thinking(step.action.content))) is not None:
            calls.append(call)
    return tuple(calls)


def resolve_name(name: str, known: Sequence[str]) -> str | None:
    """Return the known tool that `name` means: itself, or the only one with that wire name."""
    if name in known:
        return name
    candidates = [k for k in known if wire_name(k) == name]
    return candidates[0] if len(candidates) == 1 else None


@dataclass(frozen=True, slots=True)
class CallMatch:
    """Whether the calls made are the calls expected."""

    is_match: bool
    n_matched: int
    """Expected calls that were made."""
    reasons: tuple[str, ...]
    """Why not, one line a difference; empty exactly when `is_match`."""


Call = ToolCall | Mapping[str, Any]
"""A call as a model made it, or `{"name": ..., "arguments": {...}}`."""


def match_calls(
    expected: Sequence[Call],
    actual: Sequence[Call],
    specs: Sequence[ToolSpec],
    *,
    ordered: bool = False,
) -> CallMatch:
    """Compare calls under the tools' schemas: as a multiset, or in order where `ordered`.

    An argument left out and one that gives the declared default are the same call. An argument
    that the schema does not know, a value of another type, or another value is a difference;
    10 and 10.0 are equal numbers.

    Raises:
        ConfigError: an expected call does not fit its own tool's schema: a fault of the data.
    """
    by_name = {s.name: s for s in specs}
    wanted = []
    for call in expected:
        name, arguments, reasons = _read_call(call, by_name)
        if reasons:
            raise ConfigError(f"expected call {_shown(call)} is not valid: {'; '.join(reasons)}")
        wanted.append((name, arguments))
    made = [_read_call(call, by_name) for call in actual]
    pairs = _pair_in_order(wanted, made) if ordered else _pair_as_set(wanted, made)
    reasons_out: list[str] = []
    matched_made = set(pairs.values())
    loose = [j for j in range(len(made)) if j not in matched_made]
    for i, (name, arguments) in enumerate(wanted):
        if i in pairs:
            continue
        if ordered:
            near = i if i < len(made) and i in loose else None
        else:
            near = next((j for j in loose if made[j][0] == name), None)
        if near is None:
            reasons_out.append(f"{name} was not called with {canonical_json(arguments)}")
            continue
        loose.remove(near)
        reasons_out.extend(_differences(name, arguments, made[near]))
    for j in loose:
        name, _, problems = made[j]
        reasons_out.append(f"{name}: call not expected{''.join('; ' + p for p in problems)}")
    return CallMatch(not reasons_out, len(pairs), tuple(reasons_out))


_Read = tuple[str, dict[str, Any], tuple[str, ...]]


def _read_call(call: Call, by_name: Mapping[str, ToolSpec]) -> _Read:
    given: Any
    if isinstance(call, ToolCall):
        name, given = call.name, call.arguments
    else:
        name, given = str(call["name"]), call.get("arguments") or {}
    if isinstance(given, str):
        try:
            given = parse_arguments(given)
        except ValueError as exc:
            return name, {}, (f"{name}: arguments are not valid: {exc}",)
    resolved = resolve_name(name, list(by_name))
    if resolved is None:
        return name, dict(given), (f"no tool named {name!r}",)
    schema = by_name[resolved].parameters
    reasons = tuple(f"{resolved}: {r}" for r in check_arguments(schema, given))
    defaults = argument_defaults(schema)
    return resolved, defaults | dict(given), reasons


def _is_same(want: tuple[str, dict[str, Any]], made: _Read) -> bool:
    return not made[2] and want[0] == made[0] and json_equal(want[1], made[1])


def _pair_as_set(wanted: Sequence[tuple[str, dict[str, Any]]], made: list[_Read]) -> dict[int, int]:
    # Sameness is an equivalence once defaults are filled in, so first come, first served is best.
    pairs: dict[int, int] = {}
    free = list(range(len(made)))
    for i, want in enumerate(wanted):
        found = next((j for j in free if _is_same(want, made[j])), None)
        if found is not None:
            pairs[i] = found
            free.remove(found)
    return pairs


def _pair_in_order(
    wanted: Sequence[tuple[str, dict[str, Any]]], made: list[_Read]
) -> dict[int, int]:
    return {i: i for i, want in enumerate(wanted) if i < len(made) and _is_same(want, made[i])}


def _differences(name: str, arguments: dict[str, Any], made: _Read) -> list[str]:
    made_name, given, problems = made
    if made_name != name:
        return [f"{made_name} was called where {name} was expected", *problems]
    reasons = list(problems)
    unknown = {p for p in given if any(f"unknown argument {p!r}" in r for r in problems)}
    for key in sorted((arguments.keys() | given.keys()) - unknown):
        want, got = repr_of(arguments.get(key)), repr_of(given.get(key))
        if key not in given:
            reasons.append(f"{name}: argument {key!r} is missing, expected {want}")
        elif key not in arguments:
            reasons.append(f"{name}: argument {key!r} = {got} was not expected")
        elif not json_equal(arguments[key], given[key]):
            reasons.append(f"{name}: argument {key!r} is {got}, expected {want}")
    return reasons


def _shown(call: Call) -> str:
    row = call.to_dict() if isinstance(call, ToolCall) else dict(call)
    return f"{repr_of(row):.200}"
