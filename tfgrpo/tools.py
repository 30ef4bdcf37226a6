"""Tools: a schema from a Python function, strict argument checks, and matching of calls.

Arguments are never coerced: `"10"` is no number, `true` is no integer, `10.0` is no integer. The
one step allowed is an integer where a number is asked for. Arguments that a schema does not name
are errors unless it says `additionalProperties`.

Does not know models, prompts or rollouts. Ideas: schemas from signatures are common ground of all
agent libraries; matching under declared defaults is our own.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import SchemaError
from referencing import Registry

from tfgrpo.canonical import canonical_json, jsonable
from tfgrpo.errors import ConfigError, boundary
from tfgrpo.messages import ToolCall
from tfgrpo.protocols import ToolSpec

__all__ = [
    "CallMatch",
    "Tool",
    "check_arguments",
    "check_schema",
    "match_calls",
    "parse_arguments",
    "resolve_name",
    "schema_errors",
    "tool",
    "wire_name",
]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    spec: ToolSpec
    run: Callable[..., Any]
    """Called with the arguments as keywords; synchronous or async; its result becomes text."""
    timeout_s: float | None = None
    """Limit of one call; None leaves it to the policy."""


# --- schema from a function -----------------------------------------------------------------

_PLAIN: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def tool(
    fn: Callable[..., Any], *, name: str = "", description: str = "", timeout_s: float | None = None
) -> Tool:
    """Return a tool whose schema is read from the function's signature and docstring.

    The description is the docstring up to its `Args:` section; that section describes the
    parameters, as does a string in `Annotated`. A parameter with a default is optional.

    Raises:
        ConfigError: a parameter without annotation, `*args`, `**kwargs`, or a type that JSON
            cannot carry (allowed: str, int, float, bool, None, list, dict, Literal, unions).

    >>> def area(base: float, unit: str = "cm") -> float:
    ...     '''Area of a square.
    ...
    ...     Args:
    ...         base: length of a side
    ...     '''
    ...     return base * base
    >>> made = tool(area)
    >>> made.spec.description, made.spec.parameters["required"]
    ('Area of a square.', ['base'])
    >>> made.spec.parameters["properties"]["base"]
    {'type': 'number', 'description': 'length of a side'}
    """
    name = name or getattr(fn, "__name__", type(fn).__name__)
    summary, texts = _read_docstring(inspect.getdoc(fn) or "")
    hints = get_type_hints(fn, include_extras=True)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(fn).parameters.values():
        where = f"tool {name!r}, parameter {parameter.name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: tools take named parameters only, no *args or **kwargs")
        if parameter.name not in hints:
            raise ConfigError(f"{where}: no type annotation; give it one, such as `: str`")
        schema = _schema_of(hints[parameter.name], where)
        if parameter.name in texts:
            schema.setdefault("description", texts[parameter.name])
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            with boundary(ConfigError, f"{where}, default"):
                schema["default"] = jsonable(parameter.default)
        properties[parameter.name] = schema
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return Tool(ToolSpec(name, description or summary, parameters), fn, timeout_s)


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is Annotated:
        schema = _schema_of(args[0], where)
        texts = [a for a in args[1:] if isinstance(a, str)]
        return schema | ({"description": texts[0]} if texts else {})
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(a, where) for a in args]}
    if hint is list or origin in (list, Sequence):
        return {"type": "array"} | ({"items": _schema_of(args[0], where)} if args else {})
    if hint is dict or origin in (dict, Mapping):
        values = {"additionalProperties": _schema_of(args[1], where)} if args else {}
        return {"type": "object"} | values
    raise ConfigError(
        f"{where}: type {hint!r} has no JSON form; use str, int, float, bool, None, list, dict, "
        "Literal or a union of these"
    )


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_PARAMETER = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into its prose and its parameter texts."""
    prose: list[str] = []
    texts: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        if found := _SECTION.match(line):
            section = found[1]
        elif not section:
            prose.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            entry = _PARAMETER.match(line)
            if entry and (not current or depth <= indent):
                current, indent = entry[1], depth
                texts[current] = entry[2].strip()
            elif current:
                texts[current] = f"{texts[current]} {line.strip()}".strip()
    return "\n".join(prose).strip(), texts


# --- checking -------------------------------------------------------------------------------


