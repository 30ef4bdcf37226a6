"""Whether the client is still there while its request is served.

Does not know what is served. Source: own.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from tfgrpo.serve.wire.http import ClientGone, Http

__all__ = ["Presence"]


class Presence:
    """Cancels the running task when the client leaves; a block."""

    def __init__(self, http: Http, *, watches: bool) -> None:
        self._http, self._watches = http, watches
        self.is_gone = False
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        if self._watches:
            self._task = asyncio.current_task()
            leaving = self._http.leaving
            if leaving is None:
                self._watcher = asyncio.ensure_future(self._watch())
            else:
                leaving.watch(self._left)
        return self

    async def _watch(self) -> None:
        await self._http.until_gone()
        self._left()

    def _left(self) -> None:
        self.is_gone = True
        if self._task is not None:
            self._task.cancel()

    def stop(self) -> None:
        """Look no longer; called before the last bytes go out."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        elif self._watches and (leaving := self._http.leaving) is not None:
            leaving.unwatch(self._left)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if self.is_gone and kind is asyncio.CancelledError and self._task is not None:
            self._task.uncancel()
            raise ClientGone from None
