"""The official `openai` client over the gateway, sync and async."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.serve.conftest import Start
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer

ROOT = Path(__file__).parents[3]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = ({"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},)
ASKED: Any = {"model": "r", "messages": [{"role": "user", "content": "hi"}]}


class City(BaseModel):
    name: str
    people: int


def of(url: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", **options)


async def test_chat_tools_structured_replies_and_n(start: Start) -> None:
    def script(call: Any) -> Any:
        if call.body.get("response_format"):
            return answers.say('{"name": "Oslo", "people": 700000}')
        if call.body.get("tools"):
            return answers.say("", tool_calls=CALLS, finish="tool_calls")
        return None

    with FaultServer(script) as upstream:
        gateway = await start(upstream)
        async with of(gateway.url) as client:
            plain = await client.chat.completions.create(**ASKED, n=3)
            called = await client.chat.completions.create(**ASKED, tools=[TOOL])
            parsed = await client.chat.completions.parse(**ASKED, response_format=City)
    assert [c.index for c in plain.choices] == [0, 1, 2]
    calls = called.choices[0].message.tool_calls
    assert calls is not None and json.loads(calls[0].function.arguments) == {"a": 1}
    assert parsed.choices[0].message.parsed == City(name="Oslo", people=700000)
    assert client.base_url.host == "127.0.0.1"


async def test_streams_give_text_tool_calls_and_usage(start: Start) -> None:
    with FaultServer(answers.say("one two", tool_calls=CALLS)) as upstream:
        gateway = await start(upstream)
        async with of(gateway.url) as client:
            stream = await client.chat.completions.create(
                **ASKED, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            async with client.chat.completions.stream(**ASKED) as events:
                final = await events.get_final_completion()
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == final.choices[0].message.content == "one two"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2


RAISED = [
    (answers.status(400), openai.BadRequestError, 1),
    (answers.status(429), openai.RateLimitError, 3),
    (answers.status(401), openai.InternalServerError, 1),
    (answers.status(503), openai.InternalServerError, 3),
    (answers.raw(b"<html>"), openai.InternalServerError, 1),
]


@pytest.mark.parametrize(("answer", "error", "calls"), RAISED)
async def test_errors_have_their_classes_and_only_unpaid_ones_are_retried(
    start: Start, answer: Any, error: type[Exception], calls: int
) -> None:
    with FaultServer(answer) as upstream:
        gateway = await start(upstream, upstreams={"a": {"rest_s": 0}})
        async with of(gateway.url, max_retries=2) as client:
            with pytest.raises(error):
                await client.chat.completions.create(**ASKED)
    assert upstream.call_count == calls


async def test_a_refusal_of_the_budget_is_not_retried(start: Start) -> None:
    with FaultServer() as upstream:
        gateway = await start(upstream, routes={"r": {"budget": {"usd_total": 1e-9}}})
        async with of(gateway.url, max_retries=5) as client:
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(**ASKED)
    assert caught.value.type == "insufficient_quota" and upstream.call_count == 0
    assert 'refusals_total{code="budget_exceeded"} 1' in gateway.gateway.metrics.text()


async def test_a_stream_that_breaks_off_raises_in_the_client(start: Start) -> None:
    chunk = {"id": "u", "choices": [{"index": 0, "delta": {"content": "half"}}]}
    with FaultServer(answers.events([chunk], done=False)) as upstream:
        gateway = await start(upstream)
        async with of(gateway.url) as client:
            stream = await client.chat.completions.create(**ASKED, stream=True)
            with pytest.raises(openai.APIError, match="finish reason"):
                async for _ in stream:
                    pass


async def test_responses_are_parsed_whole_and_streamed(start: Start) -> None:
    text = {"type": "output_text", "text": "hello", "annotations": []}
    output = [{"type": "message", "id": "m", "role": "assistant", "status": "completed",
               "content": [text]}]  # fmt: skip
    whole = {"id": "resp_up", "object": "response", "created_at": 1, "status": "completed",
             "model": "m", "output": output, "parallel_tool_calls": True, "tool_choice": "auto",
             "tools": [], "usage": {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4,
                                    "input_tokens_details": {"cached_tokens": 0},
                                    "output_tokens_details": {"reasoning_tokens": 0}}}  # fmt: skip
    started = {**whole, "status": "in_progress", "output": []}
    delta = {"type": "response.output_text.delta", "item_id": "m", "output_index": 0,
             "content_index": 0, "delta": "hello", "logprobs": []}  # fmt: skip
    rows = [{"type": "response.created", "response": started}, delta,
            {"type": "response.completed", "response": whole}]  # fmt: skip
    rows = [{**r, "sequence_number": i} for i, r in enumerate(rows)]

    def script(call: Any) -> Any:
        return answers.events(rows) if call.is_stream else answers.raw(json.dumps(whole).encode())

    with FaultServer(script) as upstream:
        gateway = await start(upstream)
        async with of(gateway.url) as client:
            reply = await client.responses.create(model="r", input="hi")
            assert reply.output_text == "hello" and reply.id.startswith("resp_tf_")
            stream = await client.responses.create(
                model="r", input="more", stream=True, previous_response_id=reply.id
            )
            kinds = [event.type async for event in stream]
    assert kinds == ["response.created", "response.output_text.delta", "response.completed"]
    assert upstream.calls[1].body["previous_response_id"] == "resp_up"


async def test_the_sync_client_gets_models_embeddings_and_paths(start: Start) -> None:
    def script(call: Any) -> Any:
        if call.path.endswith("/embeddings"):
            row = {"object": "list", "model": "m", "data": [
                {"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}],
                "usage": {"prompt_tokens": 1, "total_tokens": 1}}  # fmt: skip
            return answers.raw(json.dumps(row).encode())
        return None

    with FaultServer(script) as upstream:
        gateway = await start(upstream)

        def run() -> Any:
            client = openai.OpenAI(base_url=f"{gateway.url}/t/task-1/v1", api_key="none")
            reply = client.chat.completions.create(**ASKED)
            vectors = client.embeddings.create(model="r", input="x", encoding_format="float")
            return reply, vectors, [m.id for m in client.models.list()]

        reply, vectors, names = await asyncio.to_thread(run)
    assert reply.id.startswith("chatcmpl-tf_") and names == ["r"]
    assert vectors.data[0].embedding == [0.5, 1.0]
    assert gateway.rows("SELECT task_id FROM requests") == [("task-1",), ("task-1",)]


async def test_the_example_runs_against_a_gateway(start: Start) -> None:
    with FaultServer(answers.say("Jupiter", tool_calls=CALLS)) as upstream:
        gateway = await start(upstream)
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(ROOT / "examples" / "gateway" / "openai_client.py"),
            f"{gateway.url}/v1", "r", stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert b"reply: Jupiter" in out and b"feedback: 201" in out and b"call: f" in out
