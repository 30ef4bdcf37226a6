"""Every setting in words, read off the models themselves: sentence, kind of value, default, range.

One description serves `tfgrpo config show`, docs/config.md and the JSON Schema of editors. The
sentences are the docstrings under the fields, read from the source when they are asked for, so that
no verb pays for them. Does not know which settings exist. Source: own.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tfgrpo.runtime.syntax import syntax_tree

__all__ = ["Extra", "Key", "Part", "markdown", "parts_of", "schema_of", "toml_value"]


_NONE = re.compile(r"\bNone(?=:| (?:is|takes|lets|leaves|means)\b)")
"""TOML has no None: a key is left out."""


@dataclass(frozen=True, slots=True)
class Key:
    """One setting."""

    name: str
    """Within its section."""
    sentence: str
    kind: str
    """What may stand there, in words, with its range."""
    default: str
    """As TOML; empty where there is none, `unset` for none at all."""


@dataclass(frozen=True, slots=True)
class Part:
    """A section with its keys."""

    name: str
    """As in TOML, such as `policy.sampling`; empty at the top."""
    sentence: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Extra:
    """What a model does not say of itself."""

    tables: Mapping[str, type] = field(default_factory=dict)
    """Dotted keys that are plain tables in the model, and the record that checks each."""
    hidden: frozenset[str] = frozenset()
    """Dotted keys that are set elsewhere."""


def parts_of(model: type, name: str = "", extra: Extra = Extra()) -> Iterator[Part]:
    """Yield the sections of a model, outer ones first.

    Args:
        model: a pydantic model or a dataclass.
        name: of the section that the model stands for.
        extra: tables and hidden keys.
    """
    keys: list[Key] = []
    inner: list[tuple[str, type]] = []
    sentences = _sentences(model)
    for key, annotation, default, limits in _fields(model):
        place = f"{name}.{key}" if name else key
        if place in extra.hidden:
            continue
        given = extra.tables.get(place)
        table = given or _model_in(annotation)
        if table is not None:
            is_keyed = given is None and get_origin(annotation) is dict
            inner.append((f"{place}.NAME" if is_keyed else place, table))
            continue
        keys.append(Key(key, sentences.get(key, ""), _kind(annotation, limits), _default(default)))
    yield Part(name, _first_sentence(model), tuple(keys))
    for place, table in inner:
        yield from parts_of(table, place, extra)


def schema_of(model: type[BaseModel], title: str, extra: Extra = Extra()) -> dict[str, Any]:
    """Return the JSON Schema of a model with a sentence for every key, for editors of TOML."""
    schema = model.model_json_schema()
    schema["title"] = title
    for part in parts_of(model, "", extra):
        place = _resolve(schema, part.name)
        place.setdefault("properties", {})
        place["description"] = part.sentence
        for key in part.keys:
            row = place["properties"].setdefault(key.name, {})
            shown = f" Default: {key.default}." if key.default else ""
            row["description"] = f"{key.sentence} {key.kind.capitalize()}.{shown}"
    return schema


def markdown(title: str, parts: Iterator[Part]) -> list[str]:
    """Return a heading and a table for each section with keys."""
    lines = [f"## {title}", ""]
    shown: dict[tuple[Key, ...], str] = {}
    for part in parts:
        if not part.keys:
            continue
        lines += [f"### `[{part.name}]`" if part.name else "### Top level", ""]
        lines += [part.sentence, ""] if part.sentence else []
        if part.keys in shown:
            lines += [f"The keys of `[{shown[part.keys]}]`.", ""]
            continue
        shown[part.keys] = part.name
        lines += ["| key | what | value | default |", "|---|---|---|---|"]
        for key in part.keys:
            cells = (f"`{key.name}`", key.sentence, key.kind, f"`{key.default}`")
            lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
        lines.append("")
    return lines


def _fields(model: type) -> Iterator[tuple[str, Any, Any, tuple[Any, ...]]]:
    """Yield name, annotation, default and limits of each field."""
    if is_dataclass(model):
        hints = get_type_hints(model)
        for f in fields(model):
            made = f.default_factory() if f.default_factory is not MISSING else f.default
            yield f.name, hints[f.name], PydanticUndefined if made is MISSING else made, ()
        return
    assert issubclass(model, BaseModel)
    for name, info in model.model_fields.items():
        default = info.get_default(call_default_factory=True) if info.default_factory else None
        yield name, info.annotation, default or info.default, tuple(info.metadata)


@cache
def _sentences(model: type) -> dict[str, str]:
    """Return the docstring under each field of a class and its bases."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if owner in (object, BaseModel) or owner.__module__.startswith("pydantic"):
            continue
        body = syntax_tree(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        name = ""
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                continue
            if name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                words = " ".join(str(node.value.value).split())
                found[name] = _NONE.sub("unset", words)
            name = ""
    return found


def _first_sentence(model: type) -> str:
    return " ".join((inspect.getdoc(model) or "").partition("\n\n")[0].split())


def _model_in(annotation: Any) -> type | None:
    """Return the section that a field holds, also behind `| None` or as the values of a table."""
    candidates = [annotation, *get_args(annotation)]
    for found in candidates:
        if isinstance(found, type) and (issubclass(found, BaseModel) or is_dataclass(found)):
            return found
    return None


_WORDS: Mapping[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    NoneType: "",
    Any: "any value",
}


def _kind(annotation: Any, limits: tuple[Any, ...] = ()) -> str:
    """Return what a value may be, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(f"`{json.dumps(v)}`" for v in inner)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(w for a in inner if (w := _kind(a, limits))))
    if origin in (tuple, list):
        words = list(dict.fromkeys(_kind(a) for a in inner if a is not Ellipsis))
        if len(inner) > 1 and Ellipsis not in inner:
            return f"list of {len(inner)}: {' and '.join(words)}"
        return f"list of {_plural(words[0]) if words else 'values'}"
    if origin is dict or annotation is dict or origin is Mapping:
        return "table"
    if annotation not in _WORDS and getattr(annotation, "__metadata__", None):
        return _kind(get_args(annotation)[0])
    if annotation not in _WORDS:
        return "path" if getattr(annotation, "__name__", "") == "Path" else "table"
    return _WORDS[annotation] + _range(limits) if annotation in (int, float) else _WORDS[annotation]


def _plural(word: str) -> str:
    return word if word.startswith(("one of", "list of")) else f"{word}s"


_SIGNS = {
    annotated_types.Ge: ("ge", "≥"),
    annotated_types.Gt: ("gt", ">"),
    annotated_types.Le: ("le", "≤"),
    annotated_types.Lt: ("lt", "<"),
}


def _range(limits: tuple[Any, ...]) -> str:
    words = []
    for limit in limits:
        for kind, (attribute, sign) in _SIGNS.items():
            if isinstance(limit, kind):
                words.append(f"{sign} {getattr(limit, attribute):g}")
    return f" {' and '.join(words)}" if words else ""


def _default(value: Any) -> str:
    """Return a default as TOML."""
    if value is PydanticUndefined:
        return "required"
    return "unset" if value is None else toml_value(value)


def toml_value(value: Any) -> str:
    """Return a JSON value as TOML; what is unset inside a table is left out.

    >>> toml_value({"kind": "exact", "x": [1, None]})
    '{ kind = "exact", x = [1] }'
    """
    if isinstance(value, Mapping):
        rows = [f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items() if v is not None]
        return "{ " + ", ".join(rows) + " }" if rows else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(v) for v in value if v is not None) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)


def _toml_key(key: str) -> str:
    is_bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if is_bare else json.dumps(key)


def _resolve(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object of a schema that a section's name leads to; an open table gets one."""
    place = schema
    for part in filter(None, name.split(".")):
        if part == "NAME":
            named = place.get("patternProperties", {"": place.get("additionalProperties")})
            place = _referred(schema, next(iter(named.values())))
            continue
        row = place.setdefault("properties", {}).setdefault(part, {"type": "object"})
        place = _referred(schema, row)
    return place


def _referred(schema: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    for option in (inner, *inner.get("anyOf", ()), *inner.get("allOf", ())):
        if "$ref" in option:
            found: dict[str, Any] = schema["$defs"][option["$ref"].rpartition("/")[2]]
            return found
    return inner
