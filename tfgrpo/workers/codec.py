"""Requests, replies and errors as JSON, so that a worker sees the same records as the run.

The chat-completions format would lose some of it: disjoint token classes, cost, token ids, which
error it was. Does not know sockets. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tfgrpo import errors
from tfgrpo.errors import BudgetError, ProviderError, TfgrpoError
from tfgrpo.messages import Message
from tfgrpo.protocols import Limits, Request, Sampling, ToolSpec
from tfgrpo.rollout import Usage
from tfgrpo.runtime.call_scope import CallScope
from tfgrpo.runtime.canonical import jsonable
from tfgrpo.runtime.redaction import redact

__all__ = ["error_from_dict", "error_to_dict", "request_from_dict", "request_to_dict"]

_PROVIDER_FIELDS = ("kind", "status", "retry_after_s", "was_sent", "had_output")


def request_to_dict(request: Request) -> dict[str, Any]:
    """Return the JSON form of a request; `request_from_dict` restores one with the same key."""
    row: dict[str, Any] = {
        "messages": [m.to_dict() for m in request.messages],
        "sampling": _given(request.sampling, Sampling()),
        "limits": _given(request.limits, Limits()),
    }
    if request.tools:
        row["tools"] = [jsonable(t.to_dict()) for t in request.tools]
    if request.tool_choice is not None:
        row["tool_choice"] = request.tool_choice
    if request.response_format is not None:
        row["response_format"] = jsonable(request.response_format)
    return row


def _given(record: Any, usual: Any) -> dict[str, Any]:
    """The fields of a record that differ from the usual one."""
    rows = ((f.name, getattr(record, f.name)) for f in fields(record))
    return {name: jsonable(value) for name, value in rows if value != getattr(usual, name)}


def request_from_dict(row: Mapping[str, Any]) -> Request:
    """Restore a request from its JSON form."""
    sampling = dict(row["sampling"])
    if "stop" in sampling:
        sampling["stop"] = tuple(sampling["stop"])
    return Request(
        tuple(Message.from_dict(m) for m in row["messages"]),
        tools=tuple(ToolSpec(**t) for t in row.get("tools", ())),
        tool_choice=row.get("tool_choice"),
        response_format=row.get("response_format"),
        sampling=Sampling(**sampling),
        limits=Limits(**row["limits"]),
    )


def scope_to_dict(scope: CallScope) -> dict[str, Any]:
    """Return the JSON form of a call scope."""
    return {f.name: getattr(scope, f.name) for f in fields(scope)}


def error_to_dict(error: TfgrpoError) -> dict[str, Any]:
    """Return the JSON form of an error of ours, without secrets."""
    row: dict[str, Any] = {"type": type(error).__name__, "message": redact(str(error))}
    if isinstance(error, ProviderError):
        row |= {name: getattr(error, name) for name in _PROVIDER_FIELDS}
        if isinstance(error.spent, Usage):
            row["spent"] = error.spent.to_dict()
    if isinstance(error, BudgetError):
        row["resource"] = error.resource
    return row


def error_from_dict(row: Mapping[str, Any]) -> TfgrpoError:
    """Restore an error: of the same class where it is one of `tfgrpo.errors`, else of its root."""
    name, message = str(row["type"]), str(row["message"])
    if "kind" in row:  # a provider's, or a class of its own below that
        spent = Usage.from_dict(row["spent"]) if row.get("spent") else None
        told: dict[str, Any] = {field: row[field] for field in _PROVIDER_FIELDS}
        return ProviderError(message, spent=spent, **told)
    if "resource" in row:
        return BudgetError(message, resource=str(row["resource"]))
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TfgrpoError):
        return kind(message)
    return TfgrpoError(message)
