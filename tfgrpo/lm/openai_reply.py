"""The answer of a chat-completions call while it is read: a whole body or a stream of events.

Bytes held are limited, a stream that ends without a finish reason is not an answer, and what is no
answer at all (a page, an error with status 200) is a typed failure.

Does not know connections, deadlines or prices. Source: the chat-completions wire format.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tfgrpo.errors import ProviderError
from tfgrpo.lm.error_fields import error_in_answer, said_in
from tfgrpo.lm.failures import body_failure, error_in_body
from tfgrpo.lm.first_token import tell_first_token
from tfgrpo.lm.stream import EventStream
from tfgrpo.lm.usage import normalise_usage, unseen_in
from tfgrpo.lm.wire import ChoiceParts, loads, prompt_bytes, reply_bytes
from tfgrpo.protocols import Request

_PIECE_OVERHEAD = 64
"""Bytes that a held piece costs beside its text: bounds 2,000,000 one-letter pieces, too."""


class ReplyReader:
    """One answer while it is read: its choices, usage and model, within the bytes allowed."""

    def __init__(self, request: Request, where: str) -> None:
        self.choices: dict[int, ChoiceParts] = {}
        self.usage: Any = None
        self.model = ""
        self._where = where
        self._limit = request.limits.max_reply_bytes
        self._held = 0
        self._has_begun = False
        self._prompt_bytes = prompt_bytes(request)
        self._max_tokens = request.sampling.max_tokens

    def blame(self, failure: ProviderError) -> None:
        """Write on a failure what the answer had cost before it broke off."""
        failure.had_output |= any(p.has_output for p in self.choices.values())
        if failure.spent is None and isinstance(self.usage, Mapping):
            weights = [reply_bytes(p) for p in self.choices.values()]
            spent = normalise_usage(
                self.usage,
                prompt_chars=self._prompt_bytes,
                reply_chars=sum(weights),
                unseen=unseen_in(self._max_tokens, max(1, len(self.choices))),
            )
            failure.spent = None if spent.is_estimated else spent

    async def read_body(self, chunks: AsyncIterator[bytes]) -> None:
        """Read a whole JSON answer."""
        pieces: list[bytes] = []
        async for chunk in chunks:
            self._hold(len(chunk))
            pieces.append(chunk)
        raw = b"".join(pieces)
        self._take(raw, "message")
        if not self.choices:
            raise self._bad("the answer has no choices", raw)
        for parts in self.choices.values():
            if parts.finish is None:
                parts.finish = "stop"  # a whole body needs no terminal marker

    async def read_stream(self, chunks: AsyncIterator[bytes], first_token: asyncio.Timeout) -> None:
        """Read an event stream to its end; raises where no choice was finished."""
        events = EventStream()
        head = b""
        done = False
        async for chunk in chunks:
            if len(head) < 4096:
                head += chunk[:4096]
            self._bound_line(len(chunk), events)
            for data in events.feed(chunk):
                done = self._event(data, first_token) or done
        for data in events.close():
            done = self._event(data, first_token) or done
        unfinished = [p for p in self.choices.values() if p.finish is None]
        if self.choices and not unfinished:
            return
        if not self.choices and not done:
            # Not a stream at all: a plain JSON body, a page, or nothing.
            self._take(head, "message")
            if self.choices and all(p.finish for p in self.choices.values()):
                return
        raise self._bad(
            "the stream ended without a finish reason" if self.choices else "an empty answer", head
        )

    def _bound_line(self, size: int, events: EventStream) -> None:
        if events.pending_bytes + size > self._limit + 65536:
            raise self._too_long()

    def _event(self, data: str, first_token: asyncio.Timeout) -> bool:
        """Take one event's data; True for the done marker."""
        if data.strip() == "[DONE]":
            return True
        for text in _json_texts(data):
            before = self._held
            self._take(text.encode("utf-8", "surrogatepass"), "delta")
            if self._held != before and not self._has_begun:
                self._has_begun = True
                if first_token.when() is not None:
                    first_token.reschedule(None)
                tell_first_token()
        return False

    def _json(self, raw: bytes) -> Mapping[str, Any]:
        if not raw.strip():
            raise self._bad("an empty answer", raw)
        try:
            answer = loads(raw.removeprefix(b"\xef\xbb\xbf"))
        except ValueError:
            answer = None
        if not isinstance(answer, Mapping):
            raise self._bad("the answer is not a JSON object", raw)
        return answer

    def _refuse_errors(self, answer: Mapping[str, Any], raw: bytes) -> None:
        """Raise where an answer says that it is an error: beside its choices, in place of them, or
        in one of them."""
        error = error_in_answer(answer)
        if error is None and not self.choices and not answer.get("choices"):
            error = {"message": said_in(answer)} if said_in(answer) else None
        if error is not None:
            raise body_failure(
                error_in_body(error), raw, "an error with status 200", where=self._where
            )

    def _take(self, raw: bytes, key: str) -> None:
        answer = self._json(raw)
        if isinstance(answer.get("usage"), Mapping):
            self.usage = answer["usage"]
        if isinstance(answer.get("model"), str) and answer["model"]:
            self.model = answer["model"]
        prompt_ids = answer.get("prompt_token_ids")
        choices = answer.get("choices")
        for place, choice in enumerate(choices if isinstance(choices, list) else ()):
            if not isinstance(choice, Mapping):
                continue
            index = choice.get("index")
            parts = self.choices.setdefault(
                index if isinstance(index, int) and key == "delta" else place, ChoiceParts()
            )
            if isinstance(prompt_ids, list) and all(type(i) is int for i in prompt_ids):
                parts.prompt_token_ids = tuple(prompt_ids)
            body = choice.get(key) or choice.get("delta" if key == "message" else "message")
            if parts.add(choice, body) and key == "delta":
                self._hold(_size(body) + _PIECE_OVERHEAD)
        self._refuse_errors(answer, raw)

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > self._limit:
            raise self._too_long()

    def _too_long(self) -> ProviderError:
        return ProviderError(
            f"{self._where}: the reply is longer than limits.max_reply_bytes = {self._limit:,}; "
            "set max_tokens, or raise the limit",
            kind="bad_reply",
        )

    def _bad(self, why: str, raw: bytes) -> ProviderError:
        return body_failure("bad_reply", raw, why, where=self._where)


def _json_texts(data: str) -> list[str]:
    """An event's data as JSON texts: one, or one a line where a server forgot the empty lines."""
    if "\n" not in data:
        return [data] if data.strip() else []
    try:
        loads(data.encode("utf-8", "surrogatepass"))
    except ValueError:
        return [line for line in data.split("\n") if line.strip() and line.strip() != "[DONE]"]
    return [data]


def _size(body: Any) -> int:
    """Characters of text in a delta; nested tool-call pieces included."""
    if isinstance(body, str):
        return len(body)
    if isinstance(body, Mapping):
        return sum(_size(v) for v in body.values())
    if isinstance(body, list):
        return sum(_size(v) for v in body)
    return 0
