"""One streamed reply on its way: events in, events out, and what they add up to.

Knows when the first content comes, which choices are finished, the usage and the upstream's own id.
Every event gets our id; the usage event is passed on only where the client asked for it.

Does not know connections or money. Source: the chat-completions and responses event formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from tfgrpo.errors import ProviderError
from tfgrpo.lm.error_fields import error_in_answer
from tfgrpo.lm.failures import body_failure, error_in_body
from tfgrpo.lm.finish_words import refuse_failed_finish
from tfgrpo.lm.stream import EventStream
from tfgrpo.lm.wire import ChoiceParts

__all__ = ["ChatEvents", "ResponseEvents", "as_events", "event_bytes"]

_MOST_PENDING = 4_000_000
"""Bytes of one unfinished event."""


def event_bytes(value: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def as_events(row: dict[str, Any], body: Mapping[str, Any]) -> bytes:
    """Return a whole reply as the events of a stream."""
    head = {k: v for k, v in row.items() if k not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk"
    choice = row["choices"][0]
    message = {k: v for k, v in choice["message"].items() if v is not None}
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": i, **c} for i, c in enumerate(message["tool_calls"])]
    rows = [
        {"index": 0, "delta": message, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": choice.get("finish_reason") or "stop"},
    ]
    out = [event_bytes({**head, "choices": [r]}) for r in rows]
    if (body.get("stream_options") or {}).get("include_usage"):
        out.append(event_bytes({**head, "choices": [], "usage": row["usage"]}))
    return b"".join([*out, b"data: [DONE]\n\n"])


class _Events:
    """A stream of events that is passed on; what an event becomes is the subclass's."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._events = EventStream()

    def feed(self, piece: bytes) -> bytes:
        """Take a piece of the upstream's stream, return what goes to the client.

        Raises:
            ProviderError: an error event, or bytes that are no events.
        """
        out = [self._event(text) for text in self._events.feed(piece)]
        if self._events.pending_bytes > _MOST_PENDING:
            raise ProviderError(f"{self._where}: one event is too long", kind="bad_reply")
        return b"".join(out)

    def _event(self, text: str) -> bytes:
        raise NotImplementedError


class ChatEvents(_Events):
    """The events of one chat completion.

    Args:
        response_id: written into every event.
        wants_usage: the client asked for the usage event.
        where: model and address, for messages.
        keeps: also put the replies together.
    """

    def __init__(
        self, response_id: str, *, wants_usage: bool, where: str, keeps: bool = False
    ) -> None:
        super().__init__(where)
        self._id, self._wants_usage, self._keeps = response_id, wants_usage, keeps
        self._unfinished: set[int] = set()
        self.parts: dict[int, ChoiceParts] = {}
        """The replies by choice, where they are kept."""
        self.finishes: dict[int, str] = {}
        self.has_content = False
        """Content, a tool call, reasoning or a finish was seen."""
        self.usage: Any = None
        self.model = ""
        self.upstream_id = ""
        self.reply_chars = 0
        self.usage_event: dict[str, Any] | None = None
        self._head: dict[str, Any] = {}

    def close(self) -> bytes:
        """Take the end of the upstream's stream.

        Raises:
            ProviderError: it ended before every choice was finished.
        """
        out = b"".join(self._event(text) for text in self._events.close())
        if self._unfinished or not self.finishes:
            raise ProviderError(
                f"{self._where}: the stream ended without a finish reason", kind="bad_reply"
            )
        return out

    def tail(self, extra: Mapping[str, Any]) -> bytes:
        """Return the last events: the usage where it was asked for, and the end mark."""
        done = b"data: [DONE]\n\n"
        if not self._wants_usage:
            return done
        row = self.usage_event or {**self._head, "choices": [], "usage": self.usage}
        return event_bytes({**row, "tfgrpo": dict(extra)}) + done

    def _event(self, text: str) -> bytes:
        if text.strip() == "[DONE]":
            return b""
        try:
            row = orjson.loads(text)
        except orjson.JSONDecodeError:
            row = None
        if not isinstance(row, dict):
            raise body_failure(
                "bad_reply", text, "an event that is no JSON object", where=self._where
            )
        error = error_in_answer(row)
        if error is not None:
            raise body_failure(
                error_in_body(error), text, "an error in the stream", where=self._where
            )
        return self._take(row)

    def _take(self, row: dict[str, Any]) -> bytes:
        if isinstance(row.get("usage"), dict):
            self.usage = row["usage"]
        if not self.model and isinstance(row.get("model"), str):
            self.model = row["model"]
        if not self.upstream_id and isinstance(row.get("id"), str):
            self.upstream_id = row["id"]
        row["id"] = self._id
        choices = row.get("choices") or []
        if not isinstance(choices, list):
            raise body_failure(
                "bad_reply", repr(choices)[:400], "choices that are no list", where=self._where
            )
        if not choices:
            if self.usage is not None and row.get("usage") is not None:
                self.usage_event = row
                return b""
            return event_bytes(row)
        if not self._head:
            self._head = {k: v for k, v in row.items() if k not in ("choices", "usage")}
        if not self._wants_usage:
            row.pop("usage", None)
        for choice in choices:
            if isinstance(choice, dict):
                self._choice(choice)
        return event_bytes(row)

    def _choice(self, choice: Mapping[str, Any]) -> None:
        index = choice.get("index")
        index = index if isinstance(index, int) else 0
        delta = choice.get("delta")
        if isinstance(delta, dict):
            for name in ("content", "reasoning_content", "reasoning", "refusal", "tool_calls"):
                value = delta.get(name)
                if value:
                    self.has_content = True
                    self.reply_chars += len(value) if isinstance(value, str) else len(str(value))
        if choice.get("finish_reason") is not None:
            refuse_failed_finish(choice["finish_reason"])
            self.has_content = True
            self.finishes[index] = str(choice["finish_reason"])
            self._unfinished.discard(index)
        elif index not in self.finishes:
            self._unfinished.add(index)
        if self._keeps:
            self.parts.setdefault(index, ChoiceParts()).add(choice, delta)