def _is_integer(_checker: Any, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(_checker: Any, value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_STRICT: Any = validators.extend(  # type: ignore[no-untyped-call]  # its stub lacks types
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer).redefine(
        "number", _is_number
    ),
)
_NO_REMOTE: Any = Registry()  # type: ignore[var-annotated]  # references are never fetched


def check_schema(schema: Mapping[str, Any], where: str = "schema") -> None:
    """Raise `ConfigError` where `schema` is not a JSON Schema or refers outside itself."""
    try:
        Draft202012Validator.check_schema(dict(schema))
    except SchemaError as exc:
        raise ConfigError(
            f"{where} is not a JSON Schema, at {exc.json_path}: {exc.message}"
        ) from exc
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise ConfigError(
                f"{where} refers to {reference!r}: only references inside the schema "
                "('#/...') are followed; copy the definition under '$defs'"
            )


def _references(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        own = [v for k, v in value.items() if k in ("$ref", "$dynamicRef") and isinstance(v, str)]
        return own + [r for v in value.values() for r in _references(v)]
    if isinstance(value, (list, tuple)):
        return [r for v in value for r in _references(v)]
    return []


def schema_errors(schema: Mapping[str, Any], value: Any) -> list[tuple[str, str]]:
    """Return (path, message) for everything in `value` that breaks the schema, without coercion.

    >>> schema_errors({"type": "number"}, 10), schema_errors({"type": "integer"}, 10.0)
    ([], [('$', "10.0 is not of type 'integer'")])
    """
    errors = _STRICT(dict(schema), registry=_NO_REMOTE).iter_errors(value)
    return sorted((e.json_path, e.message) for e in errors)


def check_arguments(schema: Mapping[str, Any], args: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what is wrong with a call's arguments; empty where they fit the schema.

    >>> schema = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    >>> check_arguments(schema, {"n": "1", "m": 2})
    ("unknown argument 'm'; known: 'n'", "argument 'n': '1' is not of type 'integer'")
    >>> check_arguments(schema, {"n": 1})
    ()
    """
    known = schema.get("properties", {})
    open_ended = "additionalProperties" in schema or "patternProperties" in schema
    reasons = []
    for name in args:
        if name not in known and (not open_ended or schema.get("additionalProperties") is False):
            if any(re.search(p, name) for p in schema.get("patternProperties", ())):
                continue
            names = ", ".join(repr(k) for k in known) or "none"
            reasons.append(f"unknown argument {name!r}; known: {names}")
    inner = {k: v for k, v in schema.items() if not (k == "additionalProperties" and v is False)}
    for path, message in schema_errors(inner, dict(args)):
        place = path.removeprefix("$").removeprefix(".")
        reasons.append(f"argument {place!r}: {message}" if place else message)
    return tuple(reasons)


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments object that a model wrote; an empty text is an empty object.

    Raises:
        ValueError: not JSON, not an object, a key given twice, or NaN and infinities.
    """
    if not text.strip():
        return {}
    value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    if not isinstance(value, dict):
        raise ValueError(f"arguments are {type(value).__name__}, not an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [k for k, _ in pairs]
        twice = sorted({k for k in names if names.count(k) > 1})
        raise ValueError(f"key {twice[0]!r} is given twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# --- names ----------------------------------------------------------------------------------


def wire_name(name: str) -> str:
    """Return the form of a tool's name that providers accept: letters, digits, `_`, `-`, 64 long.

    >>> wire_name("math.area")
    'math_area'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]


def resolve_name(name: str, known: Sequence[str]) -> str | None:
    """Return the known tool that `name` means: itself, or the only one with that wire name."""
    if name in known:
        return name
    candidates = [k for k in known if wire_name(k) == name]
    return candidates[0] if len(candidates) == 1 else None


# --- matching -------------------------------------------------------------------------------


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
    defaults = {
        k: v["default"]
        for k, v in schema.get("properties", {}).items()
        if isinstance(v, Mapping) and "default" in v
    }
    return resolved, defaults | dict(given), reasons


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)


def _is_same(want: tuple[str, dict[str, Any]], made: _Read) -> bool:
    return not made[2] and want[0] == made[0] and _equal(want[1], made[1])


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
        if key not in given:
            reasons.append(f"{name}: argument {key!r} is missing, expected {arguments[key]!r}")
        elif key not in arguments:
            reasons.append(f"{name}: argument {key!r} = {given[key]!r} was not expected")
        elif not _equal(arguments[key], given[key]):
            reasons.append(
                f"{name}: argument {key!r} is {given[key]!r}, expected {arguments[key]!r}"
            )
    return reasons


def _shown(call: Call) -> str:
    row = call.to_dict() if isinstance(call, ToolCall) else dict(call)
    return f"{row!r:.200}"
