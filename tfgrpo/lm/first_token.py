"""Tells a caller that a streamed reply has begun, through a context variable.

A backend that streams calls `tell_first_token` once output has come; whoever wants to know runs the
call inside `on_first_token`. Does not know what is done with it. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

__all__ = ["on_first_token", "tell_first_token"]

_TOLD: ContextVar[Callable[[], None] | None] = ContextVar("tfgrpo_first_token", default=None)


class on_first_token:
    """Run a block in which `tell_first_token` calls `tell`."""

    __slots__ = ("_tell", "_token")

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        self._token = _TOLD.set(self._tell)

    def __exit__(self, *_: object) -> None:
        _TOLD.reset(self._token)


def tell_first_token() -> None:
    """Say that the running call's reply has begun; may be called again."""
    tell = _TOLD.get()
    if tell is not None:
        tell()