class ResponseEvents(_Events):
    """The events of the responses API: passed on with our id in place of the upstream's."""

    def __init__(self, response_id: str, *, where: str) -> None:
        super().__init__(where)
        self._id = response_id
        self.has_content = False
        self.usage: Any = None
        self.model = ""
        self.upstream_id = ""
        self.is_done = False
        self.reply_chars = 0
        self.last_sequence = 0

    def close(self) -> bytes:
        """Take the end of the upstream's stream.

        Raises:
            ProviderError: it ended before the response was complete.
        """
        out = b"".join(self._event(text) for text in self._events.close())
        if not self.is_done:
            raise ProviderError(
                f"{self._where}: the stream ended before the response was complete",
                kind="bad_reply",
            )
        return out

    def _event(self, text: str) -> bytes:
        if text.strip() == "[DONE]":
            return b""
        try:
            row = orjson.loads(text)
        except orjson.JSONDecodeError:
            row = None
        if not isinstance(row, dict):
            raise body_failure(
                "bad_reply", text, "an event that is no JSON object", where=self._where
            )
        kind = str(row.get("type", ""))
        if kind in ("error", "response.failed") or row.get("error"):
            response = row.get("response")
            inner = response.get("error") if isinstance(response, dict) else None
            raise body_failure(
                error_in_body(row.get("error") or inner or row), text, "an error in the stream",
                where=self._where,
            )  # fmt: skip
        if isinstance(row.get("sequence_number"), int):
            self.last_sequence = row["sequence_number"]
        response = row.get("response")
        if isinstance(response, dict):
            self._response(response, kind)
        if kind.endswith(".delta"):
            self.has_content = True
            self.reply_chars += len(str(row.get("delta") or ""))
        return b"event: " + kind.encode("utf-8", "replace") + b"\n" + event_bytes(row)

    def _response(self, response: dict[str, Any], kind: str) -> None:
        if isinstance(response.get("id"), str) and not self.upstream_id:
            self.upstream_id = response["id"]
        response["id"] = self._id
        if isinstance(response.get("usage"), dict):
            self.usage = response["usage"]
        if isinstance(response.get("model"), str):
            self.model = response["model"]
        if kind in ("response.completed", "response.incomplete"):
            self.is_done = self.has_content = True
