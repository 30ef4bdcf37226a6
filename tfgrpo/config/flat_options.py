"""Options as settings files and commands write them, one flat list, for functions that take some of
them together as a record.

Does not know which options exist. Source: own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints


def flat_parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a callable by name, a record's fields in place of the record.

    A record is a parameter whose default is a dataclass instance. Annotations are resolved,
    `Annotated` kept.
    """
    found: dict[str, inspect.Parameter] = {}
    hints = get_type_hints(_function(make), include_extras=True)
    for name, parameter in inspect.signature(make).parameters.items():
        if not _is_record(parameter.default):
            annotation = hints.get(name, parameter.annotation)
            found[name] = parameter.replace(annotation=annotation)
            continue
        record = parameter.default
        inner = get_type_hints(type(record), include_extras=True)
        for field in fields(record):
            found[field.name] = inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(record, field.name),
                annotation=inner[field.name],
            )
    return found


def gathered(make: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for a callable, flat options gathered into the records it takes.

    What is no field of a record stays as it is, unknown names too.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Limits:
    ...     seconds: float = 1.0
    >>> def run(text, limits=Limits()): ...
    >>> gathered(run, {"text": "a", "seconds": 2.0})
    {'text': 'a', 'limits': Limits(seconds=2.0)}
    """
    found = dict(options)
    for name, parameter in inspect.signature(make).parameters.items():
        record = parameter.default
        if not _is_record(record):
            continue
        taken = {f.name: found.pop(f.name) for f in fields(record) if f.name in found}
        if taken:
            found[name] = replace(record, **taken)
    return found


def _is_record(default: Any) -> bool:
    return is_dataclass(default) and not isinstance(default, type)


def _function(make: Callable[..., Any]) -> Callable[..., Any]:
    """What the annotations of a callable are kept at."""
    if inspect.isclass(make):
        return make.__init__  # type: ignore[misc]  # of the class itself
    return make


__all__ = ["flat_parameters", "gathered"]
