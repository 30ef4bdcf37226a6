"""Event loops: sync over async whether or not a loop runs already, and tasks nobody waits for.

Does not know what is run. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_sync(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end, also where a loop is already running (a notebook)."""
    return off_loop(lambda: asyncio.run(make()))


def off_loop(work: Callable[[], T]) -> T:
    """Run blocking work here, or in a thread where an event loop runs already (a notebook)."""
    if running_loop() is None:
        return work()  # outside of any handler, or every error in it would hang on "no loop"
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def start_task(work: Coroutine[Any, Any, T], kept: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Start work that nobody waits for; `kept` holds it until it ends, as loops hold none."""
    task = asyncio.get_running_loop().create_task(work)
    kept.add(task)
    task.add_done_callback(kept.discard)
    return task
