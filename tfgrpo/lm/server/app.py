"""A local model behind HTTP: `/v1/models` and `/v1/chat/completions`.

Requests of all clients are decoded in one batch. Listens on 127.0.0.1; any other address needs a
token. Bodies are limited, unknown models are 404, and a client that leaves frees its rows.

Does not know tasks, files, or the fields of requests and replies. Source: the chat-completions wire
format.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfgrpo.errors import ConfigError, MissingExtraError, ProviderError
from tfgrpo.lm.server.replies import event, reply_events, reply_json
from tfgrpo.lm.server.requests import Asked, BadBody, read_request
from tfgrpo.lm.wire import loads
from tfgrpo.protocols import LM
from tfgrpo.runtime.hosts import is_loopback
from tfgrpo.runtime.redaction import redact

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

MAX_BODY_BYTES = 4_000_000
_STATUS: Mapping[str, int] = {
    "auth": 401,
    "not_found": 404,
    "quota": 402,
    "rate_limit": 429,
    "timeout": 504,
    "context_too_long": 400,
    "bad_request": 400,
    "refused": 400,
}
_CODES: Mapping[str, str] = {"context_too_long": "context_length_exceeded"}


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where and how a model is served."""

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    token: str = ""
    """What clients must send as `Authorization: Bearer …`; required off loopback."""
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.token and not is_loopback(self.host):
            raise ConfigError(
                f"serve-model: host {self.host!r} can be reached from outside; set a token "
                "(--token-env NAME) or use 127.0.0.1"
            )
        if not 0 <= self.port < 65536:
            raise ConfigError(f"serve-model: port {self.port} must be from 0 to 65535")


def make_app(lm: LM, settings: ServerSettings) -> Starlette:
    """Return the ASGI application that serves `lm`."""
    try:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route
    except ImportError as exc:
        raise MissingExtraError.of("serve", "serve-model", exc.name or "starlette") from exc

    async def models(request: HttpRequest) -> Response:
        if (refusal := _refuse(request, settings)) is not None:
            return refusal
        row = {"id": settings.model_name, "object": "model", "owned_by": "local", "created": 0}
        return JSONResponse({"object": "list", "data": [row]})

    async def chat(request: HttpRequest) -> Response:
        if (refusal := _refuse(request, settings)) is not None:
            return refusal
        try:
            body = await _body(request)
            asked = read_request(body, model_name=settings.model_name, timeout_s=settings.timeout_s)
            if asked.is_stream:
                return await _stream_response(request, lm, asked, settings)
            replies = await _until_gone(request, lm.complete(asked.request, asked.n, asked.seeds))
        except BadBody as exc:
            return _error(exc.status, str(exc), exc.code)
        except ProviderError as exc:
            return _provider_error(exc)
        return JSONResponse(
            reply_json(replies, asked, settings.model_name, getattr(lm, "token_text", None))
        )

    async def health(request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/health", health),
        ]
    )


def _error(status: int, message: str, code: str) -> Response:
    from starlette.responses import JSONResponse

    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": redact(message), "type": kind, "code": code}}, status_code=status
    )


def _provider_error(exc: ProviderError) -> Response:
    return _error(_STATUS.get(exc.kind, 503), str(exc), _CODES.get(exc.kind, exc.kind))


def _refuse(request: HttpRequest, settings: ServerSettings) -> Response | None:
    """Token and origin; a web page of another site must not use the model of its visitor."""
    if request.headers.get("origin"):
        return _error(403, "requests from web pages are not served", "forbidden")
    if settings.token:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), settings.token.encode()):
            return _error(401, "wrong or missing token", "invalid_api_key")
    return None


async def _body(request: HttpRequest) -> dict[str, Any]:
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise BadBody(f"the body is over {MAX_BODY_BYTES:,} bytes", 413)
    pieces = bytearray()
    async for chunk in request.stream():
        pieces += chunk
        if len(pieces) > MAX_BODY_BYTES:
            raise BadBody(f"the body is over {MAX_BODY_BYTES:,} bytes", 413)
    try:
        body = loads(bytes(pieces))
    except ValueError as exc:
        raise BadBody(f"the body is not JSON: {exc!s:.100}") from exc
    if not isinstance(body, dict):
        raise BadBody("the body must be a JSON object")
    return body


async def _until_gone(request: HttpRequest, work: Any) -> Any:
    """Await the work; cancel it when the client leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise BadBody("the client left", 499, "client_closed")
        return await task
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: HttpRequest) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


async def _stream_response(
    request: HttpRequest, lm: LM, asked: Asked, settings: ServerSettings
) -> Response:
    """Server-sent events; starlette cancels the generator when the client leaves. An error before
    the first event is an HTTP status, not an event."""
    from starlette.responses import StreamingResponse

    chunks = reply_events(lm, asked, settings.model_name)
    first: bytes = await _until_gone(request, anext(chunks))

    async def body() -> AsyncIterator[bytes]:
        try:
            yield first
            async for chunk in chunks:
                yield chunk
        except ProviderError as exc:
            error = {"message": redact(str(exc)), "type": "server_error", "code": exc.kind}
            yield event({"error": error})
        finally:
            await chunks.aclose()

    return StreamingResponse(body(), media_type="text/event-stream")


async def serve(lm: LM, settings: ServerSettings, *, ready: asyncio.Event | None = None) -> None:
    """Serve until cancelled or interrupted; closes the model afterwards.

    Args:
        ready: set once the socket listens.
    """
    try:
        import uvicorn
    except ImportError as exc:
        raise MissingExtraError.of("serve", "serve-model", exc.name or "uvicorn") from exc
    config = uvicorn.Config(
        make_app(lm, settings),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    task = asyncio.ensure_future(server.serve())
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.02)
        if server.started and ready is not None:
            ready.set()
        await task
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
        await lm.aclose()
