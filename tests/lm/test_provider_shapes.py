"""What each provider's chat endpoint really sends, read by the `openai` backend.

The shapes are written by hand after the providers' own documentation: a whole reply, a stream, tool
calls in both, usage, errors; and what each endpoint accepts of a request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tfgrpo.errors import ProviderError
from tfgrpo.lm import open_lm
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request, Sampling, ToolSpec
from tfgrpo.testing import Answer, Call, FaultServer, raw, status

WEATHER = ToolSpec(
    "get_weather",
    "Weather of a city.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
ASK = Request(
    (Message("system", "Be brief."), Message("user", "Weather in Oslo?")),
    tools=(WEATHER,),
    tool_choice="auto",
    sampling=Sampling(temperature=0.7, max_tokens=64, top_p=0.9, stop=("END",)),
)
ARGUMENTS = '{"city": "Oslo"}'


def whole(message: Mapping[str, Any], finish: Any, usage: Any, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return head | {"choices": [choice], "usage": usage} | more


def delta(part: Mapping[str, Any], finish: Any = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": part, "finish_reason": finish}
    head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return head | {"choices": [choice]} | more


def call(
    index: int | None, name: str = "", arguments: Any = "", call_id: str = ""
) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": arguments}
    if name:
        function["name"] = name
    row: dict[str, Any] = {"function": function, "type": "function"}
    if call_id:
        row["id"] = call_id
    return row if index is None else row | {"index": index}


def sse(rows: Sequence[Any], *, end: str = "\n\n", done: bool = True, lead: str = "") -> bytes:
    text = lead + "".join(f"data: {json.dumps(row)}{end}" for row in rows)
    return (text + (f"data: [DONE]{end}" if done else "")).encode()


@dataclass(frozen=True)
class Shape:
    """One provider."""

    text_body: dict[str, Any]
    text_stream: bytes
    tool_body: dict[str, Any]
    tool_stream: bytes
    errors: Mapping[str, tuple[int, Any]]
    """Kind of failure to (status, body)."""
    usage: tuple[int, int, int] = (20, 5, 0)
    """Prompt, completion and cached tokens."""
    refused: frozenset[str] = frozenset()
    """Request fields that a strict endpoint does not take."""
    reasoning: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


PLAIN = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
TEXT = [delta({"role": "assistant", "content": ""}), delta({"content": "It is "}),
        delta({"content": "cold."})]  # fmt: skip
PIECES = [
    delta({"role": "assistant", "content": None, "tool_calls": [call(0, "get_weather", "", "c1")]}),
    delta({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}),
    delta({"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]}),
]
ENDS_WITH_USAGE = {"id": "1", "object": "chat.completion.chunk", "choices": [], "usage": PLAIN}


def tool_message(arguments: Any = ARGUMENTS, call_id: str = "c1", content: Any = None) -> Any:
    row = {"id": call_id, "type": "function",
           "function": {"name": "get_weather", "arguments": arguments}}  # fmt: skip
    return {"content": content, "tool_calls": [row]}


OPENAI_USAGE = PLAIN | {
    "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 2, "accepted_prediction_tokens": 0},
}
SHAPES = {
    "openai": Shape(
        whole({"content": "It is cold.", "refusal": None, "annotations": []}, "stop", OPENAI_USAGE,
              service_tier="default", system_fingerprint="fp_1"),
        sse([*(t | {"usage": None, "obfuscation": "xQ"} for t in TEXT),
             delta({}, "stop", usage=None), ENDS_WITH_USAGE | {"usage": OPENAI_USAGE}]),
        whole(tool_message() | {"refusal": None}, "tool_calls", OPENAI_USAGE),
        sse([*PIECES, delta({}, "tool_calls"), ENDS_WITH_USAGE | {"usage": OPENAI_USAGE}]),
        {
            "auth": (401, {"error": {"message": "Incorrect API key provided: sk-ab***.",
                                     "type": "invalid_request_error", "param": None,
                                     "code": "invalid_api_key"}}),
            "not_found": (404, {"error": {"message": "The model `m` does not exist or you do not "
                                          "have access to it.", "code": "model_not_found"}}),
            "quota": (429, {"error": {"message": "You exceeded your current quota, please check "
                                      "your plan and billing details.",
                                      "code": "insufficient_quota"}}),
            "rate_limit": (429, {"error": {"message": "Rate limit reached for m in organization",
                                           "code": "rate_limit_exceeded"}}),
            "context_too_long": (400, {"error": {"message": "This model's maximum context length "
                                                 "is 128000 tokens. However, your messages "
                                                 "resulted in 200000 tokens.",
                                                 "code": "context_length_exceeded"}}),
        },
        usage=(20, 5, 8),
        refused=frozenset({"max_tokens", "temperature", "top_p", "stop"}),
    ),
    "openrouter": Shape(
        whole({"content": "It is cold.", "reasoning": "Oslo is north."}, "stop", PLAIN | {
            "cost": 0.0001, "prompt_tokens_details": {"cached_tokens": 0}},
            provider="X", native_finish_reason="STOP"),
        sse([*TEXT, delta({"content": ""}, "stop", native_finish_reason="STOP"),
             delta({"role": "assistant", "content": ""}, None, usage=PLAIN)],
            lead=": OPENROUTER PROCESSING\n\n: OPENROUTER PROCESSING\n\n"),
        whole(tool_message(content=""), "tool_calls", PLAIN, provider="X"),
        sse([*PIECES, delta({"content": ""}, "tool_calls"), ENDS_WITH_USAGE]),
        {
            "auth": (401, {"error": {"message": "No auth credentials found", "code": 401}}),
            "quota": (402, {"error": {"message": "Insufficient credits", "code": 402}}),
            "rate_limit": (200, {"error": {"message": "Provider returned error: rate limit "
                                           "exceeded", "code": 429}}),
            "overloaded": (200, {"id": "1", "choices": [
                {"index": 0, "message": {"content": ""}, "finish_reason": "error",
                 "error": {"code": 502, "message": "Upstream error"}}]}),
            "not_found": (400, {"error": {"message": "zz/m is not a valid model: model not found",
                                          "code": 400}}),
        },
    ),
    "vllm": Shape(
        whole({"content": "It is cold.", "reasoning_content": None, "tool_calls": []}, "stop",
              PLAIN | {"prompt_tokens_details": None}, prompt_logprobs=None,
              kv_transfer_params=None),
        sse([*TEXT, delta({"content": ""}, "stop", stop_reason=None), ENDS_WITH_USAGE]),
        whole(tool_message(content=None) | {"reasoning_content": None}, "tool_calls", PLAIN),
        sse([*PIECES, delta({"content": ""}, "tool_calls", stop_reason=None), ENDS_WITH_USAGE]),
        {
            "not_found": (404, {"object": "error", "message": "The model `m` does not exist.",
                                "type": "NotFoundError", "param": None, "code": 404}),
            "context_too_long": (400, {"object": "error", "message": "This model's maximum context "
                                       "length is 2048 tokens. However, you requested 4000 tokens",
                                       "type": "BadRequestError", "code": 400}),
            "bad_request": (400, {"object": "error", "message": "[{'type': 'missing', 'loc': "
                                  "('body', 'messages'), 'msg': 'Field required'}]", "code": 400}),
            "overloaded": (503, {"object": "error", "message": "EngineDeadError", "code": 503}),
        },
    ),
    "sglang": Shape(
        whole({"content": "It is cold.", "tool_calls": None, "reasoning_content": None}, "stop",
              PLAIN | {"prompt_tokens_details": None}, matched_stop=2),
        sse([*(t | {"usage": None} for t in TEXT),
             delta({"content": None}, "stop", matched_stop=2), ENDS_WITH_USAGE]),
        whole(tool_message(call_id="call_0"), "tool_calls", PLAIN),
        sse([delta({"tool_calls": [call(0, "get_weather", "", "call_0")]}),
             delta({"tool_calls": [call(0, "", ARGUMENTS, "call_0")]}),
             delta({}, "tool_calls"), ENDS_WITH_USAGE]),
        {
            "context_too_long": (400, {"object": "error", "message": "The input (9000 tokens) is "
                                       "longer than the model's context length (4096 tokens).",
                                       "type": "BadRequestError", "code": 400}),
            "overloaded": (503, {"object": "error", "message": "The request queue is full.",
                                 "code": 503}),
            "bad_reply": (200, {"object": "error", "message": "Internal Server Error",
                                "code": "x"}),
        },
    ),
    "llama.cpp": Shape(
        whole({"content": "It is cold."}, "stop", PLAIN, timings={"prompt_n": 20},
              system_fingerprint="b1-x", __verbose={"stop": True}),
        sse([delta({"role": "assistant", "content": None}), *TEXT[1:], delta({}, "stop"),
             ENDS_WITH_USAGE | {"timings": {"prompt_n": 20}}]),
        whole(tool_message(content=None, call_id="4Fq"), "tool_calls", PLAIN),
        sse([delta({"role": "assistant", "content": None}),
             delta({"tool_calls": [call(0, "get_weather", "{", "4Fq")]}),
             delta({"tool_calls": [{"index": 0, "function": {"arguments": '"city": "Oslo"}'}}]}),
             delta({}, "tool_calls"), ENDS_WITH_USAGE]),
        {
            "auth": (401, {"error": {"message": "Invalid API Key", "type": "authentication_error",
                                     "code": 401}}),
            "overloaded": (503, {"error": {"code": 503, "message": "Loading model",
                                           "type": "unavailable_error"}}),
            "context_too_long": (400, {"error": {"code": 400, "message": "the request exceeds the "
                                                 "available context size, try increasing it",
                                                 "type": "exceed_context_size_error",
                                                 "n_prompt_tokens": 9000, "n_ctx": 4096}}),
        },
        refused=frozenset({"stream_options"}),
    ),
    "ollama": Shape(
        whole({"content": "It is cold."}, "stop", PLAIN, system_fingerprint="fp_ollama"),
        sse([*TEXT, delta({"role": "assistant", "content": ""}, "stop"), ENDS_WITH_USAGE]),
        whole(tool_message(content="", call_id="call_a1"), "tool_calls", PLAIN),
        sse([delta({"role": "assistant", "content": "",
                    "tool_calls": [call(0, "get_weather", ARGUMENTS, "call_a1")]}),
             delta({"role": "assistant", "content": ""}, "tool_calls"), ENDS_WITH_USAGE]),
        {
            "not_found": (404, {"error": {"message": "model \"m\" not found, try pulling it first",
                                          "type": "api_error", "param": None, "code": None}}),
            "bad_request": (400, {"error": {"message": "registry.ollama.ai/library/m does not "
                                            "support tools", "type": "api_error"}}),
            "overloaded": (500, {"error": {"message": "llama runner process has terminated",
                                           "type": "api_error"}}),
        },
    ),
    "gemini": Shape(
        whole({"content": "It is cold.", "extra_content": {"google": {"thought_signature": "A"}}},
              "stop", PLAIN),
        sse([delta({"role": "assistant", "content": "It is "}),
             delta({"role": "assistant", "content": "cold."}, "stop", usage=PLAIN)],
            end="\r\n\r\n"),
        whole(tool_message(content=None, call_id="function-call-77"), "tool_calls", PLAIN),
        sse([delta({"role": "assistant", "tool_calls": [
                call(0, "get_weather", ARGUMENTS, "function-call-77")]}, None),
             delta({"role": "assistant"}, "stop", usage=PLAIN)], end="\r\n\r\n"),
        {
            "auth": (400, [{"error": {"code": 400, "message": "API key not valid. Please pass a "
                                      "valid API key. (invalid_api_key)",
                                      "status": "INVALID_ARGUMENT"}}]),
            "quota": (429, [{"error": {"code": 429, "message": "You exceeded your current quota, "
                                       "please check your plan and billing details.",
                                       "status": "RESOURCE_EXHAUSTED"}}]),
            "overloaded": (503, [{"error": {"code": 503, "message": "The model is overloaded. "
                                            "Please try again later.", "status": "UNAVAILABLE"}}]),
            "not_found": (404, [{"error": {"code": 404, "message": "models/m is not found",
                                           "status": "NOT_FOUND"}}]),
        },
        refused=frozenset({"seed"}),
    ),
    "anthropic": Shape(
        whole({"content": "It is cold."}, "stop", PLAIN | {"completion_tokens_details": None,
                                                           "prompt_tokens_details": None}),
        sse([*TEXT, delta({}, "stop"), ENDS_WITH_USAGE]),
        whole(tool_message(content="", call_id="toolu_01A"), "tool_calls", PLAIN),
        sse([delta({"tool_calls": [call(0, "get_weather", "", "toolu_01A")]}),
             delta({"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS}}]}),
             delta({}, "tool_calls"), ENDS_WITH_USAGE]),
        {
            "auth": (401, {"error": {"code": "authentication_error", "message": "invalid x-api-key",
                                     "type": "authentication_error", "param": None}}),
            "overloaded": (529, {"type": "error", "error": {"type": "overloaded_error",
                                                            "message": "Overloaded"}}),
            "context_too_long": (400, {"type": "error", "error": {
                "type": "invalid_request_error",
                "message": "prompt is too long: 210000 tokens > 200000 maximum"}}),
            "quota": (400, {"error": {"message": "Your credit balance is too low to access the "
                                      "Anthropic API.", "type": "invalid_request_error"}}),
        },
        refused=frozenset({"top_p"}),
    ),
}  # fmt: skip
BOTH = [pytest.param(True, id="stream"), pytest.param(False, id="whole")]


def ask(script: Any, *, stream: bool) -> tuple[Completion, FaultServer]:
    async def run(spec: str) -> Completion:
        lm = open_lm(spec, stream=stream)
        try:
            (reply,) = await lm.complete(ASK, 1, [3])
        finally:
            await lm.aclose()
        return reply

    with FaultServer(script) as server:
        return asyncio.run(run(server.spec("m"))), server


def answering(shape: Shape, body: dict[str, Any], events: bytes) -> Any:
    """Answer as the provider does: fields that it does not take are refused first."""

    def script(asked: Call) -> Answer:
        for name in sorted(shape.refused & set(asked.body)):
            said = f"Unsupported parameter: '{name}' is not supported with this model."
            if name == "max_tokens":
                said += " Use 'max_completion_tokens' instead."
            error = {"message": said, "param": name, "code": "unsupported_parameter"}
            return status(400, {"error": error})
        if asked.is_stream:
            return raw(events, content_type="text/event-stream")
        return raw(json.dumps(body).encode())

    return script


@pytest.mark.parametrize("stream", BOTH)
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_reply_in_text(name: str, stream: bool) -> None:
    shape = SHAPES[name]
    reply, server = ask(answering(shape, shape.text_body, shape.text_stream), stream=stream)
    assert (reply.text, reply.finish, reply.tool_calls) == ("It is cold.", "stop", ())
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cache_read_tokens) == shape.usage
    assert not usage.is_estimated
    sent = server.calls[-1].body
    assert sent["model"] == "m" and [m["role"] for m in sent["messages"]] == ["system", "user"]
    assert sent["tools"][0]["function"]["parameters"]["required"] == ["city"]
    assert not shape.refused & set(sent)
    assert sent.get("max_tokens", sent.get("max_completion_tokens")) == 64
    assert server.call_count == 1 + len(shape.refused & {
        *server.calls[0].body, "temperature", "top_p", "stop"})  # fmt: skip


@pytest.mark.parametrize("stream", BOTH)
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_tool_call(name: str, stream: bool) -> None:
    shape = SHAPES[name]
    reply, _ = ask(answering(shape, shape.tool_body, shape.tool_stream), stream=stream)
    assert [c.name for c in reply.tool_calls] == ["get_weather"]
    assert json.loads(reply.tool_calls[0].arguments) == {"city": "Oslo"}
    assert reply.tool_calls[0].call_id and reply.finish == "tool_calls" and reply.text == ""
    assert not reply.usage.is_estimated


@pytest.mark.parametrize("stream", BOTH)
@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n, shape in sorted(SHAPES.items()) for k in shape.errors]
)
def test_an_error(name: str, kind: str, stream: bool) -> None:
    code, body = SHAPES[name].errors[kind]
    answer = status(code, body) if code != 200 else raw(json.dumps(body).encode())
    with pytest.raises(ProviderError) as caught:
        ask(answer, stream=stream)
    assert caught.value.kind == kind, str(caught.value)
    error = body[0]["error"] if isinstance(body, list) else body.get("error", body)
    said = error.get("message", "") if isinstance(error, dict) else str(error)
    assert said[:20] in str(caught.value) or "choices" in str(body)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_an_error_in_the_middle_of_a_stream_keeps_its_kind(name: str) -> None:
    error = {"error": {"message": "the server is overloaded, try again", "code": 503}}
    start = sse(TEXT[:2], done=False)
    with pytest.raises(ProviderError) as caught:
        ask(raw(start + sse([error]), content_type="text/event-stream"), stream=True)
    assert caught.value.kind == "overloaded" and caught.value.had_output
