"""A request that asks a model, from its body to its last byte: whole or streamed.

A client that leaves cancels the upstream, also before the first byte; with an Idempotency-Key the
call is finished and kept for its retry. A stream's headers wait for the first content, so that any
failure before it is an ordinary HTTP error and failover is invisible; after `hold_s` they go out
and comments keep the connection open.

Does not know formats (`dialects`) or what is tried (`exchange`). Source: own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tfgrpo.errors import ProviderError
from tfgrpo.lm.usage import normalise_usage
from tfgrpo.protocols import Completion
from tfgrpo.rollout import Usage
from tfgrpo.serve.access.idempotency import Kept, KeyScope
from tfgrpo.serve.endpoints.best_of import BestOf
from tfgrpo.serve.endpoints.dialects import (
    RESPONSES,
    check_system_turns,
    refuse_urls,
)
from tfgrpo.serve.endpoints.groups import check_identities
from tfgrpo.serve.exchange import Attempt, Ended, Exchange
from tfgrpo.serve.gateway import Gateway
from tfgrpo.serve.identity import Extensions, Place, bare_id, read_extensions
from tfgrpo.serve.routes import Route
from tfgrpo.serve.wire.errors import ApiError, from_failure
from tfgrpo.serve.wire.events import ChatEvents, as_events, event_bytes
from tfgrpo.serve.wire.http import ClientGone, Http, header_rows, parse_object
from tfgrpo.serve.wire.presence import Presence

__all__ = ["ask"]


async def ask(gateway: Gateway, http: Http, place: Place, key_name: str, dialect: Any) -> None:
    """Serve one request.

    Raises:
        ApiError: where nothing was sent yet.
    """
    serve = gateway.settings.serve
    raw = await http.body(serve.max_body_bytes, serve.body_s)
    body = parse_object(raw)
    ext = read_extensions(body.pop("tfgrpo", None), http.headers, place)
    route = gateway.route(place.route or body.get("model"), key_name)
    dialect.check(body)
    check_system_turns(body)
    if route.settings.urls == "refuse":
        refuse_urls(body)
    if ext.group_id or ext.task_id:
        check_identities(gateway, route, ext, body.get("messages"), key_name)
    with gateway.user_rate(key_name, ext.end_user):
        await _ask(gateway, http, Asked(route, body, len(raw), ext), key_name, dialect)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read."""

    route: Route
    body: dict[str, Any]
    size: int
    """Bytes of its body."""
    ext: Extensions


async def _ask(gateway: Gateway, http: Http, asked: Asked, key_name: str, dialect: Any) -> None:
    route, body = asked.route, asked.body
    exchange = Exchange(gateway, route, dialect.endpoint, body, asked.size, key_name, asked.ext)
    asking = _Asking(gateway, http, exchange, dialect)
    if dialect is RESPONSES and body.get("previous_response_id"):
        asking.follow(body["previous_response_id"])
    idempotency_key = http.headers.get("idempotency-key")
    retries = http.headers.get("x-stainless-retry-count", "0")
    if retries != "0":
        gateway.metrics.add("client_retries", {"route": route.name})
    key: KeyScope | None = None
    digest = ""
    if idempotency_key is not None:
        key = KeyScope(key_name, dialect.endpoint, idempotency_key)
        digest = hashlib.sha256(orjson.dumps(body)).hexdigest()
    deadline_s = _deadline_s(http.headers)
    try:
        if deadline_s is None:
            await asking.serve(key, digest)
            return
        async with asyncio.timeout(deadline_s) as deadline:
            await asking.serve(key, digest)
    except TimeoutError:
        if deadline_s is None or not deadline.expired():
            raise
        raise ApiError("deadline", "the time that the request allowed has passed") from None
    finally:
        gateway.metrics.add("requests", {"route": route.name, "status": str(http.status or 499)})
        gateway.metrics.observe("overhead", route.name, exchange.overhead_s)


