"""Run a user's function, synchronous or not, so that nothing foreign leaves it.

Policies, tools and verifiers all call code that somebody else wrote. A synchronous function runs
in a daemon thread of its own: it cannot block the event loop, and one that hangs cannot keep the
interpreter from ending. Whatever it raises becomes an error of our tree.

Does not know what the function is for. A thread cannot be killed: after a time-out the result of
a synchronous function is dropped while its thread runs on. Source: own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tfgrpo.errors import TfgrpoError, boundary

__all__ = ["CallTimeout", "call_foreign", "end_process", "is_any_running", "is_async"]

_THREAD = "tfgrpo: "
"""How the names of threads begin that run foreign code."""


class CallTimeout(Exception):
    """The function did not end within its time. Never raised by the function itself."""


def is_async(fn: Callable[..., Any]) -> bool:
    """Return whether calling `fn` gives a coroutine.

    >>> is_async(asyncio.sleep), is_async(len)
    (True, False)
    """
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        getattr(fn, "__call__", None)  # noqa: B004 - the method's kind is asked for, not its presence
    )


async def call_foreign(
    fn: Callable[..., Any],
    *args: Any,
    error: type[TfgrpoError],
    where: str,
    timeout_s: float | None = None,
    named: Mapping[str, Any] | None = None,
) -> Any:
    """Return `fn(*args, **named)`, awaited where it is awaitable.

    Arguments by name come as a mapping, so that they may have any name, also one of these
    parameters. Context variables (such as the call scope) are seen by the function, also in its
    thread.

    Raises:
        error: the function raised something that is not ours; `where` stands in the message.
        TfgrpoError: the function raised one itself; it passes unchanged.
        CallTimeout: it took longer than `timeout_s` seconds.
    """
    kwargs = dict(named or {})
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            with boundary(error, where):
                if is_async(fn):
                    return await fn(*args, **kwargs)
                result = await _in_thread(fn, args, kwargs, error, where)
                return await result if inspect.isawaitable(result) else result
    except TimeoutError:
        if not deadline.expired():
            raise
        raise CallTimeout(f"{where}: no result within {timeout_s:g} s") from None


async def _in_thread(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: type[TfgrpoError],
    where: str,
) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, failure: TfgrpoError | None) -> None:
        if future.done():  # timed out or cancelled meanwhile
            return
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)

    def post(result: Any, failure: TfgrpoError | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    def work() -> None:
        result: Any = None
        failure: TfgrpoError | None = error(f"{where}: it ended without a result")
        try:
            with boundary(error, where):
                result = context.run(fn, *args, **kwargs)
            failure = None
        except TfgrpoError as exc:
            failure = exc
        except (StopIteration, SystemExit) as exc:
            # A boundary lets both pass: contextlib re-raises the first, the second is no Exception.
            failure = error(f"{where}: {type(exc).__name__}: {exc}")
            failure.__cause__ = exc
        finally:
            post(result, failure)

    threading.Thread(target=work, name=f"{_THREAD}{where}"[:60], daemon=True).start()
    return await future


def is_any_running() -> bool:
    """True while a foreign function has not ended, though nobody may wait for it any more."""
    return any(t.name.startswith(_THREAD) for t in threading.enumerate())


def end_process(code: int) -> NoReturn:
    """End the process with an exit code, without taking the interpreter apart.

    Exit hooks run and streams are flushed. A thread that asks for the interpreter's lock inside a
    C++ extension after that, as torch's do, would end the process with SIGABRT in place of the code
    (pytorch issue 38228).
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(code)
