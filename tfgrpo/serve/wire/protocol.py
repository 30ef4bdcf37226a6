"""The server's connections, guarded: headers must come in time and stay small.

uvicorn's fast parser has no limits of its own for a request's head. Here a head that does not come
within `HEAD_S`, or holds over `HEAD_BYTES`, closes its connection. Requests are told when their
client leaves, without a task that waits for it; the system's buffer of each client is limited.

Does not know requests. Source: own.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from tfgrpo.serve.wire.http import Leaving

__all__ = ["guarded_protocol"]

HEAD_S = 10.0
HEAD_BYTES = 65_536
SEND_BYTES = 262_144
"""What the system may hold for a client that reads slowly; it takes twice the number it is told."""


def guarded_protocol() -> type[asyncio.Protocol] | str:
    """Return uvicorn's httptools protocol with the guards, or `h11` (which has them)."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class Guarded(HttpToolsProtocol):  # type: ignore[misc]
        _timer: asyncio.TimerHandle | None = None
        _head = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            found = transport.get_extra_info("socket")
            if found is not None:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES // 2)
            self._leaving = Leaving(self.flow.resume_reading)
            self._wait_for_head()

        def _wait_for_head(self) -> None:
            self._head = 0
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_later(HEAD_S, self._too_slow)

        def _too_slow(self) -> None:
            if self.transport is not None and not self.transport.is_closing():
                self.transport.close()

        def on_message_begin(self) -> None:
            self._wait_for_head()
            super().on_message_begin()
            self.scope["tfgrpo.leaving"] = self._leaving

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value))
            super().on_header(name, value)

        def _count(self, size: int) -> None:
            self._head += size
            if self._head > HEAD_BYTES:
                self.transport.close()

        def on_headers_complete(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._head <= HEAD_BYTES:
                super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)
            self._leaving.left()

    return Guarded
