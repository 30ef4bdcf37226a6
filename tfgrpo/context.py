"""What a policy is given besides the task, its hash, and the one renderer of prompts.

Practice, evaluation, deployment and training all call `render_messages`, so the prompt that was
practised is the prompt that is used. An empty context leaves the prompt byte-equal to the bare
task. Parts are rendered literally: braces, percent signs or tags inside them mean nothing.

Does not know: who chose the parts, tokens, providers. Idea: train = serve (own; defect 19 and 20
of the published Training-Free GRPO code).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self

from tfgrpo.messages import Message
from tfgrpo.prompts import render
from tfgrpo.runtime.canonical import digest

PartKind = Literal["lesson", "exemplar", "hint", "strategy", "draft", "perturbation"]
Placement = Literal["system", "user"]


@dataclass(frozen=True, slots=True)
class ContextPart:
    """One thing the policy is told."""

    kind: PartKind
    text: str = ""
    """The words, for everything but an exemplar."""
    turns: tuple[Message, ...] = ()
    """A worked example as chat turns, for an exemplar."""
    source: str = ""
    """Where it came from: an experience id, `hint:level2`, …"""
    topic: str = ""
    """Heading under which a lesson stands; lessons of one topic follow each other."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, empty fields left out."""
        row: dict[str, Any] = {"kind": self.kind}
        if self.text:
            row["text"] = self.text
        if self.turns:
            row["turns"] = [m.to_dict() for m in self.turns]
        if self.source:
            row["source"] = self.source
        if self.topic:
            row["topic"] = self.topic
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a part from its JSON form."""
        return cls(
            kind=row["kind"],
            text=row.get("text", ""),
            turns=tuple(Message.from_dict(m) for m in row.get("turns", ())),
            source=row.get("source", ""),
            topic=row.get("topic", ""),
        )


@dataclass(frozen=True, slots=True)
class Context:
    """The parts in order, and where lessons stand in the prompt."""

    parts: tuple[ContextPart, ...] = ()
    placement: Placement = "system"
    """Lessons at the end of the system message, or after the task in the user message."""
    template: str = "lessons"
    """Name of the prompt that frames the lessons."""

    @property
    def is_empty(self) -> bool:
        """True when the prompt is the bare task."""
        return not self.parts

    @property
    def context_hash(self) -> str:
        """16 hex digits fixed by everything that reaches the prompt; `empty` for no parts."""
        return _hash_of(self) if self.parts else "empty"

    def of_kind(self, kind: PartKind) -> tuple[ContextPart, ...]:
        """The parts of one kind, in order."""
        return tuple(p for p in self.parts if p.kind == kind)

    def with_parts(self, *parts: ContextPart) -> Context:
        """Return a context with further parts at the end."""
        return Context((*self.parts, *parts), self.placement, self.template)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; an empty context is an empty object."""
        if not self.parts:
            return {}
        return {
            "parts": [p.to_dict() for p in self.parts],
            "placement": self.placement,
            "template": self.template,
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a context from its JSON form."""
        return cls(
            parts=tuple(ContextPart.from_dict(p) for p in row.get("parts", ())),
            placement=row.get("placement", "system"),
            template=row.get("template", "lessons"),
        )


EMPTY_CONTEXT = Context()


def _frame_text(template: str) -> str:
    return render(template, lessons="")


@lru_cache(256)
def _hash_of(context: Context) -> str:
    # A step gives hundreds of tasks one context, whose texts are long.
    return digest(context.to_dict() | {"frame": _frame_text(context.template)}, 16)


def render_messages(
    task_messages: Sequence[Message], context: Context = EMPTY_CONTEXT, *, system: str = ""
) -> tuple[Message, ...]:
    """Return the whole prompt: system text, exemplars as turns, the task, lessons and hints.

    Order: one system message (the given `system` text, the task's own system turns, and the
    lessons where placement is `system`), the exemplars' turns, then the task's turns. Perturbing
    text stands before the task's first user turn. Lessons with placement `user`, strategies, hints
    and drafts follow the text of its last user turn.

    >>> render_messages([Message("user", "2+2?")])
    (Message(role='user', content='2+2?', tool_calls=(), tool_call_id='', reasoning=''),)
    """
    if context.is_empty and not system and all(m.role != "system" for m in task_messages):
        return tuple(task_messages)
    lessons = _lessons_block(context)
    system_texts = [system, *(m.content for m in task_messages if m.role == "system")]
    if lessons and context.placement == "system":
        system_texts.append(lessons)
    system_text = "\n\n".join(t for t in system_texts if t)
    exemplars = [m for p in context.of_kind("exemplar") for m in p.turns]
    turns = [m for m in task_messages if m.role != "system"]
    before = [render("perturbation", text=p.text) for p in context.of_kind("perturbation")]
    if before:
        turns = _prepend_to_first_user(turns, "\n\n".join(before))
    after = [lessons] if lessons and context.placement == "user" else []
    for kind in ("strategy", "hint", "draft"):
        after.extend(render(kind, text=p.text) for p in context.of_kind(kind))
    if after:
        turns = _append_to_last_user(turns, "\n\n".join(after))
    head = [Message("system", system_text)] if system_text else []
    return (*head, *exemplars, *turns)


def _lessons_block(context: Context) -> str:
    parts = context.of_kind("lesson")
    if not parts:
        return ""
    lines: list[str] = []
    topic = ""
    for i, part in enumerate(parts, 1):
        if part.topic and part.topic != topic:
            lines.append(f"{part.topic}:")
        topic = part.topic
        lines.append(f"[{i}] {part.text}")
    return render(context.template, lessons="\n".join(lines))


def _prepend_to_first_user(turns: list[Message], text: str) -> list[Message]:
    for i, turn in enumerate(turns):
        if turn.role == "user":
            return [*turns[:i], Message("user", f"{text}\n\n{turn.content}"), *turns[i + 1 :]]
    return [Message("user", text), *turns]


def _append_to_last_user(turns: list[Message], text: str) -> list[Message]:
    for i in range(len(turns) - 1, -1, -1):
        if turns[i].role == "user":
            turns[i] = Message("user", f"{turns[i].content}\n\n{text}")
            return turns
    return [*turns, Message("user", text)]
