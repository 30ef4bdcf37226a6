"""Tool calls that no tool could carry out: an unknown name, arguments that break its schema.

A library that teaches a model to call tools wrongly does harm that no rating need show, so a live
test counts such replies as failures.

Does not know tests or tools. Source: JSON Schema; own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfgrpo.errors import VerifierError, boundary
from tfgrpo.store import Journal

__all__ = ["breaks_tools", "read_broken"]


def breaks_tools(message: Mapping[str, Any], tools: Any) -> bool:
    """True where a reply calls a tool that was not offered, or with arguments it does not take.

    >>> tools = [{"function": {"name": "f", "parameters": {"type": "object", "required": ["a"]}}}]
    >>> breaks_tools({"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, tools)
    True
    """
    offered = {
        f["name"]: f.get("parameters")
        for t in (tools if isinstance(tools, list) else ())
        if isinstance(t, Mapping) and isinstance(f := t.get("function"), Mapping)
        and isinstance(f.get("name"), str)
    }  # fmt: skip
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            continue
        if function.get("name") not in offered:
            return True
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError, RecursionError):
            return True
        if not _fits(arguments, offered[function["name"]]):
            return True
    return False


def _fits(arguments: Any, schema: Any) -> bool:
    """True where arguments meet a schema; a schema that is none forbids nothing."""
    from jsonschema import Draft202012Validator

    if not isinstance(schema, Mapping):
        return True
    try:
        with boundary(VerifierError, "a tool's schema"):
            return bool(Draft202012Validator(schema).is_valid(arguments))
    except VerifierError:
        return True


def read_broken(journal: Journal, route: str, experiment: str) -> frozenset[str]:
    """Return the captured responses of a live test that call a tool wrongly."""
    rows = journal.writer.read(
        "SELECT c.response_id, c.body, q.prompt FROM choices c JOIN requests q"
        " ON q.response_id = c.response_id WHERE q.experiment = ? AND q.experiment <> ''"
        " AND q.route = ? AND q.prompt NOT NULL AND c.body NOT NULL"
        " AND instr(c.body, CAST('\"tool_calls\"' AS BLOB)) > 0",
        (experiment, route),
    )
    return frozenset(
        response_id
        for response_id, body, prompt in rows
        if breaks_tools(json.loads(body), json.loads(prompt).get("tools"))
    )
