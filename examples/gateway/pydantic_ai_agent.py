"""A pydantic-ai agent with one tool over the gateway, rated as a session.

    python pydantic_ai_agent.py http://127.0.0.1:8080 MODEL

The session stands in the base URL, which is all that the agent is told of the gateway.
"""

from __future__ import annotations

import json
import sys
import urllib.request
import uuid

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1], sys.argv[2]
SESSION = f"pydantic-ai-agent-{uuid.uuid4().hex[:12]}"
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


provider = OpenAIProvider(base_url=BASE_URL, api_key="none")
agent = Agent(OpenAIChatModel(MODEL, provider=provider), tools=[weather])
print("answer:", agent.run_sync("What is the weather in Oslo?").output)
rate(1.0)
