"""A worker on Ray: an asynchronous actor around a `Workbench`.

Messages come in blocks and leave in one stream, everything that was finished in the meantime at
once. Importable by name on every node; nothing of it is shipped. Does not know who started it.
Source: own.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

from tfgrpo.errors import ExecutorError
from tfgrpo.workers.token import FILE_VARIABLE, VARIABLE, worker_token
from tfgrpo.workers.work import software
from tfgrpo.workers.workbench import Workbench

__all__ = ["RayWorker"]


class RayWorker:
    """One worker of a run.

    Args:
        endpoint: URL of the run's endpoint.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._out: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._bench: Workbench | None = None

    async def hello(self) -> str:
        """Begin; returns as JSON what the worker is, or why it cannot work."""
        place = f"pid {os.getpid()} on {socket.gethostname()}"
        token = worker_token()
        if token is None:
            return json.dumps(
                {"place": place, "error": f"neither {VARIABLE} nor {FILE_VARIABLE} is set there"}
            )
        self._bench = Workbench(self._out.put_nowait, self._endpoint, token.value)
        return json.dumps({"place": place, "ready": software()})

    async def take(self, messages: bytes) -> None:
        """Take a block of messages."""
        if self._bench is None:
            raise ExecutorError("hello comes first")
        for message in json.loads(messages):
            self._bench.take(message)

    async def events(self) -> AsyncIterator[bytes]:
        """Give what was finished, as blocks of messages, for as long as the worker lives."""
        while True:
            block = [await self._out.get()]
            while not self._out.empty():
                block.append(self._out.get_nowait())
            yield json.dumps(block).encode("ascii")