def _deadline_s(headers: Mapping[str, str]) -> float | None:
    text = headers.get("x-request-timeout-ms", "")
    return int(text) / 1000 if text.isdecimal() and len(text) < 10 and int(text) > 0 else None


class _Asking:
    def __init__(self, gateway: Gateway, http: Http, exchange: Exchange, dialect: Any) -> None:
        self._gateway, self._http, self._exchange = gateway, http, exchange
        self._dialect: Any = dialect
        self._public_id = dialect.prefix + exchange.response_id
        self._key: KeyScope | None = None
        self._digest = ""
        self._presence = Presence(http, watches=True)
        self._only = ""
        self._upstream_previous = ""
        # Of a stream:
        self._events: Any = None
        self._has_content = False
        self._sent: list[bytes] = []
        self._is_deaf = False
        self._keeper: asyncio.Task[None] | None = None

    def follow(self, previous: Any) -> None:
        """Send the request to the upstream that made the response it goes on from.

        Raises:
            ApiError: 404, this gateway (or this key) never had that response.
        """
        rows = self._gateway.journal.writer.read(
            "SELECT r.upstream, r.upstream_id FROM replies r JOIN requests q"
            " ON q.response_id = r.response_id WHERE r.response_id = ? AND q.key = ?"
            " AND q.route = ?",
            (bare_id(previous), self._exchange.key_name, self._exchange.route.name),
        )
        if not rows or not rows[0][1]:
            raise ApiError("unknown_response", "this gateway has no such response",
                           param="previous_response_id")  # fmt: skip
        self._only, self._upstream_previous = rows[0]

    async def serve(self, key: KeyScope | None, digest: str) -> None:
        """Answer, from what is kept or by asking."""
        self._key, self._digest = key, digest
        is_stream = bool(self._exchange.body.get("stream"))
        if key is None:
            with self._presence:
                await self._answer(is_stream)
            return
        self._presence = Presence(self._http, watches=False)
        kept = await self._gateway.idempotency.enter(key, digest, is_stream=is_stream)
        if kept is not None:
            await self._replay(kept, is_stream=is_stream)
            return
        try:
            await self._answer(is_stream)
        finally:
            self._gateway.idempotency.leave(key)

    async def _answer(self, is_stream: bool) -> None:
        if self._exchange.ext.samples > 1:
            await self._best(is_stream)
        else:
            await (self._stream() if is_stream else self._whole())

    async def _best(self, is_stream: bool) -> None:
        """Answer with the best of several draws; a stream begins after the selection."""
        best = BestOf(self._gateway, self._exchange, self._make, self._public_id)
        row, headers = await best.run(self._names())
        self._exchange.remember()
        data = as_events(row, self._exchange.body) if is_stream else orjson.dumps(row)
        if self._key is not None:
            kept = Kept(self._exchange.response_id, 200, headers, data)
            rows = self._gateway.idempotency.rows(self._key, self._digest, kept)
            await self._gateway.journal.writer.commit(rows)
        self._presence.stop()
        if not is_stream:
            await self._http.reply(200, data, header_rows(headers))
            return
        await self._http.start_events(header_rows(headers))
        await self._http.send(data)
        await self._http.finish()

    async def _replay(self, kept: Kept, *, is_stream: bool) -> None:
        headers = header_rows({**kept.headers, "x-tfgrpo-cached": "idempotent"})
        if not is_stream:
            await self._http.reply(kept.status, kept.body, headers)
            return
        await self._http.start_events(headers)
        await self._http.send(kept.body)
        await self._http.finish()

    def _names(self) -> list[str]:
        exchange = self._exchange
        if self._only:
            return [self._only]
        return exchange.ranking(lambda: self._dialect.prompt(exchange.body))

    def _make(self, model: Any, injection: Any) -> dict[str, Any]:
        exchange = self._exchange
        body: dict[str, Any] = self._dialect.make(exchange.body, model.upstream.model, injection)
        if self._upstream_previous:
            body["previous_response_id"] = self._upstream_previous
        return body

    def _abandon(self, attempt: Attempt) -> None:
        """Book a call that nobody waits for any more."""
        exchange = self._exchange
        state = "left" if self._presence.is_gone or self._is_deaf else "deadline"
        rows = exchange.end_rows(Ended(499 if state == "left" else 408, state, error=state))
        rows = [*self._cut_rows(), *rows]
        events = self._events
        if exchange.route.settings.on_cancel == "seen" and isinstance(events, ChatEvents):
            seen = normalise_usage(
                events.usage, prompt_chars=exchange.size, reply_chars=events.reply_chars
            )
            attempt.call.leave(seen, rows, state)
        else:
            attempt.call.abandon(rows, state)

    # Whole replies.

    async def _whole(self) -> None:
        exchange = self._exchange
        data, headers = await exchange.attempts(self._names(), self._make, self._ask_whole)
        exchange.remember()
        self._presence.stop()
        await self._http.reply(200, data, header_rows(headers))

    async def _ask_whole(self, attempt: Attempt) -> tuple[bytes, dict[str, str]]:
        exchange, model = self._exchange, attempt.model
        try:
            with exchange.upstream_time():
                raw = await model.upstream.call(
                    exchange.endpoint, attempt.body, model.settings.timeout_s
                )
        except asyncio.CancelledError:
            self._abandon(attempt)
            raise
        reply = self._dialect.read(raw, self._public_id, exchange.size, model.upstream.spec)
        priced = attempt.call.priced(reply.usage)
        cost = priced.cost_usd
        extra = self._extra(cost)
        if "feedback_token" in extra:
            reply.row["tfgrpo"] = extra
        data = orjson.dumps(reply.row)
        headers = exchange.headers(self._public_id, cost)
        rows = exchange.choice_rows(reply.choices)
        rows += exchange.end_rows(Ended(200, "ok", reply.model, reply.upstream_id, cost))
        if self._key is not None:
            kept = Kept(exchange.response_id, 200, headers, data)
            rows += self._gateway.idempotency.rows(self._key, self._digest, kept)
        await attempt.call.end(priced, reply.model, max(1, len(reply.choices)), rows)
        return data, headers

    def _extra(self, cost: float | None) -> dict[str, Any]:
        extra: dict[str, Any] = {"cost_usd": cost, "response_id": self._public_id}
        route = self._exchange.route
        if route.settings.feedback_tokens and route.settings.learn is not None:
            extra["feedback_token"] = self._gateway.tokens.make(
                self._exchange.response_id, route.settings.learn.feedback.metric
            )
        return extra

    # Streams.

    async def _stream(self) -> None:
        exchange, http = self._exchange, self._http
        hold_s = self._gateway.settings.serve.hold_s
        loop = asyncio.get_running_loop()
        timer = loop.call_later(hold_s, self._start_keeper)
        failure: ApiError
        try:
            await exchange.attempts(
                self._names(), self._make, self._ask_stream, lambda: self._has_content,
                self._cut_rows,
            )  # fmt: skip
            exchange.remember()
            return
        except ProviderError as error:
            failure = from_failure(error, is_billed=True)
        except ApiError as error:
            failure = error
            if not http.is_started:
                raise
        finally:
            timer.cancel()
            self._stop_keeper()
        self._presence.stop()
        await self._send(self._failed_events(failure))
        if not self._is_deaf:
            await http.finish()

    def _failed_events(self, failure: ApiError) -> bytes:
        if self._dialect is not RESPONSES:
            return event_bytes(failure.to_dict())
        number = getattr(self._events, "last_sequence", 0)
        error = {"type": "error", "code": failure.code, "message": failure.message,
                 "param": failure.param, "sequence_number": number + 1}  # fmt: skip
        response = {"id": self._public_id, "object": "response", "status": "failed",
                    "error": {"code": failure.code, "message": failure.message}}  # fmt: skip
        failed = {"type": "response.failed", "sequence_number": number + 2, "response": response}
        return (b"event: error\n" + event_bytes(error)
                + b"event: response.failed\n" + event_bytes(failed))  # fmt: skip

    def _start_keeper(self) -> None:
        self._keeper = asyncio.ensure_future(self._keep_open())

    def _stop_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None

    async def _keep_open(self) -> None:
        """Send the headers and comments while nothing has come."""
        if not self._http.is_started:
            await self._http.start_events(header_rows(self._exchange.headers(self._public_id)))
        while True:
            await self._http.send(b": wait\n\n")
            await asyncio.sleep(self._gateway.settings.serve.comment_s)

    async def _ask_stream(self, attempt: Attempt) -> None:
        exchange, model = self._exchange, attempt.model
        events = self._events = self._dialect.events(
            exchange.body, self._public_id, model.upstream.spec, keeps=exchange.captures
        )
        held: list[bytes] = []
        try:
            with exchange.upstream_time():
                async with model.upstream.stream(
                    exchange.endpoint, attempt.body, model.settings.timeout_s
                ) as pieces:
                    async for piece in pieces:
                        out = events.feed(piece)
                        if not self._has_content:
                            held.append(out)
                            if not events.has_content:
                                continue
                            await self._begin_events()
                            out = b"".join(held)
                        if out:
                            await self._send(out)
                    last = events.close()
        except (asyncio.CancelledError, ClientGone):
            self._abandon(attempt)
            raise
        await self._end_stream(attempt, last)

    async def _begin_events(self) -> None:
        self._stop_keeper()
        self._has_content = True
        if not self._http.is_started:
            await self._http.start_events(header_rows(self._exchange.headers(self._public_id)))

    async def _send(self, data: bytes) -> None:
        if self._key is not None:
            self._sent.append(data)
        if self._is_deaf:
            return
        try:
            await self._http.send(data)
        except ClientGone:
            self._is_deaf = True
            if self._key is None:
                raise

    async def _end_stream(self, attempt: Attempt, last: bytes) -> None:
        exchange, events = self._exchange, self._events
        usage: Usage = normalise_usage(
            events.usage, prompt_chars=exchange.size, reply_chars=events.reply_chars
        )
        priced = attempt.call.priced(usage)
        cost = priced.cost_usd
        tail = last + (events.tail(self._extra(cost)) if isinstance(events, ChatEvents) else b"")
        rows = exchange.choice_rows(_kept_choices(events))
        rows += exchange.end_rows(Ended(200, "ok", events.model, events.upstream_id, cost))
        if self._key is not None:
            body = b"".join([*self._sent, tail])
            kept = Kept(exchange.response_id, 200, exchange.headers(self._public_id, cost), body)
            rows += self._gateway.idempotency.rows(self._key, self._digest, kept)
        n = len(events.finishes) if isinstance(events, ChatEvents) else 1
        await attempt.call.end(priced, events.model, max(1, n), rows)
        self._presence.stop()
        if not self._is_deaf:
            await self._http.send(tail)
            await self._http.finish()

    def _cut_rows(self) -> list[Any]:
        events = self._events
        if not isinstance(events, ChatEvents):
            return []
        kept = {i: ("cut", message) for i, (_, message) in _kept_choices(events).items()}
        return self._exchange.choice_rows(kept)


def _kept_choices(events: Any) -> dict[int, tuple[str, Any]]:
    """Return (finish, message) by choice of a streamed chat reply."""
    found: dict[int, tuple[str, Any]] = {}
    for index, parts in getattr(events, "parts", {}).items():
        done: Completion = parts.completion(usage=Usage(), model="")
        message: dict[str, Any] = {"role": "assistant", "content": done.text}
        if done.tool_calls:
            message["tool_calls"] = [
                {"id": c.call_id, "type": "function",
                 "function": {"name": c.name, "arguments": c.arguments}}
                for c in done.tool_calls
            ]  # fmt: skip
        found[index] = (events.finishes.get(index, "cut"), message)
    return found
