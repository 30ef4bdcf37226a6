"""Answers that a scripted server gives: good ones, and every bad one seen in the field.

An `Answer` is rendered for the call it answers (plain or streamed, n draws, the asked model) and
can then be spoilt: split at any byte, dripped, delayed, cut off.

    say("hello")                                a reply, streamed where the client asked for it
    say("hello").drip(0.2)                      one byte every 0.2 s
    status(429, retry_after="3")                a rate limit
    raw(b"<html>", content_type="text/html")    a page with status 200
    events([{...}, {...}], done=True)           a stream of exactly these chunks
    reset(after=40)                             the connection breaks in the body

Does not know sockets. Source: own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from tfgrpo.runtime.canonical import digest


@dataclass(frozen=True, slots=True)
class Call:
    """One request as the server saw it."""

    index: int
    """Order of arrival, from 0."""
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Mapping[str, Any]
    attempt: int = 0
    """How many equal requests came before this one."""

    @property
    def key(self) -> str:
        """Digest of the body without `n`, `seed` and streaming fields: what is asked."""
        dropped = ("n", "seed", "stream", "stream_options")
        return digest({k: v for k, v in self.body.items() if k not in dropped}, 16)

    @property
    def seed(self) -> int | None:
        """The seed asked for."""
        return self.body.get("seed")

    @property
    def n(self) -> int:
        """How many draws are asked for."""
        return int(self.body.get("n") or 1)

    @property
    def is_stream(self) -> bool:
        """True when the client asked for an event stream."""
        return bool(self.body.get("stream"))

    @property
    def text(self) -> str:
        """The last message's text."""
        messages = self.body.get("messages") or [{}]
        return str(messages[-1].get("content") or "")


@dataclass(frozen=True, slots=True)
class Wire:
    """What goes over the wire."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    pieces: tuple[bytes, ...] = ()
    """Body, one HTTP chunk each."""
    wait_s: float = 0.0
    """Before the status line."""
    between_s: float = 0.0
    """Between pieces."""
    breaks: bool = False
    """The connection is reset after the last piece."""
    hangs: bool = False
    """Nothing more comes after the last piece, and the connection stays open."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How to answer one call."""

    render: Callable[[Call], Wire]

    def _then(self, change: Callable[[Wire], Wire]) -> Answer:
        return Answer(lambda call: change(self.render(call)))

    def split(self, *positions: int, every: int | None = None) -> Answer:
        """Cut the body into HTTP chunks at the given byte positions, or every so many bytes."""

        def cut(wire: Wire) -> Wire:
            body = b"".join(wire.pieces)
            places = range(every, len(body), every) if every else sorted(positions)
            marks = [0, *(p for p in places if 0 < p < len(body)), len(body)]
            pieces = tuple(body[a:b] for a, b in pairwise(marks) if a < b)
            return replace(wire, pieces=pieces)

        return self._then(cut)

    def drip(self, seconds: float, *, size: int = 1) -> Answer:
        """Send `size` bytes, wait, and so on."""
        return self.split(every=size)._then(lambda wire: replace(wire, between_s=seconds))

    def after(self, seconds: float) -> Answer:
        """Wait before the status line."""
        return self._then(lambda wire: replace(wire, wait_s=seconds))

    def cut(self, after: int) -> Answer:
        """Reset the connection after so many bytes of the body."""

        def keep(wire: Wire) -> Wire:
            return replace(wire, pieces=(b"".join(wire.pieces)[:after],), breaks=True)

        return self._then(keep)

    def with_headers(self, **headers: str) -> Answer:
        """Add headers; underscores become hyphens."""
        more = tuple((k.replace("_", "-"), v) for k, v in headers.items())
        return self._then(lambda wire: replace(wire, headers=(*wire.headers, *more)))


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _event(value: Any) -> bytes:
    data = value.encode() if isinstance(value, str) else _json_bytes(value)
    return b"data: " + data + b"\n\n"


_JSON_TYPE = (("content-type", "application/json"),)
_STREAM_TYPE = (("content-type", "text/event-stream"),)


@dataclass(frozen=True, slots=True)
class _Said:
    """Fields of a good reply."""

    texts: tuple[str, ...]
    finish: str | None = "stop"
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    usage: Any = "inside"
    model: str | None = None
    reply_id: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    done: bool = True


def say(text: str, **fields: Any) -> Answer:
    """Answer with `text`, as many times as the call asks draws.

    Args:
        text: the reply.
        fields: `finish` (None leaves it out), `reasoning`, `tool_calls` (wire form), `usage`
            (`"inside"`, `"beside"`, None, or the object itself), `model`, `reply_id`, `extra`
            (further fields of each choice), `done` (False leaves the stream's end marker out).
    """
    return Answer(lambda call: _render(call, _Said((text,) * call.n, **fields)))


