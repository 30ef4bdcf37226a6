"""A local model behind HTTP: `/v1/models` and `/v1/chat/completions`.

Requests of all clients are decoded in one batch. `n` draws get the seeds `seed`, `seed + 1`, …
(or the list given in the extra field `seeds`). Listens on 127.0.0.1; any other address needs a
token. Bodies are limited, unknown models are 404, and a client that leaves frees its rows.

Does not know tasks or files; it never fetches a URL. Source: the chat-completions wire format.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfgrpo.errors import ConfigError, MissingExtraError, ProviderError
from tfgrpo.lm.wire import loads
from tfgrpo.messages import Message, Role, ToolCall
from tfgrpo.protocols import LM, Completion, Limits, Request, Sampling, ToolSpec
from tfgrpo.redact import redact

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

MAX_BODY_BYTES = 4_000_000
MAX_N = 256
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
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
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
        if not self.token and not _is_loopback(self.host):
            raise ConfigError(
                f"serve-model: host {self.host!r} can be reached from outside; set a token "
                "(--token-env NAME) or use 127.0.0.1"
            )
        if not 0 <= self.port < 65536:
            raise ConfigError(f"serve-model: port {self.port} must be from 0 to 65535")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _BadBody(Exception):
    """A request that cannot be served; the message is for the client."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


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
            asked = _read(body, settings)
            if asked.is_stream:
                return await _stream_response(request, lm, asked, settings)
            replies = await _until_gone(request, lm.complete(asked.request, asked.n, asked.seeds))
        except _BadBody as exc:
            return _error(exc.status, str(exc), exc.code)
        except ProviderError as exc:
            return _provider_error(exc)
        return JSONResponse(_whole(replies, asked, settings.model_name))

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
        raise _BadBody(f"the body is over {MAX_BODY_BYTES:,} bytes", 413)
    pieces = bytearray()
    async for chunk in request.stream():
        pieces += chunk
        if len(pieces) > MAX_BODY_BYTES:
            raise _BadBody(f"the body is over {MAX_BODY_BYTES:,} bytes", 413)
    try:
        body = loads(bytes(pieces))
    except ValueError as exc:
        raise _BadBody(f"the body is not JSON: {exc!s:.100}") from exc
    if not isinstance(body, dict):
        raise _BadBody("the body must be a JSON object")
    return body


@dataclass(frozen=True, slots=True)
class _Asked:
    request: Request
    n: int
    seeds: tuple[int | None, ...]
    is_stream: bool
    wants_usage: bool
    wants_ids: bool


def _read(body: Mapping[str, Any], settings: ServerSettings) -> _Asked:
    model = body.get("model")
    if model != settings.model_name:
        raise _BadBody(
            f"the model {model!r} does not exist; this server has {settings.model_name!r}",
            404,
            "model_not_found",
        )
    n = _whole_number(body, "n", 1, 1, MAX_N)
    seeds = _seeds(body, n)
    options = body.get("stream_options") or {}
    return _Asked(
        Request(
            _messages(body),
            tools=_tools(body),
            tool_choice=_tool_choice(body),
            sampling=_sampling(body),
            limits=Limits(timeout_s=settings.timeout_s),
        ),
        n,
        seeds,
        is_stream=bool(body.get("stream")),
        wants_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        wants_ids=bool(body.get("return_tokens_as_token_ids") or body.get("return_token_ids")),
    )


def _whole_number(
    body: Mapping[str, Any], name: str, default: int | None, low: int, high: int
) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _BadBody(f"{name} {value!r} must be a whole number from {low} to {high}")
    return value


def _number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise _BadBody(f"{name} {value!r} must be a number from {low:g} to {high:g}")
    return float(value)


def _seeds(body: Mapping[str, Any], n: int) -> tuple[int | None, ...]:
    given = body.get("seeds")
    if given is not None:
        if not isinstance(given, list) or len(given) != n or not all(
            isinstance(s, int) and not isinstance(s, bool) for s in given
        ):  # fmt: skip
            raise _BadBody(f"seeds must be a list of n = {n} whole numbers")
        return tuple(given)
    seed = _whole_number(body, "seed", None, -(2**63), 2**63 - 1)
    return tuple(None if seed is None else seed + i for i in range(n))


def _sampling(body: Mapping[str, Any]) -> Sampling:
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > 16
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise _BadBody("stop must be a text or a list of at most 16 texts")
    limit = _whole_number(body, "max_completion_tokens", None, 1, 1 << 20)
    if limit is None:
        limit = _whole_number(body, "max_tokens", None, 1, 1 << 20)
    top_p = _number(body, "top_p", 0, 1)
    if top_p == 0:
        raise _BadBody("top_p 0 must be above 0, up to 1")
    return Sampling(
        temperature=_number(body, "temperature", 0, 100),
        top_p=top_p,
        max_tokens=limit,
        stop=tuple(stops),
        logprobs=bool(body.get("logprobs")),
        top_logprobs=_whole_number(body, "top_logprobs", 0, 0, 20),
    )


