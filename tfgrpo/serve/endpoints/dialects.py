"""What differs between the endpoints that ask a model: bodies, replies, events, ids.

Does not know HTTP, routes' order or money. Source: the chat-completions, responses and embeddings
formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from tfgrpo.errors import ProviderError
from tfgrpo.lm.error_fields import error_in_answer
from tfgrpo.lm.failures import body_failure, error_in_body
from tfgrpo.lm.finish_words import refuse_failed_finish
from tfgrpo.lm.usage import normalise_usage
from tfgrpo.rollout import Usage
from tfgrpo.serve.inject import Injection, inject, inject_instructions, text_of
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.serve.wire.events import ChatEvents, ResponseEvents

__all__ = ["CHAT", "EMBEDDINGS", "RESPONSES", "Dialect", "Reply"]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_URL_PARTS = ("image_url", "file", "input_image", "input_file", "input_audio", "video_url")
MAX_N = 128


@dataclass(slots=True)
class Reply:
    """A whole reply: its JSON with our id, and what it adds up to."""

    row: dict[str, Any]
    usage: Usage
    model: str
    upstream_id: str
    choices: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """(finish, message) by choice."""


class Dialect(Protocol):
    """One endpoint's format."""

    endpoint: str
    prefix: str

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuse a body that cannot be forwarded (`ApiError`)."""
        ...

    def make(self, body: Mapping[str, Any], model: str, injection: Injection) -> dict[str, Any]:
        """Return the body for an upstream."""
        ...

    def read(self, raw: bytes, public_id: str, size: int, where: str) -> Reply:
        """Read a whole reply (`ProviderError` where it is none)."""
        ...

    def prompt(self, body: Mapping[str, Any]) -> str:
        """Return the text that a router judges."""
        ...


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError:
        row = None
    if not isinstance(row, dict):
        raise body_failure("bad_reply", raw, "the answer is not a JSON object", where=where)
    return row


def _refuse_error(row: Mapping[str, Any], raw: bytes, where: str) -> None:
    error = error_in_answer(row)
    if error is not None:
        raise body_failure(error_in_body(error), raw, "an error with status 200", where=where)


class ChatDialect:
    """`/chat/completions`."""

    endpoint = "/chat/completions"
    prefix = "chatcmpl-"

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuse what no upstream could answer."""
        turns = body.get("messages")
        if not isinstance(turns, list) or not turns:
            raise ApiError("invalid_request", "messages must be a list with at least one turn",
                           param="messages")  # fmt: skip
        for i, turn in enumerate(turns):
            role = turn.get("role") if isinstance(turn, dict) else None
            if not isinstance(role, str) or role not in _ROLES:
                raise ApiError(
                    "invalid_request",
                    f"messages[{i}] must be an object with a role, one of {', '.join(_ROLES)}",
                    param=f"messages[{i}]",
                )
        n = body.get("n")
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_N):
            raise ApiError("invalid_request", f"n must be from 1 to {MAX_N}", param="n")
        if not isinstance(body.get("stream"), (bool, type(None))):
            raise ApiError("invalid_request", "stream must be true or false", param="stream")
        if not isinstance(body.get("stream_options"), (dict, type(None))):
            raise ApiError("invalid_request", "stream_options must be an object",
                           param="stream_options")  # fmt: skip

    def make(self, body: Mapping[str, Any], model: str, injection: Injection) -> dict[str, Any]:
        """Return the body with the upstream's model, the library, and usage asked for."""
        out = {**body, "model": model, "messages": inject(body["messages"], injection)}
        if body.get("stream"):
            out["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        return out

    def read(self, raw: bytes, public_id: str, size: int, where: str) -> Reply:
        """Read a chat completion."""
        row = _object(raw, where)
        _refuse_error(row, raw, where)
        choices = row.get("choices")
        if not isinstance(choices, list) or not choices:
            raise body_failure("bad_reply", raw, "the answer has no choices", where=where)
        found: dict[int, tuple[str, Any]] = {}
        chars = 0
        for place, choice in enumerate(choices):
            message = choice.get("message") if isinstance(choice, dict) else None
            if not isinstance(message, dict):
                raise body_failure("bad_reply", raw, "a choice without a message", where=where)
            refuse_failed_finish(choice.get("finish_reason"))
            found[place] = (str(choice.get("finish_reason") or "stop"), message)
            chars += len(message.get("content") or "") if isinstance(
                message.get("content"), str) else 0  # fmt: skip
        upstream_id, row["id"] = str(row.get("id") or ""), public_id
        usage = normalise_usage(row.get("usage"), prompt_chars=size, reply_chars=chars)
        return Reply(row, usage, str(row.get("model") or ""), upstream_id, found)

    def events(
        self, body: Mapping[str, Any], public_id: str, where: str, *, keeps: bool
    ) -> ChatEvents:
        """Return the reader of a streamed reply."""
        options = body.get("stream_options") or {}
        return ChatEvents(
            public_id, wants_usage=bool(options.get("include_usage")), where=where, keeps=keeps
        )

    def prompt(self, body: Mapping[str, Any]) -> str:
        """Return the text of all turns but the system's."""
        texts = []
        for turn in body["messages"]:
            content = turn.get("content")
            if turn["role"] in ("system", "developer"):
                continue
            if isinstance(content, str):
                texts.append(content)
            elif isinstance(content, list):
                texts += [str(p.get("text") or "") for p in content if isinstance(p, dict)]
        return "\n".join(texts) or "."


class ResponsesDialect:
    """`/responses`: the library goes into `instructions`."""

    endpoint = "/responses"
    prefix = "resp_"

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuse what no upstream could answer."""
        if not isinstance(body.get("input"), (str, list)):
            raise ApiError("invalid_request", "input must be a text or a list", param="input")
        if not isinstance(body.get("instructions"), (str, type(None))):
            raise ApiError("invalid_request", "instructions must be a text", param="instructions")
        if not isinstance(body.get("stream"), (bool, type(None))):
            raise ApiError("invalid_request", "stream must be true or false", param="stream")
        if body.get("background"):
            raise ApiError("invalid_request", "background responses are not served",
                           param="background")  # fmt: skip

    def make(self, body: Mapping[str, Any], model: str, injection: Injection) -> dict[str, Any]:
        """Return the body with the upstream's model and the library."""
        out = {**body, "model": model}
        text = inject_instructions(body.get("instructions") or "", injection)
        if text:
            out["instructions"] = text
        return out

    def read(self, raw: bytes, public_id: str, size: int, where: str) -> Reply:
        """Read a response object."""
        row = _object(raw, where)
        if row.get("status") == "failed" or not isinstance(row.get("output"), list):
            _refuse_error(row, raw, where)
            raise body_failure("bad_reply", raw, "the answer has no output", where=where)
        upstream_id, row["id"] = str(row.get("id") or ""), public_id
        usage = normalise_usage(row.get("usage"), prompt_chars=size, reply_chars=len(raw))
        finish = "stop" if row.get("status") == "completed" else "length"
        choices = {0: (finish, {"role": "assistant", "output": row["output"]})}
        return Reply(row, usage, str(row.get("model") or ""), upstream_id, choices)

    def events(
        self, body: Mapping[str, Any], public_id: str, where: str, *, keeps: bool
    ) -> ResponseEvents:
        """Return the reader of a streamed reply."""
        return ResponseEvents(public_id, where=where)

    def prompt(self, body: Mapping[str, Any]) -> str:
        """Return the text of the input."""
        given = body["input"]
        if isinstance(given, str):
            return given or "."
        texts = []
        for item in given:
            content = item.get("content") if isinstance(item, dict) else None
            if isinstance(content, str):
                texts.append(content)
            elif isinstance(content, list):
                texts += [str(p.get("text") or "") for p in content if isinstance(p, dict)]
        return "\n".join(texts) or "."


class EmbeddingsDialect:
    """`/embeddings`: passed on."""

    endpoint = "/embeddings"
    prefix = "emb-"

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuse what no upstream could answer."""
        if not isinstance(body.get("input"), (str, list)):
            raise ApiError("invalid_request", "input must be a text or a list", param="input")
        if body.get("stream"):
            raise ApiError("invalid_request", "embeddings are not streamed", param="stream")

    def make(self, body: Mapping[str, Any], model: str, injection: Injection) -> dict[str, Any]:
        """Return the body with the upstream's model."""
        return {**body, "model": model}

    def read(self, raw: bytes, public_id: str, size: int, where: str) -> Reply:
        """Read a list of vectors."""
        row = _object(raw, where)
        if not isinstance(row.get("data"), list):
            _refuse_error(row, raw, where)
            raise body_failure("bad_reply", raw, "the answer has no data", where=where)
        usage = row.get("usage")
        counted = {"completion_tokens": 0, **usage} if isinstance(usage, dict) else usage
        return Reply(row, normalise_usage(counted, prompt_chars=size), str(row.get("model") or ""),
                     "")  # fmt: skip

    def events(
        self, body: Mapping[str, Any], public_id: str, where: str, *, keeps: bool
    ) -> ChatEvents:
        """There are none."""
        raise ProviderError("embeddings are not streamed", kind="bad_request")

    def prompt(self, body: Mapping[str, Any]) -> str:
        """Return the text of the input."""
        given = body["input"]
        return given if isinstance(given, str) and given else "."


CHAT = ChatDialect()
RESPONSES = ResponsesDialect()
EMBEDDINGS = EmbeddingsDialect()


def refuse_urls(body: Mapping[str, Any]) -> None:
    """Refuse parts that name a URL for the upstream to fetch; data in the body itself may pass.

    Raises:
        ApiError: 400.
    """
    for turn in (*_list(body.get("messages")), *_list(body.get("input"))):
        content = turn.get("content") if isinstance(turn, dict) else None
        for part in _list(content):
            if not isinstance(part, dict) or part.get("type") not in _URL_PARTS:
                continue
            for value in (part.get(part["type"]), part.get("image_url"), part.get("file_url")):
                url = value.get("url") if isinstance(value, dict) else value
                if isinstance(url, str) and not url.startswith("data:"):
                    raise ApiError(
                        "invalid_request",
                        "this route passes no URLs on; send the data itself (data:…)",
                        param="messages",
                    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def check_system_turns(body: Mapping[str, Any]) -> None:
    """Refuse a system turn that is not text, before anything is reserved (`ApiError`)."""
    for turn in _list(body.get("messages")):
        if isinstance(turn, dict) and turn.get("role") in ("system", "developer"):
            text_of(turn.get("content"))
