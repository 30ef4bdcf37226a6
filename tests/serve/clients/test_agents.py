"""Other clients and agents over the gateway, each with the real package (`make test-clients`)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Client, Start
from tfgrpo.testing import answers
from tfgrpo.testing.fault_server import FaultServer

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # other packages' own
]
NODE = Path(__file__).parent / "node"
ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "gateway"


def tool_call(name: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return ({"id": "c1", "type": "function", "function": function},)


def uses_tool(call: Any) -> Any:
    """A model that calls the first tool it is offered, then says what came back."""
    if call.path.endswith("/responses"):
        return response(call)
    turns = call.body["messages"]
    results = [m for m in turns if m["role"] == "tool"]
    tools = call.body.get("tools")
    if tools and not results:
        name = tools[0]["function"]["name"]
        return answers.say("", tool_calls=tool_call(name, {"city": "Oslo"}), finish="tool_calls")
    return answers.say("It is sunny in Oslo.")


def response(call: Any) -> Any:
    given = call.body["input"]
    has_result = isinstance(given, list) and any(
        isinstance(i, dict) and i.get("type") == "function_call_output" for i in given
    )
    text = {"type": "output_text", "text": "It is sunny in Oslo.", "annotations": []}
    item: dict[str, Any] = {"type": "message", "id": "m1", "role": "assistant",
                            "status": "completed", "content": [text]}  # fmt: skip
    if call.body.get("tools") and not has_result:
        item = {"type": "function_call", "id": "f1", "call_id": "c1", "status": "completed",
                "name": call.body["tools"][0]["name"], "arguments": '{"city": "Oslo"}'}  # fmt: skip
    row = {"id": f"resp_{call.index}", "object": "response", "created_at": 1, "model": "m",
           "status": "completed", "output": [item], "parallel_tool_calls": True,
           "tool_choice": "auto", "tools": [], "usage": {
               "input_tokens": 3, "output_tokens": 2, "total_tokens": 5,
               "input_tokens_details": {"cached_tokens": 0},
               "output_tokens_details": {"reasoning_tokens": 0}}}  # fmt: skip
    return answers.raw(json.dumps(row).encode())


def weather(city: str) -> str:
    """Return the weather.

    Args:
        city: where.
    """
    return f"sunny in {city}"


async def rated(client: Client) -> None:
    """Every request is in the journal, and its id takes feedback."""
    rows = client.rows("SELECT response_id FROM requests")
    assert rows and client.rows("SELECT DISTINCT state FROM replies") == [("ok",)]
    body = {"response_id": f"chatcmpl-{rows[-1][0]}", "value": 1}
    async with client.post("/v1/feedback", body) as answer:
        assert answer.status == 201


async def test_langchain_invokes_streams_and_binds_tools(start: Start) -> None:
    langchain = pytest.importorskip("langchain_openai")
    with FaultServer(uses_tool) as upstream:
        client = await start(upstream)
        model = langchain.ChatOpenAI(
            model="r", base_url=f"{client.url}/s/session-1/v1", api_key="none", stream_usage=True
        )
        assert (await model.ainvoke("hi")).content == "It is sunny in Oslo."
        usage = None
        async for chunk in model.astream("hi"):
            usage = chunk.usage_metadata or usage
        assert usage is not None and usage["output_tokens"] > 0
        called = await model.bind_tools([weather]).ainvoke("weather?")
        assert called.tool_calls[0]["name"] == "weather"
        await rated(client)
    assert set(client.rows("SELECT session_id FROM requests")) == {("session-1",)}


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents_run_a_tool_loop(start: Start, api: str) -> None:
    agents = pytest.importorskip("agents")
    import openai

    agents.set_tracing_disabled(True)
    with FaultServer(uses_tool) as upstream:
        client = await start(upstream)
        async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none") as of:
            kind = (
                agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
            )
            agent = agents.Agent(
                name="a",
                instructions="Use the tool.",
                model=kind(model="r", openai_client=of),
                tools=[agents.function_tool(weather)],
            )
            result = await agents.Runner.run(agent, "weather in Oslo?")
        assert result.final_output == "It is sunny in Oslo."
    assert upstream.call_count == 2
    assert client.rows("SELECT count(*) FROM replies WHERE state = 'ok'") == [(2,)]


async def test_litellm_completes_over_its_base_url(start: Start) -> None:
    litellm = pytest.importorskip("litellm")
    with FaultServer(uses_tool) as upstream:
        client = await start(upstream)
        reply = await litellm.acompletion(
            model="openai/r", api_base=f"{client.url}/v1", api_key="none",
            messages=[{"role": "user", "content": "hi"}],
        )  # fmt: skip
        assert reply.choices[0].message.content == "It is sunny in Oslo."
        await rated(client)


async def finished(command: list[str], folder: Path) -> bytes:
    """Run a program to its end and return what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env={**os.environ, "INSPECT_DISPLAY": "none"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return out


async def test_openai_agents_of_node_run_a_tool_loop(start: Start) -> None:
    if shutil.which("node") is None or not (NODE / "node_modules/@openai/agents").is_dir():
        pytest.skip("node or its packages are not installed")
    with FaultServer(uses_tool) as upstream:
        client = await start(upstream)
        out = await finished(["node", "agents.mjs", f"{client.url}/v1"], NODE)
    assert json.loads(out) == {"chat": "It is sunny in Oslo.", "responses": "It is sunny in Oslo."}
    assert upstream.call_count == 4
    assert client.rows("SELECT count(*) FROM replies WHERE state = 'ok'") == [(4,)]


@pytest.mark.parametrize("script", ["ai.mjs", "openai.mjs"])
async def test_clients_of_node_chat_stream_and_see_a_broken_stream(
    start: Start, script: str
) -> None:
    if shutil.which("node") is None or not (NODE / "node_modules").is_dir():
        pytest.skip("node or its packages are not installed")
    chunk = {"id": "u", "object": "chat.completion.chunk", "created": 1, "model": "m",
             "choices": [{"index": 0, "delta": {"role": "assistant", "content": "half"},
                          "finish_reason": None}]}  # fmt: skip

    def model(call: Any) -> Any:
        if call.text == "break":
            return answers.events([chunk, {"error": {"message": "overloaded"}}],
                                  done=False).drip(0.05, size=180)  # fmt: skip
        return uses_tool(call)

    with FaultServer(model) as upstream:
        client = await start(upstream)
        process = await asyncio.create_subprocess_exec(
            "node", str(NODE / script), f"{client.url}/v1", cwd=NODE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found = json.loads(out)
    assert found["text"] == found["streamed"] == "It is sunny in Oslo."
    assert found["broken"] is True
    assert "weather" in json.dumps(found["tools"])


def final_answer(call: Any) -> Any:
    """A model that answers through the tool that smolagents ends with."""
    results = [m for m in call.body["messages"] if "sunny in" in json.dumps(m)]
    name, arguments = ("final_answer", {"answer": "It is sunny in Oslo."}) if results else (
        "weather", {"city": "Oslo"})  # fmt: skip
    return answers.say("", tool_calls=tool_call(name, arguments), finish="tool_calls")


DSPY = answers.say("[[ ## answer ## ]]\nIt is sunny in Oslo.\n\n[[ ## completed ## ]]")


@pytest.mark.parametrize(
    ("example", "package", "model", "calls"),
    [
        ("langgraph_agent", "langgraph", uses_tool, 2),
        ("openai_agents", "agents", uses_tool, 2),
        ("pydantic_ai_agent", "pydantic_ai", uses_tool, 2),
        ("smolagents_agent", "smolagents", final_answer, 2),
        ("dspy_program", "dspy", DSPY, 1),
    ],
)
async def test_an_example_is_one_session_that_is_rated(
    start: Start, tmp_path: Path, example: str, package: str, model: Any, calls: int
) -> None:
    pytest.importorskip(package)
    with FaultServer(model) as upstream:
        client = await start(upstream)
        script = EXAMPLES / f"{example}.py"
        out = await finished([sys.executable, str(script), client.url, "r"], tmp_path)
    assert b"answer: It is sunny in Oslo." in out and b"feedback: 201" in out
    ((session, count),) = client.rows("SELECT session_id, count(*) FROM requests GROUP BY 1")
    assert count == calls and session.startswith(example.replace("_", "-"))
    assert client.rows("SELECT target, value FROM feedback") == [(session, "1.0")]
    assert client.rows("SELECT DISTINCT state FROM replies") == [("ok",)]


@pytest.mark.parametrize(
    ("example", "python"),
    [
        ("inspect_task", Path(sys.executable)),
        ("verifiers_environment", ROOT / ".venv-verifiers" / "bin" / "python"),
    ],
)
async def test_the_scores_of_an_evaluation_are_feedback_and_its_epochs_groups(
    start: Start, tmp_path: Path, example: str, python: Path
) -> None:
    if "verifiers" in example and not python.exists():
        pytest.skip("verifiers has no environment of its own: make test-clients")
    if "inspect" in example:
        pytest.importorskip("inspect_ai")

    def model(call: Any) -> Any:
        return answers.say("4" if call.index % 2 else "5")

    with FaultServer(model) as upstream:
        route = {"capture": True, "groups": {"size": 2, "task_identity": "messages"}}
        client = await start(upstream, routes={"r": {**route, "learn": {"enabled": False}}})
        script = EXAMPLES / f"{example}.py"
        out = await finished([str(python), str(script), client.url, "r"], tmp_path)
        groups = client.running.learning.routes["r"].traffic.groups(client.gateway.journal)
    assert out.count(b"feedback: 201") == 6
    assert len(groups) == 3 and all(g.is_informative() for g in groups)
    for group in groups:
        rewards = {r.steps[-1].action.content: r.score.reward for r in group.rollouts if r.score}
        assert rewards == {"4": 1.0, "5": 0.0}
