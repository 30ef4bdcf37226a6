"""Groups out of traffic, made under explicit identity and never by equal text.

A group's key is (route, client's group id or task id, digest of the task's messages, context,
policy): a promotion or another model splits a group, contexts are never mixed. Its rollouts are the
draws of one request, whole sessions, or repeated requests. Rewards come from feedback.

Does not know HTTP, when learning starts, or the critic. Source: own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfgrpo.context import Context
from tfgrpo.messages import Message, ToolCall
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task
from tfgrpo.runtime.canonical import digest
from tfgrpo.serve.learning.ratings import Rating
from tfgrpo.serve.settings import GroupSettings

__all__ = ["CapturedRequest", "make_groups", "read_turns"]


@dataclass(frozen=True, slots=True)
class CapturedRequest:
    """One captured request with its draws and ratings."""

    response_id: str
    at: float
    task_id: str
    session_id: str
    group_id: str
    task_digest: str
    library: str
    context: str
    upstream: str
    prompt: Sequence[Any]
    """The client's turns."""
    choices: Mapping[int, tuple[str, Any]]
    """(finish, message) by choice."""
    ratings: Mapping[int, Rating]
    """By choice."""
    session_rating: Rating | None = None
    group_answer: Any = None
    """The right answer, said of the client's group as a whole."""
    source: str = ""
    """Who gave the evidence: the key's name."""


def read_turns(rows: Sequence[Any]) -> tuple[Message, ...]:
    """Return turns of the wire form as messages; parts that are no text are named in brackets."""
    turns = []
    for row in rows:
        if not isinstance(row, Mapping):
            continue
        role = row.get("role")
        calls = tuple(
            ToolCall(
                str(call.get("id") or ""),
                str((call.get("function") or {}).get("name") or ""),
                str((call.get("function") or {}).get("arguments") or "{}"),
            )
            for call in row.get("tool_calls") or ()
            if isinstance(call, Mapping)
        )
        turns.append(
            Message(
                "system" if role in ("system", "developer") else role
                if role in ("user", "assistant", "tool") else "user",
                _text(row.get("content")),
                calls,
                str(row.get("tool_call_id") or ""),
            )
        )  # fmt: skip
    return tuple(turns)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(
        str(p["text"]) if isinstance(p.get("text"), str) else f"[{p.get('type', 'part')!s:.20}]"
        for p in content
        if isinstance(p, Mapping)
    )


