"""Tools: what a model may call, and a schema read from a Python function.

Does not know models, prompts or rollouts; checks are in `schema`, comparison in `tool_calls`.
Source: common ground of all agent libraries.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tfgrpo.errors import ConfigError, boundary
from tfgrpo.policies.tool_calls import CallMatch, match_calls
from tfgrpo.protocols import ToolSpec
from tfgrpo.runtime.canonical import jsonable
from tfgrpo.runtime.json_schema import check_arguments

__all__ = ["CallMatch", "Tool", "check_arguments", "match_calls", "tool"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    spec: ToolSpec
    run: Callable[..., Any]
    """Called with the arguments as keywords; synchronous or async; its result becomes text."""
    timeout_s: float | None = None
    """Limit of one call; None leaves it to the policy."""
    is_read: bool = False
    """True where it changes nothing: the same call on the same state need not run again."""


# --- schema from a function -----------------------------------------------------------------

_PLAIN: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def tool(
    fn: Callable[..., Any],
    *,
    name: str = "",
    description: str = "",
    timeout_s: float | None = None,
    is_read: bool = False,
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
    return Tool(ToolSpec(name, description or summary, parameters), fn, timeout_s, is_read)


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
