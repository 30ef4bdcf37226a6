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


async def test_pydantic_ai_runs_an_agent(start: Start) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    with FaultServer(uses_tool) as upstream:
        client = await start(upstream)
        provider = OpenAIProvider(base_url=f"{client.url}/v1", api_key="none")
        agent = pydantic_ai.Agent(OpenAIChatModel("r", provider=provider), tools=[weather])
        result = await agent.run("weather in Oslo?")
        assert result.output == "It is sunny in Oslo."
        await rated(client)


async def test_smolagents_run_an_agent(start: Start) -> None:
    smolagents = pytest.importorskip("smolagents")

    def script(call: Any) -> Any:
        results = [m for m in call.body["messages"] if "sunny in" in json.dumps(m)]
        name, arguments = ("final_answer", {"answer": "sunny"}) if results else (
            "weather", {"city": "Oslo"})  # fmt: skip
        return answers.say("", tool_calls=tool_call(name, arguments), finish="tool_calls")

    with FaultServer(script) as upstream:
        client = await start(upstream)

        def run() -> Any:
            model = smolagents.OpenAIServerModel(
                model_id="r", api_base=f"{client.url}/v1", api_key="none"
            )
            agent = smolagents.ToolCallingAgent(
                tools=[smolagents.tool(weather)], model=model, max_steps=4, verbosity_level=0
            )
            return agent.run("weather in Oslo?")

        assert await asyncio.to_thread(run) == "sunny"
        await rated(client)


async def test_dspy_predicts_through_litellm(start: Start) -> None:
    dspy = pytest.importorskip("dspy")

    with FaultServer(answers.say("[[ ## answer ## ]]\n4\n\n[[ ## completed ## ]]")) as upstream:
        client = await start(upstream)

        def run() -> Any:
            lm = dspy.LM("openai/r", api_base=f"{client.url}/v1", api_key="none", cache=False)
            with dspy.context(lm=lm):
                return dspy.Predict("question -> answer")(question="2+2?").answer

        assert await asyncio.to_thread(run) == "4"
        await rated(client)


async def test_inspect_posts_its_scores_and_groups_equal_its_epochs(
    start: Start, tmp_path: Path
) -> None:
    pytest.importorskip("inspect_ai")
    script = tmp_path / "run_inspect.py"
    script.write_text(INSPECT)

    def model(call: Any) -> Any:
        return answers.say("4" if call.index % 2 else "5")

    with FaultServer(model) as upstream:
        route = {"capture": True, "groups": {"size": 2, "task_identity": "messages"}}
        client = await start(upstream, routes={"r": {**route, "learn": {"enabled": False}}})
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), f"{client.url}/v1", cwd=tmp_path,
            env={**os.environ, "INSPECT_DISPLAY": "none"},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()[-3000:]
        groups = client.running.learning.routes["r"].traffic.groups(client.gateway.journal)
    assert len(groups) == 3 and all(len(g.rollouts) == 2 for g in groups)
    assert all(g.is_informative() for g in groups)


INSPECT = """
import json, sys, urllib.request
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate

url = sys.argv[1]
model = get_model("openai-api/gateway/r", base_url=url, api_key="none", responses_api=False)
samples = [Sample(input=f"{i} + {4 - i}?", target="4") for i in range(3)]
(log,) = eval(Task(dataset=samples, solver=generate(), scorer=match()), model=model, epochs=2,
              max_connections=1, max_samples=1, log_dir="logs")
assert log.status == "success", log.error
for sample in log.samples:
    event = next(e for e in sample.events if e.event == "model")
    body = {"response_id": event.call.response["id"], "source": "verifier:inspect",
            "value": 1.0 if sample.scores["match"].value == "C" else 0.0}
    request = urllib.request.Request(f"{url}/feedback", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    assert urllib.request.urlopen(request).status == 201
"""


async def test_an_environment_of_verifiers_rewards_what_it_rolled_out(
    start: Start, tmp_path: Path
) -> None:
    python = ROOT / ".venv-verifiers" / "bin" / "python"
    if not python.exists():
        pytest.skip("verifiers has no environment of its own: make test-clients")
    (tmp_path / "run_verifiers.py").write_text(VERIFIERS)

    def model(call: Any) -> Any:
        return answers.say("4" if call.index % 2 else "5")

    with FaultServer(model) as upstream:
        route = {"capture": True, "groups": {"size": 2, "task_identity": "messages"}}
        client = await start(upstream, routes={"r": {**route, "learn": {"enabled": False}}})
        await finished([str(python), "run_verifiers.py", f"{client.url}/v1"], tmp_path)
        groups = client.running.learning.routes["r"].traffic.groups(client.gateway.journal)
    assert len(groups) == 3 and all(g.is_informative() for g in groups)
    for group in groups:
        rewards = {r.steps[-1].action.content: r.score.reward for r in group.rollouts if r.score}
        assert rewards == {"4": 1.0, "5": 0.0}


VERIFIERS = """
import asyncio, json, os, sys, urllib.request
import verifiers as vf
from datasets import Dataset

url = sys.argv[1]
os.environ["GATEWAY_KEY"] = "none"
rows = Dataset.from_list([{"question": f"{i} + {4 - i}?", "answer": "4"} for i in range(3)])

def correct(completion, answer, state):
    reward = float(completion[-1]["content"].strip() == answer)
    body = {"response_id": state["trajectory"][-1]["response"].id, "value": reward,
            "source": "verifier:environment"}
    request = urllib.request.Request(f"{url}/feedback", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    assert urllib.request.urlopen(request).status == 201
    return reward

environment = vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[correct]))
client = vf.ClientConfig(client_type="openai_chat_completions", api_base_url=url,
                         api_key_var="GATEWAY_KEY")
found = asyncio.run(environment.evaluate(client, "r", num_examples=3, rollouts_per_example=2,
                                         max_concurrent=1))
assert sum(o["reward"] for o in found["outputs"]) == 3.0, found
"""


async def test_langgraph_runs_an_agent_in_one_session(start: Start) -> None:
    pytest.importorskip("langgraph")
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    with FaultServer(uses_tool) as upstream:
        client = await start(upstream)
        tools = [tool(weather)]
        model = ChatOpenAI(model="r", base_url=f"{client.url}/s/graph-1/v1", api_key="none")

        async def say(state: Any) -> Any:
            return {"messages": [await model.bind_tools(tools).ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("say", say)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "say")
        graph.add_conditional_edges("say", tools_condition)
        graph.add_edge("tools", "say")
        found = await graph.compile().ainvoke({"messages": [("user", "weather in Oslo?")]})
        await rated(client)
    assert found["messages"][-1].content == "It is sunny in Oslo."
    assert [m.type for m in found["messages"]] == ["human", "ai", "tool", "ai"]
    assert client.rows("SELECT session_id, count(*) FROM requests GROUP BY 1") == [("graph-1", 2)]


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
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
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
