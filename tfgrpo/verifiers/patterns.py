"""Users' regular expressions on answers, under a limit that binds.

Python's matching holds the interpreter and cannot be stopped; `(a+)+$` on forty letters has no
end. What could take long is tried in a worker process that is killed at its limit, or as soon as
nobody waits any more; what is bounded by its form runs here. Does not know rewards. Source: own.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
import threading
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from tfgrpo.errors import VerifierError
from tfgrpo.runtime.user_code import call_foreign
from tfgrpo.verifiers.pattern_worker import answer
from tfgrpo.verifiers.workers import WorkerPool

__all__ = ["Mode", "try_pattern", "try_pattern_now"]

Mode = Literal["search", "full", "last"]
"""`search` and `full` give whether it matches; `last` gives the last match or its first group."""

_TIMEOUT_S = 10.0
_MOST_STEPS = 1_000_000
"""Steps of matching that may run in this process."""
_PARSER: Any = importlib.import_module("re._parser")
_WORKER = Path(__file__).with_name("pattern_worker.py")


@cache
def _pool() -> WorkerPool:
    return WorkerPool([sys.executable, "-I", str(_WORKER)], 2, "a regular expression")


async def try_pattern(pattern: re.Pattern[str], text: str, mode: Mode) -> Any:
    """Return what `mode` says of a pattern on a text.

    Raises:
        VerifierError: no result within 10 seconds.
    """
    request = _request(pattern, text, mode)
    if _is_bounded(pattern, text):
        return answer(request)["found"]
    stop = threading.Event()
    try:
        reply = await call_foreign(
            _pool().ask,
            request,
            _TIMEOUT_S,
            stop,
            error=VerifierError,
            where="a regular expression",
        )
    except asyncio.CancelledError:
        stop.set()
        raise
    return _found(reply, pattern)


def try_pattern_now(pattern: re.Pattern[str], text: str, mode: Mode) -> Any:
    """`try_pattern` for callers without an event loop; blocks."""
    request = _request(pattern, text, mode)
    if _is_bounded(pattern, text):
        return answer(request)["found"]
    return _found(_pool().ask(request, _TIMEOUT_S), pattern)


def _request(pattern: re.Pattern[str], text: str, mode: Mode) -> dict[str, Any]:
    return {"pattern": pattern.pattern, "flags": pattern.flags, "text": text, "mode": mode}


def _is_bounded(pattern: re.Pattern[str], text: str) -> bool:
    return bool((len(text) + 1) ** _power(pattern.pattern, pattern.flags) <= _MOST_STEPS)


def _found(reply: Mapping[str, Any], pattern: re.Pattern[str]) -> Any:
    if "error" in reply:
        raise VerifierError(f"the regular expression {pattern.pattern!r:.80}: {reply['error']}")
    return reply["found"]


@lru_cache(256)
def _power(pattern: str, flags: int) -> int:
    """Return p where matching a text of n characters takes at most n**p steps; 99 where unknown.

    Each repeat can try every length, and so can the place where a search begins.
    """
    try:
        tree = _PARSER.parse(pattern, flags & ~re.DEBUG)
    except (re.error, RecursionError):
        return 99
    return 1 + _repeats(tree, inside=False)


def _repeats(tree: Any, *, inside: bool) -> int:
    total = 0
    for operation, value in tree:
        name = str(operation)
        if "REPEAT" in name:
            if inside:
                return 99
            total += 1 + _repeats(value[2], inside=True)
        elif name == "SUBPATTERN":
            total += _repeats(value[3], inside=inside)
        elif name == "BRANCH":
            if inside:
                return 99
            total += sum(_repeats(branch, inside=inside) for branch in value[1])
        elif name in ("ASSERT", "ASSERT_NOT"):
            total += _repeats(value[1], inside=inside)
        elif name in ("ATOMIC_GROUP", "GROUPREF_EXISTS"):
            return 99
    return total