def choices(*texts: str, **fields: Any) -> Answer:
    """Answer with exactly these draws, however many were asked for; fields as for `say`."""
    return Answer(lambda call: _render(call, _Said(texts, **fields)))


def _render(call: Call, said: _Said) -> Wire:
    model = said.model if said.model is not None else call.body.get("model")
    head = {"id": said.reply_id or f"chatcmpl-{call.index}", "model": model, "created": 0}
    usage = _usage(call, said)
    if call.is_stream:
        return _render_stream(call, said, head | {"object": "chat.completion.chunk"}, usage)
    rows = []
    for i, text in enumerate(said.texts):
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["tool_calls"] = list(said.tool_calls)
        rows.append({"index": i, "message": message, "finish_reason": said.finish, **said.extra})
    body = head | {"object": "chat.completion", "choices": rows}
    if usage is not None:
        body["usage"] = usage
    return Wire(headers=_JSON_TYPE, pieces=(_json_bytes(body),))


def _render_stream(call: Call, said: _Said, head: Mapping[str, Any], usage: Any) -> Wire:
    chunks: list[Any] = []
    for i, text in enumerate(said.texts):
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if said.reasoning:
            deltas.append({"reasoning_content": said.reasoning})
        half = len(text) // 2
        deltas += [{"content": part} for part in (text[:half], text[half:]) if part]
        deltas += [{"tool_calls": [{"index": k, **c}]} for k, c in enumerate(said.tool_calls)]
        chunks += [
            {**head, "choices": [{"index": i, "delta": d, "finish_reason": None, **said.extra}]}
            for d in deltas
        ]
        if said.finish is not None:
            end = {"index": i, "delta": {}, "finish_reason": said.finish}
            chunks.append({**head, "choices": [end]})
    wants_usage = (call.body.get("stream_options") or {}).get("include_usage")
    if usage is not None and wants_usage:
        chunks.append({**head, "choices": [], "usage": usage})
    return _stream_wire(chunks, done=said.done)


def _stream_wire(chunks: Sequence[Any], *, done: bool) -> Wire:
    pieces = [_event(c) for c in chunks] + ([_event("[DONE]")] if done else [])
    return Wire(headers=_STREAM_TYPE, pieces=tuple(pieces))


def _usage(call: Call, said: _Said) -> Any:
    if not isinstance(said.usage, str):
        return said.usage
    prompt = sum(len(str(m.get("content") or "").split()) for m in call.body.get("messages", ()))
    words = sum(len(t.split()) for t in (*said.texts, said.reasoning))
    if said.usage == "beside":
        return {"input_tokens": prompt, "output_tokens": words,
                "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}  # fmt: skip
    return {"prompt_tokens": prompt, "completion_tokens": words, "total_tokens": prompt + words}


def status(
    code: int,
    body: Any = None,
    *,
    retry_after: str | None = None,
    **headers: str,
) -> Answer:
    """Answer with an HTTP status and a JSON (or text, or bytes) body.

    Args:
        code: the status.
        body: None gives the usual error object; a string or bytes are sent as they are.
        retry_after: the header's text, whatever it is.
        headers: further headers; underscores become hyphens.
    """
    if body is None:
        body = {"error": {"message": f"scripted status {code}", "type": "scripted"}}
    data = body if isinstance(body, bytes) else (
        body.encode() if isinstance(body, str) else _json_bytes(body)
    )  # fmt: skip
    rows = [(k.replace("_", "-"), v) for k, v in headers.items()]
    if retry_after is not None:
        rows.append(("retry-after", retry_after))
    return Answer(lambda call: Wire(code, (*_JSON_TYPE, *rows), (data,)))


def raw(body: bytes, *, content_type: str = "application/json", code: int = 200) -> Answer:
    """Answer with exactly these bytes."""
    return Answer(lambda call: Wire(code, (("content-type", content_type),), (body,)))


def events(chunks: Sequence[Any], *, done: bool = True) -> Answer:
    """Answer with a stream of these chunks (JSON values, or strings sent as they are)."""
    return Answer(lambda call: _stream_wire(chunks, done=done))


def reset(after: int = 0) -> Answer:
    """Reset the connection: at once, or after so many bytes of a reply."""
    if after == 0:
        return Answer(lambda call: Wire(status=0, breaks=True))
    return say("a reply that nobody will read to its end").cut(after)


def hang() -> Answer:
    """Accept the request and never answer."""
    return Answer(lambda call: Wire(status=0, hangs=True))
