"""The body of a chat-completions request, read and checked.

`n` draws get the seeds `seed`, `seed + 1`, … or the list in the extra field `seeds`. What cannot be
served is a `BadBody` whose message tells the client why.

Does not know HTTP connections, models or replies; it never fetches a URL. Source: the
chat-completions wire format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfgrpo.messages import Message, Role, ToolCall
from tfgrpo.protocols import Limits, Request, Sampling, ToolSpec
from tfgrpo.runtime.json_text import shown
from tfgrpo.runtime.texts.surrogates import without_surrogates

MAX_N = 256
_RENDERING = ("continue_final_message", "add_generation_prompt", "chat_template_kwargs")
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class BadBody(Exception):
    """A request that cannot be served; the message is for the client."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client wants: a request, its draws, and the form of the reply."""

    request: Request
    n: int
    seeds: tuple[int | None, ...]
    is_stream: bool
    wants_usage: bool
    wants_ids: bool
    ids_as_tokens: bool = False
    """Write each token of the log-probabilities as `token_id:123`, as vLLM does on request."""
    most_calls: int | None = None
    """Tool calls of one reply that are passed on; None for all."""
    hides_reasoning: bool = False


def read_request(body: Mapping[str, Any], *, model_name: str, timeout_s: float) -> Asked:
    """Return what a body asks for.

    Args:
        body: the JSON object.
        model_name: the one model that may be named.
        timeout_s: limit of the request that is made.

    Raises:
        BadBody: another model, or a field that is wrong.
    """
    model = body.get("model")
    if model != model_name:
        raise BadBody(
            f"the model {model!r} does not exist; this server has {model_name!r}",
            404,
            "model_not_found",
        )
    body = without_surrogates(body)
    _refuse_unserved(body)
    n = _whole_number(body, "n", 1, 1, MAX_N)
    seeds = _seeds(body, n)
    options = body.get("stream_options") or {}
    return Asked(
        Request(
            _messages(body),
            tools=_tools(body),
            tool_choice=_tool_choice(body),
            sampling=_sampling(body),
            limits=Limits(timeout_s=timeout_s),
        ),
        n,
        seeds,
        is_stream=_flag(body, "stream"),
        wants_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        wants_ids=_flag(body, "return_tokens_as_token_ids") or _flag(body, "return_token_ids"),
        ids_as_tokens=_flag(body, "return_tokens_as_token_ids"),
        most_calls=None if _flag(body, "parallel_tool_calls", default=True) else 1,
        hides_reasoning=not _flag(body, "include_reasoning", default=True),
    )


_SERVED = frozenset({
    "model", "messages", "n", "seed", "seeds", "stop", "temperature", "top_p", "max_tokens",
    "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice", "stream",
    "stream_options", "return_tokens_as_token_ids", "return_token_ids", "continue_final_message",
    "add_generation_prompt", "chat_template_kwargs", "parallel_tool_calls", "include_reasoning",
})  # fmt: skip
_WITHOUT_EFFECT_ON_REPLIES = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "request_id", "priority",
})  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "logit_bias": ({},), "top_k": (0, -1), "min_p": (0,), "best_of": (1,), "echo": (False,),
    "response_format": ({"type": "text"},), "skip_special_tokens": (True,), "ignore_eos": (False,),
    "functions": ([],), "modalities": (["text"],), "length_penalty": (1,), "min_tokens": (0,),
}  # fmt: skip
"""Values that ask for nothing."""


def _refuse_unserved(body: Mapping[str, Any]) -> None:
    """Refuse fields that would change replies and have no effect here, rather than ignore them."""
    for name, value in body.items():
        if value is None or name in _SERVED or name in _WITHOUT_EFFECT_ON_REPLIES:
            continue
        if value not in _NEUTRAL.get(name, ()):
            raise BadBody(
                f"{name} = {shown(value)} is not served; leave the field out",
                code="unsupported_parameter",
            )


def _whole_number(
    body: Mapping[str, Any], name: str, default: int | None, low: int, high: int
) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadBody(f"{name} {value!r} must be a whole number from {low} to {high}")
    return value


def _flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadBody(f"{name} {shown(value)} must be true or false")
    return value


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadBody(f"{name} {shown(value)} must be a list")
    return value


def _number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise BadBody(f"{name} {value!r} must be a number from {low:g} to {high:g}")
    return float(value)


def _seeds(body: Mapping[str, Any], n: int) -> tuple[int | None, ...]:
    given = body.get("seeds")
    if given is not None:
        if not isinstance(given, list) or len(given) != n or not all(
            isinstance(s, int) and not isinstance(s, bool) for s in given
        ):  # fmt: skip
            raise BadBody(f"seeds must be a list of n = {n} whole numbers")
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
        raise BadBody("stop must be a text or a list of at most 16 texts")
    limit = _whole_number(body, "max_completion_tokens", None, 1, 1 << 20)
    if limit is None:
        limit = _whole_number(body, "max_tokens", None, 1, 1 << 20)
    top_p = _number(body, "top_p", 0, 1)
    if top_p == 0:
        raise BadBody("top_p 0 must be above 0, up to 1")
    return Sampling(
        temperature=_number(body, "temperature", 0, 100),
        top_p=top_p,
        max_tokens=limit,
        stop=tuple(stops),
        logprobs=_flag(body, "logprobs"),
        top_logprobs=_whole_number(body, "top_logprobs", 0, 0, 20),
        extra={n: body[n] for n in _RENDERING if body.get(n) is not None},
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
    raise BadBody("content must be text; images and other parts are not served")


def _messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    rows = body.get("messages")
    if not isinstance(rows, list) or not rows:
        raise BadBody("messages must be a list with at least one turn")
    messages = []
    for row in rows:
        given = row.get("role") if isinstance(row, Mapping) else None
        role = _ROLES.get(given) if isinstance(given, str) else None
        if role is None:
            raise BadBody(f"role {given!r} must be one of {', '.join(_ROLES)}")
        calls = []
        for call in _list(row, "tool_calls"):
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                raise BadBody("a tool call needs a function")
            calls.append(
                ToolCall(
                    str(call.get("id") or ""),
                    str(function.get("name") or ""),
                    _arguments(function.get("arguments")),
                )
            )
        messages.append(
            Message(
                role, _content(row.get("content")), tuple(calls), str(row.get("tool_call_id") or "")
            )
        )
    return tuple(messages)


def _arguments(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value)
    return str(value or "{}")


def _tools(body: Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    tools = []
    for row in _list(body, "tools"):
        function = row.get("function") if isinstance(row, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadBody("each tool needs a function with a name")
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
    if choice not in (None, "auto", "none"):
        raise BadBody(
            f"tool_choice {shown(choice)} is not served: a call cannot be forced; use 'auto' or "
            "'none'",
            code="unsupported_parameter",
        )
    return choice
