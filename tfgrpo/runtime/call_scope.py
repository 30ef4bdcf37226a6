"""Who is calling: stage, task and draw of the running rollout, carried along asyncio tasks.

Sampling sets the scope, the journalled LM reads it for cache keys and the ledger, so policies and
verifiers need no extra argument. Does not know what the stages mean. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from tfgrpo.errors import ProviderError


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


AllowCall = Callable[[bool, "ProviderError | None"], None]
"""Asked before a further call, told whether its usage will be reported with the reply and which
failure made it necessary; raises to forbid it."""
_EXTRA: ContextVar[AllowCall | None] = ContextVar("tfgrpo_extra_call", default=None)


class extra_calls:
    """Run a block in which `count_extra_call` asks `allow` first."""

    __slots__ = ("_allow", "_token")

    def __init__(self, allow: AllowCall) -> None:
        self._allow = allow

    def __enter__(self) -> None:
        self._token = _EXTRA.set(self._allow)

    def __exit__(self, *_: object) -> None:
        _EXTRA.reset(self._token)


def outer_allowance() -> AllowCall:
    """Return what `count_extra_call` would ask now, for a caller that sets its own beside it."""
    allow = _EXTRA.get()
    return allow if allow is not None else _allow_all


def _allow_all(is_reported: bool, failure: ProviderError | None) -> None:
    """Allow it: nobody counts."""


def calls_are_counted() -> bool:
    """Tell whether somebody books each call of the running `LM.complete`."""
    return _EXTRA.get() is not None


def count_extra_call(*, is_reported: bool = False, failure: ProviderError | None = None) -> None:
    """Ask whoever counts calls before a request is sent once more than was promised.

    An LM that learns from a refusal (a parameter that its server does not take) sends again without
    leaving `complete`, and a retry sends again what failed; so that no cap on calls is passed, they
    say so here.

    Args:
        is_reported: True where the usage of the reply will count this call.
        failure: why the call before it gave nothing; it may have been billed all the same.

    Raises:
        BudgetError: no further call is allowed.
    """
    allow = _EXTRA.get()
    if allow is not None:
        allow(is_reported, failure)
