"""A LangGraph agent with one tool over the gateway, rated as a session.

    python langgraph_agent.py http://127.0.0.1:8080 MODEL

The session stands in the base URL, which is all that the agent is told of the gateway.
"""

from __future__ import annotations

import json
import sys
import urllib.request
import uuid

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

URL, MODEL = sys.argv[1], sys.argv[2]
SESSION = f"langgraph-agent-{uuid.uuid4().hex[:12]}"
BASE_URL = f"{URL}/s/{SESSION}/v1"


@tool
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


model = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key="none").bind_tools([weather])


def say(state: MessagesState) -> dict[str, list[object]]:
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("say", say)
graph.add_node("tools", ToolNode([weather]))
graph.add_edge(START, "say")
graph.add_conditional_edges("say", tools_condition)
graph.add_edge("tools", "say")
found = graph.compile().invoke({"messages": [("user", "What is the weather in Oslo?")]})
print("answer:", found["messages"][-1].content)
rate(1.0)
