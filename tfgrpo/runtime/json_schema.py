"""Strict checks against JSON Schema: no coercion, no remote references.

`"10"` is no number, `true` is no integer, `10.0` is no integer; the one step allowed is an integer
where a number is asked for. Arguments that a schema does not name are errors unless it says
`additionalProperties`.

A schema is read by the draft that it names, or else by the newest draft in which it is one.

Does not know tools or rollouts. Source: JSON Schema by `jsonschema`, types narrowed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any
from urllib.parse import unquote

from tfgrpo.errors import ConfigError
from tfgrpo.runtime.canonical import integer_of

__all__ = [
    "argument_defaults",
    "check_arguments",
    "check_schema",
    "field_errors",
    "json_equal",
    "load_json",
    "schema_errors",
]


def _is_integer(_checker: Any, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(_checker: Any, value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _type(validator: Any, types: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    if not (value is None and schema.get("nullable") is True):  # as OpenAPI 3.0 writes it
        yield from validator.BASE["type"](validator, types, value, schema)


@cache
def _drafts() -> tuple[Any, ...]:
    """Return a strict validator class for each draft of JSON Schema, the newest first."""
    import jsonschema

    made = []
    for name in ("Draft202012", "Draft201909", "Draft7", "Draft6", "Draft4"):
        base = getattr(jsonschema, f"{name}Validator")
        types = base.TYPE_CHECKER.redefine("integer", _is_integer).redefine("number", _is_number)
        strict = jsonschema.validators.extend(base, {"type": _type}, type_checker=types)  # type: ignore[no-untyped-call]  # its stub lacks types
        strict.BASE = base.VALIDATORS
        made.append(strict)
    return tuple(made)


@cache
def _no_remote() -> Any:
    """Return the empty registry: references are never fetched."""
    from referencing import Registry

    return Registry()


def _strict(schema: Mapping[str, Any]) -> Any:
    """Return the validator class of the draft that a schema names, or else fits."""
    return _drafts()[_draft_of(json.dumps(schema, default=repr))]


@lru_cache(maxsize=1000)
def _draft_of(text: str) -> int:
    from jsonschema.exceptions import SchemaError

    schema = json.loads(text)
    named = str(schema.get("$schema", "")).rstrip("#")
    ids = [str(d.META_SCHEMA.get("$id", d.META_SCHEMA.get("id"))).rstrip("#") for d in _drafts()]
    if named in ids:
        return ids.index(named)
    for number, draft in enumerate(_drafts()):
        try:
            draft.check_schema(schema)
        except SchemaError:
            continue
        return number
    return 0


def check_schema(schema: Mapping[str, Any], where: str = "schema") -> None:
    """Raise `ConfigError` where `schema` is not a JSON Schema or refers outside itself."""
    from jsonschema.exceptions import SchemaError

    try:
        _strict(schema).check_schema(dict(schema))
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
    return [(path, said) for path, said, _ in _found(schema, value)]


def field_errors(schema: Mapping[str, Any], value: Any) -> list[tuple[str, str]]:
    """Return (field of the object, reason) for everything that breaks the schema; the empty name
    stands for the value as a whole.

    >>> field_errors({"required": ["a", "b"], "additionalProperties": {"type": "null"}}, {"b": 1})
    [('a', 'missing'), ('b', "1 is not of type 'null'")]
    """
    return [row for _, said, e in _found(schema, value) for row in _blamed(e, said)]


def _found(schema: Mapping[str, Any], value: Any) -> list[tuple[str, str, Any]]:
    """Return path, message and error of `jsonschema`, None where the check itself failed."""
    errors = _strict(schema)(dict(schema), registry=_no_remote()).iter_errors(value)
    try:
        return sorted(((e.json_path, e.message, e) for e in errors), key=itemgetter(0, 1))
    except RecursionError:
        said = "cannot be checked: the schema refers to itself without end"
    except ValueError:  # of the words for what is wrong
        said = "does not fit the schema; an integer in it is too long to be shown"
    return [("$", said, None)]


_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")


def _blamed(error: Any, said: str) -> list[tuple[str, str]]:
    """Return the fields of the whole value that an error is about, each with the reason."""
    names: list[tuple[str, str]] = []
    if error is None:
        pass
    elif error.absolute_path:
        first = error.absolute_path[0]
        names = [(first if isinstance(first, str) else "", said)]
    elif error.validator == "required":
        missing = (n for n in error.validator_value if n not in error.instance)
        names = [(n, "missing") for n in missing if said.startswith(repr(n))]
    elif error.validator in ("additionalProperties", "unevaluatedProperties"):
        given = {repr(name): name for name in error.instance}
        quoted = _QUOTED.findall(said)
        names = [(given[q], "not allowed by the schema") for q in quoted if q in given]
    return names or [("", said)]


def check_arguments(schema: Mapping[str, Any], args: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what is wrong with a call's arguments; empty where they fit the schema.

    >>> schema = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    >>> check_arguments(schema, {"n": "1", "m": 2})
    ("unknown argument 'm'; known: 'n'", "argument 'n': '1' is not of type 'integer'")
    >>> check_arguments(schema, {"n": 1})
    ()
    """
    parts = list(_parts(schema, schema))
    known = list(dict.fromkeys(name for part in parts for name in part.get("properties", ())))
    patterns = [p for part in parts for p in part.get("patternProperties", ())]
    reasons = []
    for name in args if not _is_open(parts) else ():
        if name not in known and not any(re.search(p, name) for p in patterns):
            names = ", ".join(repr(k) for k in known) or "none"
            reasons.append(f"unknown argument {name!r}; known: {names}")
    inner = {k: v for k, v in schema.items() if not (k == "additionalProperties" and v is False)}
    for path, message in schema_errors(inner, dict(args)):
        place = path.removeprefix("$").removeprefix(".")
        reasons.append(f"argument {place!r}: {message}" if place else message)
    return tuple(reasons)


