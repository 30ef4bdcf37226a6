"""An agent of the OpenAI Agents SDK with one tool over the gateway, rated as a session.

    python openai_agents.py http://127.0.0.1:8080 MODEL

The session stands in the base URL, which is all that the agent is told of the gateway.
"""

from __future__ import annotations

import json
import sys
import urllib.request
import uuid

import agents
import openai

URL, MODEL = sys.argv[1], sys.argv[2]
SESSION = f"openai-agents-{uuid.uuid4().hex[:12]}"
BASE_URL = f"{URL}/s/{SESSION}/v1"


def weather(city: str) -> str:
    """Return the weather.

    Args:
        city: where.
    """
    return f"sunny in {city}"


def rate(value: float) -> None:
    """Tell the gateway how the whole session went."""
    body = json.dumps({"session_id": SESSION, "value": value}).encode()
    request = urllib.request.Request(
        f"{URL}/v1/feedback", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        print("feedback:", response.status)


agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=BASE_URL, api_key="none")
agent = agents.Agent(
    name="weather",
    instructions="Use the tool.",
    model=agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
    tools=[agents.function_tool(weather)],
)
result = agents.Runner.run_sync(agent, "What is the weather in Oslo?")
print("answer:", result.final_output)
rate(1.0)
