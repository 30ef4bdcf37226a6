"""Who is calling: stage, task and draw of the running rollout, carried along asyncio tasks.

Sampling sets the scope, the journalled LM reads it for cache keys and the ledger, so policies and
verifiers need no extra argument. Does not know what the stages mean. Source: own.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallScope:
    """Where a call belongs."""

    stage: str = "other"
    """`practice`, `summarise`, `contrast`, `merge`, `gate`, `test`, `judge`, `search`, …"""
    task_id: str = ""
    rollout_id: str = ""
    sample_index: int = 0
    """Part of the cache key: equal requests of different draws stay different calls."""


_OUTSIDE = CallScope()
_SCOPE: ContextVar[CallScope | None] = ContextVar("tfgrpo_call_scope", default=None)


def current_scope() -> CallScope:
    """Return the scope of the running asyncio task."""
    return _SCOPE.get() or _OUTSIDE


class call_scope:
    """Run a block under a scope; asyncio tasks started inside inherit it.

    A class and not a generator: it is entered several times a rollout.
    """

    __slots__ = ("_scope", "_token")

    def __init__(self, scope: CallScope) -> None:
        self._scope = scope

    def __enter__(self) -> CallScope:
        self._token = _SCOPE.set(self._scope)
        return self._scope

    def __exit__(self, *_: object) -> None:
        _SCOPE.reset(self._token)
