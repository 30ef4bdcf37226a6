"""What is handed over to a writer of a server, and who waits for it.

Does not know connections. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tfgrpo.errors import StoreError
from tfgrpo.store.rows import Statement

__all__ = ["Item", "Start", "resolve"]


@dataclass(slots=True, eq=False)
class Item:
    """Something handed over, and who waits for it."""

    statements: list[Statement]
    done: asyncio.Future[Any] | Future[Any] | None = None
    error: StoreError | None = None


@dataclass(slots=True, eq=False)
class Start(Item):
    """A call about to be sent."""

    call: int = 0
    keys: tuple[bytes, ...] = ()
    intent: Callable[[int, int], Statement] = field(default=lambda call, session: ("", ()))
    unsent: Callable[[int], list[Statement]] = field(default=lambda call: [])
    asked_at: float = 0.0
    """Monotonic, before the first attempt to write it."""
    mine: frozenset[bytes] = frozenset()
    """The draws that are this call's."""
    is_written: bool = False
    is_given_up: bool = False
    """True where the task that wanted it was cancelled."""

    @property
    def is_unsent(self) -> bool:
        """True where its intent stands and nobody will send it."""
        return self.is_written and self.is_given_up and bool(self.mine or not self.keys)


def resolve(items: Iterable[Item], error: StoreError | None) -> None:
    """Tell whoever waits, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for item in items:
        failed = item.error or error
        if isinstance(item.done, Future):
            if failed is None:
                item.done.set_result(None)
            else:
                item.done.set_exception(failed)
        elif item.done is not None:
            by_loop.setdefault(item.done.get_loop(), []).append((item.done, failed))
    for loop, waiting in by_loop.items():
        with suppress(RuntimeError):  # closed: nobody waits any more
            loop.call_soon_threadsafe(_finish, waiting)


def _finish(waiting: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for done, failed in waiting:
        if done.done():
            continue
        if failed is None:
            done.set_result(None)
        else:
            done.set_exception(failed)
