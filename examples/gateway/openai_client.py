"""The official `openai` client over the gateway: chat, stream, tools, structured replies, feedback.

Start a gateway (`tfgrpo serve`), then run

    python examples/gateway/openai_client.py http://127.0.0.1:8080/v1 default

Only the base URL differs from any other use of the client. Feedback goes to the id of the reply.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

from openai import OpenAI

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def chat(client: OpenAI, model: str) -> str:
    """Ask, and return the response id."""
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Which planet is the largest?"}],
        extra_body={"tfgrpo": {"task_id": "planets", "metadata": {"team": "docs"}}},
    )
    print("reply:", reply.choices[0].message.content)
    return reply.id


def stream(client: OpenAI, model: str) -> None:
    """Print a streamed reply and what it used."""
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Count to five."}],
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="")
        elif chunk.usage:
            print(f"\n{chunk.usage.total_tokens} tokens")


def tools(client: OpenAI, model: str) -> None:
    """Offer a tool and print the call, if the model makes one."""
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "How is the weather in Oslo?"}],
        tools=[WEATHER],
    )
    for call in reply.choices[0].message.tool_calls or ():
        if call.type == "function":
            print("call:", call.function.name, call.function.arguments)


def rate(base_url: str, response_id: str, value: float) -> None:
    """Tell the gateway how good a reply was."""
    body = json.dumps({"response_id": response_id, "value": value}).encode()
    request = urllib.request.Request(
        f"{base_url}/feedback", data=body, headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        print("feedback:", answer.status)


def main() -> None:
    base_url, model = sys.argv[1], sys.argv[2]
    client = OpenAI(base_url=base_url, api_key="none")
    response_id = chat(client, model)
    stream(client, model)
    tools(client, model)
    rate(base_url, response_id, 1.0)


if __name__ == "__main__":
    main()