_ALTERNATIVES = ("oneOf", "anyOf", "allOf")
_BRANCHES = ("if", "then", "else")


def _parts(
    schema: Any, root: Mapping[str, Any], seen: tuple[str, ...] = ()
) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and every schema that it applies to the same object."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    inner = [s for key in _ALTERNATIVES for s in schema.get(key) or ()]
    inner += [schema[key] for key in _BRANCHES if key in schema]
    for key in ("dependentSchemas", "dependencies"):
        inner += (schema.get(key) or {}).values()
    for part in inner:
        yield from _parts(part, root, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        yield from _parts(_resolved(reference, root), root, (*seen, reference))


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a reference inside a schema points to; None where that is nothing."""
    place: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = place.get(step)
        elif isinstance(place, (list, tuple)) and step.isdecimal() and int(step) < len(place):
            place = place[int(step)]
        else:
            return None
    return place


def _is_open(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether arguments without a name in the schema are allowed.

    A schema that lists properties is meant to be whole; one that lists none anywhere, or that says
    `additionalProperties`, is open as JSON Schema has it.
    """
    if any(
        part.get(key, False) is not False
        for part in parts
        for key in ("additionalProperties", "unevaluatedProperties")
    ):
        return True
    says = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
    return not any(key in part for part in parts for key in says)


def argument_defaults(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declared defaults of arguments, those of referred schemas included.

    >>> argument_defaults({"allOf": [{"properties": {"n": {"default": 1}}}]})
    {'n': 1}
    """
    sure = {k: v for k, v in schema.items() if k not in ("oneOf", "anyOf", *_BRANCHES)}
    return {
        name: value["default"]
        for part in reversed(list(_parts(sure, schema)))
        for name, value in (part.get("properties") or {}).items()
        if isinstance(value, Mapping) and "default" in value
    }


def load_json(text: str, *, has_long_integers: bool = True) -> Any:
    """Return the value of a JSON text that somebody else wrote.

    Args:
        text: the whole text.
        has_long_integers: False refuses integers that Python does not write out again.

    Raises:
        ValueError: not JSON, a key given twice, NaN or an infinity, or nested too deeply.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
            parse_int=integer_of if has_long_integers else int,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [k for k, _ in pairs]
        twice = sorted({k for k in names if names.count(k) > 1})
        raise ValueError(f"key {twice[0]!r} is given twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def json_equal(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal; 10 is 10.0, but no boolean is a number.

    >>> json_equal({"a": [1]}, {"a": [1.0]}), json_equal(1, True)
    (True, False)
    """
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(json_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(json_equal, a, b))
    return type(a) is type(b) and bool(a == b)
