"""Requests and replies of the ASGI servers, without a framework on the way of a request.

Bodies are read under a limit of bytes, of time and of nesting; headers come as a dict of lower-case
names. Does not know endpoints. Source: the ASGI specification 3.0 (HTTP).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

import orjson

from tfgrpo.runtime.hosts import is_loopback
from tfgrpo.serve.wire.errors import ApiError

__all__ = ["Asgi", "Http", "Leaving", "check_depth", "parse_object"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MAX_DEPTH = 64
"""Deepest nesting of a body."""
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A text, or what is left of one that has no end."""
_BRACKET = re.compile(rb"[\[\]{}]")


class Leaving:
    """Tells a connection's requests when its client has left; made by the server's protocol.

    Args:
        resume: lets the connection be read on, without which nobody notices.
    """

    __slots__ = ("_callbacks", "_resume", "has_left")

    def __init__(self, resume: Callable[[], None]) -> None:
        self._callbacks: set[Callable[[], None]] = set()
        self._resume = resume
        self.has_left = False

    def watch(self, callback: Callable[[], None]) -> None:
        """Call back when the client leaves, at once where it has."""
        self._callbacks.add(callback)
        if self.has_left:
            callback()
        else:
            self._resume()

    def unwatch(self, callback: Callable[[], None]) -> None:
        """Call it back no more."""
        self._callbacks.discard(callback)

    def left(self) -> None:
        """Tell that the client has left."""
        self.has_left = True
        for callback in tuple(self._callbacks):
            callback()


class Http:
    """One request and its reply.

    Args:
        scope, receive, send: as the server gives them.
        drop_after_s: a client that takes nothing for so long is left.
    """

    __slots__ = (
        "_receive",
        "_scope",
        "_send",
        "drop_after_s",
        "extra",
        "headers",
        "is_started",
        "method",
        "path",
        "status",
    )  # fmt: skip

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
        *,
        drop_after_s: float = 30.0,
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {
            k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]
        }
        self.extra: list[tuple[bytes, bytes]] = []
        """Headers that every reply of this request gets."""
        self.is_started = False
        self.status = 0
        self.drop_after_s = drop_after_s

    @property
    def query(self) -> dict[str, str]:
        """The query's parameters; the last of equal names wins."""
        return dict(parse_qsl(self._scope.get("query_string", b"").decode("latin-1")))

    @property
    def is_loopback(self) -> bool:
        """True where the client is on this machine."""
        client = self._scope.get("client")
        return client is None or is_loopback(str(client[0]))

    def check_headers(self, most: int, most_bytes: int) -> None:
        """Refuse too many or too large headers.

        Raises:
            ApiError: 431.
        """
        rows = self._scope["headers"]
        size = sum(len(k) + len(v) for k, v in rows)
        if len(rows) > most or size > most_bytes:
            raise ApiError(
                "headers_too_large",
                f"{len(rows)} headers of {size:,} bytes; allowed are {most} of {most_bytes:,}",
            )

    async def body(self, most_bytes: int, within_s: float) -> bytes:
        """Return the whole body.

        Raises:
            ApiError: 413 over the limit, 408 where it does not come in time, 400 where the client
                leaves in its middle.
        """
        length = self.headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > most_bytes):
            raise _too_large(most_bytes)
        first = await self._next(within_s)
        if not first.get("more_body"):
            data: bytes = first.get("body", b"")
            if len(data) > most_bytes:
                raise _too_large(most_bytes)
            return data
        pieces, size = [first.get("body", b"")], len(first.get("body", b""))
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while True:
            message = await self._next(until - loop.time())
            piece = message.get("body", b"")
            size += len(piece)
            if size > most_bytes:
                raise _too_large(most_bytes)
            pieces.append(piece)
            if not message.get("more_body"):
                return b"".join(pieces)

    async def _next(self, within_s: float) -> MutableMapping[str, Any]:
        try:
            async with asyncio.timeout(max(within_s, 0.0)):
                message = await self._receive()
        except TimeoutError:
            raise ApiError("body_timeout", "the body did not come in time") from None
        if message["type"] == "http.disconnect":
            raise ApiError("invalid_request", "the client left before its body was whole")
        return message

    @property
    def leaving(self) -> Leaving | None:
        """Who tells that the client has left; None where the server cannot."""
        found: Leaving | None = self._scope.get("tfgrpo.leaving")
        return found

    async def until_gone(self) -> None:
        """Return when the client has left; call it after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self,
        status: int,
        body: bytes,
        headers: Iterable[tuple[bytes, bytes]] = (),
        *,
        content_type: bytes = b"application/json",
    ) -> None:
        """Send a whole reply."""
        self.status = status
        self.is_started = True
        rows = [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            *self.extra,
            *headers,
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": rows})
        await self._send({"type": "http.response.body", "body": body})

    async def json(
        self, status: int, value: Any, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        """Send a JSON value."""
        await self.reply(status, orjson.dumps(value), headers)

    async def error(self, error: ApiError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send an error, where nothing was sent yet."""
        if not self.is_started:
            rows = [(k.encode(), v.encode()) for k, v in error.headers().items()]
            await self.reply(error.status, error.body(), (*rows, *headers))

    async def start_events(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Begin an event stream."""
        self.status = 200
        self.is_started = True
        rows = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *headers,
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": rows})

    async def send(self, data: bytes) -> None:
        """Send a piece of the stream; waits while the client reads more slowly than we write.

        Raises:
            ClientGone: it took nothing for `drop_after_s`.
        """
        try:
            async with asyncio.timeout(self.drop_after_s):
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise ClientGone from None

    async def finish(self) -> None:
        """End the stream."""
        await self._send({"type": "http.response.body", "body": b""})


class ClientGone(Exception):
    """The client has left, or reads nothing."""


def _too_large(most: int) -> ApiError:
    return ApiError("body_too_large", f"the body is larger than {most:,} bytes")


def check_depth(raw: bytes, most: int = MAX_DEPTH) -> None:
    """Refuse JSON that is nested too deep, before any parser recurses on it.

    Raises:
        ApiError: 400.
    """
    if raw.count(b"[") + raw.count(b"{") <= most:
        return
    depth = 0
    for match in _BRACKET.finditer(_TEXT.sub(b"", raw)):
        depth += 1 if match[0] in b"[{" else -1
        if depth > most:
            raise ApiError("invalid_request", f"the body is nested over {most} deep")


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object that a body holds.

    Raises:
        ApiError: 400 where it is none.
    """
    check_depth(raw)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise ApiError("invalid_request", f"the body is not JSON: {exc!s:.200}") from None
    if not isinstance(value, dict):
        raise ApiError("invalid_request", "the body must be a JSON object")
    return value


def header_rows(values: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as the server wants them; what no header can carry is replaced."""
    return [(k.encode("ascii"), v.encode("latin-1", "replace")) for k, v in values.items()]