def make_groups(
    seen: Iterable[CapturedRequest],
    settings: GroupSettings,
    route: str,
    contexts: Mapping[str, Context],
    *,
    now: float,
    closed: frozenset[str] = frozenset(),
) -> list[RolloutGroup]:
    """Return the closed groups of some requests, in the order of their first request.

    Args:
        seen: captured requests, oldest first.
        settings: when a group is full or idle, and what makes a task.
        route: its name.
        contexts: contexts by library version.
        now: seconds since the epoch.
        closed: client group ids that were closed early.
    """
    attempts: dict[tuple[str, ...], list[_Attempt]] = {}
    for attempt in _attempts(seen, settings):
        attempts.setdefault(attempt.key, []).append(attempt)
    groups = []
    for key, members in attempts.items():
        is_full = len(members) >= settings.size or members[0].is_whole
        is_idle = now - members[-1].last_at >= settings.idle_s
        if is_full or is_idle or key[0] in closed:
            groups.append(_group(route, key, members, contexts))
    return groups


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One rollout: a draw, a request, or a whole session."""

    key: tuple[str, ...]
    requests: tuple[CapturedRequest, ...]
    choice: int
    rating: Rating
    is_whole: bool
    """The group is complete with the request that it came from."""
    last_at: float


def _attempts(seen: Iterable[CapturedRequest], settings: GroupSettings) -> Iterable[_Attempt]:
    sessions: dict[tuple[str, ...], list[CapturedRequest]] = {}
    order: list[Any] = []
    for one in seen:
        if not one.session_id:
            order.append(one)
            continue
        place = (one.session_id, one.library, one.upstream)
        if place not in sessions:
            sessions[place] = []
            order.append(place)
        sessions[place].append(one)
    for item in order:
        if isinstance(item, CapturedRequest):
            yield from _of_request(item, settings)
        else:
            yield from _of_session(sessions[item], settings)


def _identity(one: CapturedRequest, settings: GroupSettings) -> str:
    """Return what the client calls the task; empty where it says nothing."""
    if one.group_id:
        return f"g:{one.group_id}"
    if one.task_id:
        window = int(one.at // (settings.repeat_h * 3600.0))
        return f"t:{one.task_id}:{window}"
    return f"m:{one.task_digest}" if settings.task_identity == "messages" else ""


def _key(name: str, one: CapturedRequest) -> tuple[str, ...]:
    return (name.removeprefix("g:") if name.startswith("g:") else name,
            one.task_digest, one.context, one.upstream)  # fmt: skip


def _of_request(one: CapturedRequest, settings: GroupSettings) -> Iterable[_Attempt]:
    several = len(one.choices) > 1
    name = f"r:{one.response_id}" if several else _identity(one, settings)
    if not name:
        return
    for choice in sorted(one.choices):
        rating = one.ratings.get(choice, Rating())
        yield _Attempt(_key(name, one), (one,), choice, rating, several, one.at)


def _of_session(requests: list[CapturedRequest], settings: GroupSettings) -> Iterable[_Attempt]:
    first, last = requests[0], requests[-1]
    name = _identity(first, settings)
    if not name:
        return
    rating = last.session_rating or Rating()
    if rating.reward is None:  # nobody rated the whole: the last reply's rating is its end
        rating = last.ratings.get(0, Rating())
    yield _Attempt(_key(name, first), tuple(requests), 0, rating, False, last.at)


def _group(
    route: str,
    key: tuple[str, ...],
    members: Sequence[_Attempt],
    contexts: Mapping[str, Context],
) -> RolloutGroup:
    first = members[0].requests[0]
    said = (first.group_answer, *(m.rating.answer for m in members))
    answers = [a for a in said if a is not None]
    task_id = first.task_id or first.group_id or first.task_digest
    task = Task(task_id, read_turns(first.prompt), answers[-1] if answers else None,
                {"route": route})  # fmt: skip
    revision = sum(m.rating.revision for m in members)
    return RolloutGroup(
        group_id=digest(["traffic", route, *key], 16),
        task=task,
        rollouts=tuple(_rollout(task_id, m, i) for i, m in enumerate(members)),
        context=contexts.get(first.library, Context()),
        policy_id=f"serve:{first.upstream}",
        metadata={
            "stage": "traffic",
            "verifier_id": f"feedback@{revision}",
            "sources": sorted({m.requests[0].source for m in members}),
            "responses": sorted({r.response_id for m in members for r in m.requests}),
        },
    )


def _rollout(task_id: str, attempt: _Attempt, index: int) -> Rollout:
    steps = _steps(attempt)
    rating = attempt.rating
    rollout = Rollout(
        rollout_id=digest(["traffic", *(r.response_id for r in attempt.requests),
                           attempt.choice], 16),
        task_id=task_id,
        steps=steps,
        sample_index=index,
    )  # fmt: skip
    if rating.reward is None or rating.is_conflict:
        return rollout
    # A comment is data from outside; it is fenced where the critic reads it.
    feedback = "\n".join(rating.comments)
    return rollout.graded(Score(rating.reward, feedback, dict(rating.parts)))


def _steps(attempt: _Attempt) -> tuple[Step, ...]:
    steps = []
    for place, one in enumerate(attempt.requests):
        _, message = one.choices.get(attempt.choice, ("stop", {}))
        (action,) = read_turns([{"role": "assistant", **_plain(message)}])
        following: tuple[Message, ...] = ()
        if place + 1 < len(attempt.requests):
            later = attempt.requests[place + 1].prompt[len(one.prompt) :]
            # The reply itself comes back as the first of the new turns.
            following = read_turns(later)[1:] if later else ()
        steps.append(Step(action, following))
    return tuple(steps)


def _plain(message: Any) -> Mapping[str, Any]:
    if isinstance(message, (bytes, str)):
        message = json.loads(message)
    return {k: v for k, v in message.items() if k != "role"} if isinstance(message, dict) else {}
