"""Sync over async: runs a coroutine, or blocking work, whether or not an event loop runs already.

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
    if not _is_loop_running():
        return work()  # outside of any handler, or every error in it would hang on "no loop"
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
