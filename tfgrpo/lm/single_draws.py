"""Several draws as calls of their own, for servers that answer one draw a call.

Does not know providers or retries. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from tfgrpo.errors import ProviderError
from tfgrpo.protocols import Completion


async def draws_in_parallel(
    calls: Iterable[Coroutine[Any, Any, list[Completion]]],
) -> list[Completion]:
    """Return the draws before the first failure, in order; the calls that are left are cancelled.

    Raises:
        ProviderError: the first draw failed, or a later one in a way that no call can survive.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
    replies: list[Completion] = []
    for result in results:
        if isinstance(result, BaseException):
            if replies and isinstance(result, ProviderError) and not result.is_fatal:
                break
            raise result
        replies += result
    return replies
