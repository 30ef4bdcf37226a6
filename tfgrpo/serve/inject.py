"""Puts a library into a client's messages: the same bytes as in practice.

The one renderer of prompts (`render_messages`) does it. Turns that it leaves alone travel as the
client sent them, with every field that we do not know; the system turn and, for placement `user`,
the last user turn are written anew. An empty library changes nothing.

Does not know routes or arms. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfgrpo.context import EMPTY_CONTEXT, Context, render_messages
from tfgrpo.experience.artefact import Artefact
from tfgrpo.lm.wire import message_json
from tfgrpo.messages import Message
from tfgrpo.serve.wire.errors import ApiError

__all__ = ["EMPTY", "Injection", "inject", "inject_instructions", "text_of"]

_SYSTEM = ("system", "developer")
_BYTES_A_TOKEN = 4
_MOST_HEADS = 256


@dataclass(frozen=True, slots=True)
class Injection:
    """A library as it stands in prompts."""

    context: Context = EMPTY_CONTEXT
    context_hash: str = "empty"
    version: str = "empty"
    tokens: int = 0
    """Estimated tokens that it adds."""
    heads: dict[str, tuple[Message, ...]] = field(default_factory=dict, compare=False, repr=False)
    """Rendered heads by system text: agents send the same one again and again."""

    @classmethod
    def of(cls, artefact: Artefact | None) -> Injection:
        """Return the injection of an artefact; None is the empty library."""
        if artefact is None or artefact.context.is_empty:
            return EMPTY
        context = artefact.context
        alone = render_messages((Message("user", ""),), context)
        size = sum(len(m.content.encode("utf-8", "replace")) for m in alone)
        return cls(
            context,
            context.context_hash,
            artefact.library.version_id,
            -(-size // _BYTES_A_TOKEN) + 8 * len(alone),
        )


EMPTY = Injection()


def inject(messages: Sequence[Any], injection: Injection) -> list[Any]:
    """Return the client's turns with the library among them.

    Raises:
        ApiError: 400, a turn is no object or a system turn holds anything but text.
    """
    if injection.context.is_empty:
        return list(messages)
    head: Mapping[str, Any] = {"role": "system"}
    turns: list[Message] = []
    rest: list[Mapping[str, Any]] = []
    for row in messages:
        content = row.get("content")
        if row["role"] in _SYSTEM:
            head = row if len(rest) == len(turns) else head
            turns.append(Message("system", text_of(content)))
        else:
            rest.append(row)
            turns.append(Message(row["role"], content if isinstance(content, str) else ""))
    kept = [t for t in turns if t.role != "system"]
    if injection.context.placement == "system":
        return [*_head(turns, head, injection), *rest]
    rendered = render_messages(turns, injection.context)
    # The client's turns stand last; without a user turn, what follows it is a turn of its own.
    has_user = any(t.role == "user" for t in kept)
    first = len(rendered) - len(kept) - (0 if has_user else _extra(injection.context))
    out: list[Any] = [
        {**head, "content": m.content} if m.role == "system" else message_json(m)
        for m in rendered[:first]
    ]
    for before, turn, row in zip(kept, rendered[first:], rest):
        out.append(row if turn is before else _with_text(row, turn.content))
    out += [message_json(m) for m in rendered[first + len(kept) :]]
    return out


def _head(
    turns: Sequence[Message], row: Mapping[str, Any], injection: Injection
) -> list[dict[str, Any]]:
    """Return system turn and exemplars, which depend on the client's system texts alone."""
    system = [t for t in turns if t.role == "system"]
    key = "\0".join(t.content for t in system)
    rendered = injection.heads.get(key)
    if rendered is None:
        if len(injection.heads) >= _MOST_HEADS:
            injection.heads.clear()
        rendered = injection.heads[key] = render_messages(system, injection.context)
    return [
        {**row, "content": m.content} if m.role == "system" else message_json(m) for m in rendered
    ]


def _extra(context: Context) -> int:
    """Return how many turns follow a prompt without a user turn."""
    return int(context.placement == "user" and bool(context.of_kind("lesson")))


def _with_text(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    content = row.get("content")
    if isinstance(content, list):
        return {**row, "content": [*content, {"type": "text", "text": text}]}
    return {**row, "content": text}


def inject_instructions(instructions: str, injection: Injection) -> str:
    """Return the system text of the responses API with the library's lessons.

    Exemplars are turns and have no place there; they are left out.
    """
    lessons = injection.context.of_kind("lesson")
    if not lessons:
        return instructions
    context = Context(lessons, "system", injection.context.template)
    head = render_messages((), context, system=instructions)
    return head[0].content


def text_of(content: Any) -> str:
    """Return the text of a content field.

    Raises:
        ApiError: 400, it holds something else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(p, dict) and p.get("type") in ("text", "input_text")
        and isinstance(p.get("text"), str) for p in content
    ):  # fmt: skip
        return "".join(p["text"] for p in content)
    raise ApiError("invalid_request", "a system turn must be text", param="messages")
