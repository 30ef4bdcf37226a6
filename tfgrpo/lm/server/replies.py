"""Completions in the JSON of chat-completions replies, whole or as server-sent events.

Does not know HTTP connections, bodies of requests or failures. Source: the chat-completions wire
format.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from tfgrpo.lm.server.requests import Asked
from tfgrpo.protocols import LM, Completion

TokenText = Callable[[int], str]


def reply_json(
    replies: Sequence[Completion], asked: Asked, model: str, token_text: TokenText | None = None
) -> dict[str, Any]:
    """Return the body of a reply that is sent whole, one choice a draw.

    Args:
        token_text: text of a token, for log-probabilities.
    """
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            _choice_json(i, r, asked, "message", token_text) for i, r in enumerate(replies)
        ],
        "usage": _usage_json(replies),
    }


async def reply_events(lm: LM, asked: Asked, model: str) -> Any:
    """Ask the model and yield the events of a streamed reply as bytes; its failures pass."""
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }
    replies: list[Completion] = []
    stream, text_of = getattr(lm, "stream", None), getattr(lm, "token_text", None)
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
                yield event({**head, "choices": [delta]})
            else:
                replies.append(piece)
                end: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": piece.finish}
                if asked.wants_ids:
                    end["token_ids"] = list(piece.token_ids or ())
                yield event({**head, "choices": [end]})
    else:
        replies = await lm.complete(asked.request, asked.n, asked.seeds)
        for i, reply in enumerate(replies):
            yield event({**head, "choices": [_choice_json(i, reply, asked, "delta", text_of)]})
    if asked.wants_usage:
        yield event({**head, "choices": [], "usage": _usage_json(replies)})
    yield b"data: [DONE]\n\n"


def _wants_logprobs(asked: Asked) -> bool:
    return asked.request.sampling.logprobs or asked.request.sampling.top_logprobs > 0


def event(value: Any) -> bytes:
    """Return a JSON value as one server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=True).encode() + b"\n\n"


def _choice_json(
    index: int, reply: Completion, asked: Asked, key: str, token_text: TokenText | None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "index": index,
        key: _message_json(reply, asked),
        "finish_reason": reply.finish,
        "logprobs": _logprobs_json(reply, None if asked.ids_as_tokens else token_text),
    }
    if asked.wants_ids and reply.token_ids is not None:
        row["token_ids"] = list(reply.token_ids)
    return row


def _message_json(reply: Completion, asked: Asked) -> dict[str, Any]:
    row: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.reasoning and not asked.hides_reasoning:
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
            for i, call in enumerate(reply.tool_calls[: asked.most_calls])
        ]
    return row


def _logprobs_json(reply: Completion, token_text: TokenText | None) -> dict[str, Any] | None:
    if reply.logprobs is None or reply.token_ids is None:
        return None
    rows: list[dict[str, Any]] = []
    for i, (token, logprob) in enumerate(zip(reply.token_ids, reply.logprobs, strict=True)):
        top = reply.top_logprobs[i] if reply.top_logprobs else {}
        rows.append(
            {
                **_token_json(token_text(token) if token_text else f"token_id:{token}", logprob),
                "top_logprobs": [_token_json(t, p) for t, p in top.items()],
            }
        )
    return {"content": rows}


def _token_json(text: str, logprob: float) -> dict[str, Any]:
    """Return one token; bytes only where its text is whole characters."""
    is_text = "\ufffd" not in text and not text.startswith("token_id:")
    data = list(text.encode("utf-8", "replace")) if is_text else None
    return {"token": text, "logprob": logprob, "bytes": data}


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
