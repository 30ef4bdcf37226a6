"""What was learnt, in the forms that other programs take: chat messages, a request, a plain prompt.

Does not know libraries or files: it translates turns that the one renderer made. Source: the chat
formats of OpenAI and Anthropic as their references describe them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message
from tfgrpo.rollout import Task

Question = str | Task | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]]
"""A question as a text, a task, one turn, or whole turns as records or dictionaries."""


def turns_of(question: Question) -> tuple[Message, ...]:
    """Return a question as turns.

    Raises:
        ConfigError: it is none of the forms; the message says which are known.

    >>> turns_of("How far?")[0].role
    'user'
    >>> turns_of([{"role": "user", "content": "How far?"}])[0].content
    'How far?'
    """
    if isinstance(question, str):
        return (Message("user", question),)
    if isinstance(question, Task):
        return question.messages
    if isinstance(question, Message):
        return (question,)
    if isinstance(question, Mapping):
        return (_turn(question),)
    if isinstance(question, Sequence) and question:
        return tuple(t if isinstance(t, Message) else _turn(t) for t in question)
    raise ConfigError(
        f"question is {question!r:.80}: give a text, a Task, or turns such as "
        '[{"role": "user", "content": "..."}]'
    )


def _turn(row: Any) -> Message:
    content = row.get("content") if isinstance(row, Mapping) else None
    if not isinstance(content, str) or row.get("role") not in ("system", "user", "assistant"):
        raise ConfigError(
            f"turn {row!r:.80}: it needs a role (system, user or assistant) and a text as content"
        )
    return Message(row["role"], content)


def openai_messages(turns: Sequence[Message]) -> list[dict[str, str]]:
    """Return turns as the `messages` of an OpenAI-compatible request.

    >>> openai_messages((Message("user", "hi"),))
    [{'role': 'user', 'content': 'hi'}]
    """
    return [{"role": m.role, "content": m.content} for m in turns]


def anthropic_request(turns: Sequence[Message]) -> dict[str, Any]:
    """Return turns as `system` and `messages` of Anthropic's messages endpoint.

    System turns are joined; `system` is left out where there is none.

    >>> anthropic_request((Message("system", "be brief"), Message("user", "hi")))["system"]
    'be brief'
    """
    system = "\n\n".join(m.content for m in turns if m.role == "system")
    request: dict[str, Any] = {"system": system} if system else {}
    return request | {"messages": openai_messages([m for m in turns if m.role != "system"])}


def plain_prompt(turns: Sequence[Message]) -> str:
    """Return turns that stand before a question as one instruction without marks of turns.

    Worked examples become "Question: … Answer: …" paragraphs.

    >>> plain_prompt((Message("user", "2+2"), Message("assistant", "4")))
    'Question: 2+2\\nAnswer: 4'
    """
    parts: list[str] = []
    for turn in turns:
        if turn.role == "system":
            parts.append(turn.content)
        elif turn.role == "user":
            parts.append(f"Question: {turn.content}")
        elif parts:
            parts[-1] += f"\nAnswer: {turn.content}"
    return "\n\n".join(parts)
