"""A smolagents agent with one tool over the gateway, rated as a session.

    python smolagents_agent.py http://127.0.0.1:8080 MODEL

The session stands in the base URL, which is all that the agent is told of the gateway.
"""

from __future__ import annotations

import json
import sys
import urllib.request
import uuid

import smolagents

URL, MODEL = sys.argv[1], sys.argv[2]
SESSION = f"smolagents-agent-{uuid.uuid4().hex[:12]}"
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


model = smolagents.OpenAIServerModel(model_id=MODEL, api_base=BASE_URL, api_key="none")
agent = smolagents.ToolCallingAgent(
    tools=[smolagents.tool(weather)], model=model, max_steps=4, verbosity_level=0
)
print("answer:", agent.run("What is the weather in Oslo?"))
rate(1.0)
