"""Messages over a socket pair: four bytes of length, then JSON; the same on both sides.

Does not know what a message says. Source: own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any, cast

__all__ = ["Frames"]

_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), check_circular=False).encode


class Frames(asyncio.Protocol):
    """One side of a connection that carries messages.

    Args:
        take: takes each message that arrives.
        lost: told once when the other side is gone.
    """

    def __init__(self, take: Callable[[dict[str, Any]], None], lost: Callable[[], None]) -> None:
        self._take, self._lost = take, lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take the messages that are whole."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            size = int.from_bytes(buffer[start : start + 4], "big")
            if len(buffer) - start - 4 < size:
                break
            self._take(json.loads(buffer[start + 4 : start + 4 + size]))
            start += 4 + size
        del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell it."""
        self._transport = None
        self._lost()

    def send(self, messages: Iterable[dict[str, Any]]) -> None:
        """Send messages; nothing where the other side is gone, which is told to `lost`."""
        if self._transport is None:
            return
        parts = []
        for message in messages:
            data = _encode(message).encode("ascii")
            parts.append(len(data).to_bytes(4, "big") + data)
        self._transport.write(b"".join(parts))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()