def _content(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = [p.get("text") for p in value if isinstance(p, Mapping) and p.get("type") == "text"]
        if len(texts) == len(value) and all(isinstance(t, str) for t in texts):
            return "".join(str(t) for t in texts)
    raise _BadBody("content must be text; images and other parts are not served")


def _messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    rows = body.get("messages")
    if not isinstance(rows, list) or not rows:
        raise _BadBody("messages must be a list with at least one turn")
    messages = []
    for row in rows:
        given = row.get("role") if isinstance(row, Mapping) else None
        role = _ROLES.get(given) if isinstance(given, str) else None
        if role is None:
            raise _BadBody(f"role {given!r} must be one of {', '.join(_ROLES)}")
        calls = []
        for call in row.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                raise _BadBody("a tool call needs a function")
            calls.append(
                ToolCall(
                    str(call.get("id") or ""),
                    str(function.get("name") or ""),
                    str(function.get("arguments") or "{}"),
                )
            )
        messages.append(
            Message(
                role, _content(row.get("content")), tuple(calls), str(row.get("tool_call_id") or "")
            )
        )
    return tuple(messages)


def _tools(body: Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    tools = []
    for row in body.get("tools") or ():
        function = row.get("function") if isinstance(row, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _BadBody("each tool needs a function with a name")
        tools.append(
            ToolSpec(
                function["name"],
                str(function.get("description") or ""),
                function.get("parameters") or {"type": "object", "properties": {}},
            )
        )
    return tuple(tools)


def _tool_choice(body: Mapping[str, Any]) -> str | None:
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        return str((choice.get("function") or {}).get("name") or "auto")
    return choice if isinstance(choice, str) else None


async def _until_gone(request: HttpRequest, work: Any) -> Any:
    """Await the work; cancel it when the client leaves."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _BadBody("the client left", 499, "client_closed")
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


def _usage_json(replies: Sequence[Completion]) -> dict[str, Any]:
    prompt = sum(r.usage.prompt_tokens for r in replies)
    completion = sum(r.usage.completion_tokens for r in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(r.usage.cache_read_tokens for r in replies)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(r.usage.reasoning_tokens for r in replies)
        },
    }


def _message_json(reply: Completion) -> dict[str, Any]:
    row: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        row["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        row["content"] = reply.text or None
        row["tool_calls"] = [
            {
                "index": i,
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(reply.tool_calls)
        ]
    return row


def _logprobs_json(reply: Completion) -> dict[str, Any] | None:
    if reply.logprobs is None or reply.token_ids is None:
        return None
    rows: list[dict[str, Any]] = []
    for i, (token, logprob) in enumerate(zip(reply.token_ids, reply.logprobs, strict=True)):
        top = reply.top_logprobs[i] if reply.top_logprobs else {}
        rows.append(
            {
                "token": f"token_id:{token}",
                "logprob": logprob,
                "bytes": None,
                "top_logprobs": [{"token": t, "logprob": p} for t, p in top.items()],
            }
        )
    return {"content": rows}


def _choice_json(index: int, reply: Completion, asked: _Asked, key: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "index": index,
        key: _message_json(reply),
        "finish_reason": reply.finish,
        "logprobs": _logprobs_json(reply),
    }
    if asked.wants_ids and reply.token_ids is not None:
        row["token_ids"] = list(reply.token_ids)
    return row


def _whole(replies: Sequence[Completion], asked: _Asked, model: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice_json(i, r, asked, "message") for i, r in enumerate(replies)],
        "usage": _usage_json(replies),
    }


async def _stream_response(
    request: HttpRequest, lm: LM, asked: _Asked, settings: ServerSettings
) -> Response:
    """Server-sent events; starlette cancels the generator when the client leaves. An error before
    the first event is an HTTP status, not an event."""
    from starlette.responses import StreamingResponse

    chunks = _chunks(lm, asked, settings.model_name)
    first: bytes = await _until_gone(request, anext(chunks))

    async def body() -> AsyncIterator[bytes]:
        try:
            yield first
            async for chunk in chunks:
                yield chunk
        except ProviderError as exc:
            error = {"message": redact(str(exc)), "type": "server_error", "code": exc.kind}
            yield _sse({"error": error})
        finally:
            await chunks.aclose()

    return StreamingResponse(body(), media_type="text/event-stream")


def _sse(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=True).encode() + b"\n\n"


async def _chunks(lm: LM, asked: _Asked, model: str) -> Any:
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }
    replies: list[Completion] = []
    stream = getattr(lm, "stream", None)
    # Tokens go out one by one for a single draw of plain text; what must be parsed goes out whole.
    if (
        stream is not None
        and asked.n == 1
        and not asked.request.tools
        and not _wants_logprobs(asked)
    ):
        async for piece in stream(asked.request, asked.seeds[0]):
            if isinstance(piece, str):
                delta = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
                yield _sse({**head, "choices": [delta]})
            else:
                replies.append(piece)
                end: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": piece.finish}
                if asked.wants_ids:
                    end["token_ids"] = list(piece.token_ids or ())
                yield _sse({**head, "choices": [end]})
    else:
        replies = await lm.complete(asked.request, asked.n, asked.seeds)
        for i, reply in enumerate(replies):
            yield _sse({**head, "choices": [_choice_json(i, reply, asked, "delta")]})
    if asked.wants_usage:
        yield _sse({**head, "choices": [], "usage": _usage_json(replies)})
    yield b"data: [DONE]\n\n"


def _wants_logprobs(asked: _Asked) -> bool:
    return asked.request.sampling.logprobs or asked.request.sampling.top_logprobs > 0


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
