"""MCP servers through the official client: in-process, and over stdio in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tfgrpo.errors import TfgrpoError
from tfgrpo.rollout import Task
from tfgrpo.search import FunctionExpander, SearchSettings, UnitScorer, call, search_tree
from tfgrpo.search.environments.mcp import McpEnvironment
from tfgrpo.store.budget import Budget

SERVER = '''
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

def make():
    server, state = MCPServer("lights"), {"on": False, "calls": 0}

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def look() -> str:
        """Look at the light."""
        return "on" if state["on"] else "off"

    @server.tool()
    def press(times: int) -> str:
        """Press the button."""
        state["calls"] += times
        state["on"] = state["calls"] % 2 == 1
        return "pressed " * times

    return server

if __name__ == "__main__":
    make().run()
'''


def in_process() -> Any:
    space: dict[str, Any] = {"__name__": "lights"}
    exec(compile(SERVER, "lights.py", "exec"), space)
    return space["make"]()


async def test_specs_and_marks_come_from_the_server() -> None:
    world = await McpEnvironment(in_process).open()
    assert [s.name for s in world.specs] == ["look", "press", "finish"]
    assert world.specs[1].parameters["properties"]["times"]["type"] == "integer"
    effects = [world.effects(call(n)) for n in ("look", "press", "finish")]
    assert effects == ["read", "irreversible", "pure"]
    assert "not of type 'integer'" in world.check(call("press", times="2"))[0]
    await world.close()


async def test_sessions_of_a_simulator_branch_by_replay() -> None:
    world = await McpEnvironment(in_process, is_simulator=True).open()
    start = await world.start()
    once = await world.apply(start, call("press", times=1))
    twice = await world.apply(once.state, call("press", times=1))
    answers = [
        (await world.apply(s, call("look"))).observation for s in (start, once.state, twice.state)
    ]
    assert answers == ["off", "on", "off"]
    failed = await world.apply(start, call("press", times="x"))
    assert failed.error
    await world.close()


async def test_a_search_over_a_live_server_only_reads() -> None:
    world = await McpEnvironment(in_process).open()
    offer = FunctionExpander(lambda ctx, node, k: [call("look"), call("press", times=1)])
    result = await search_tree(
        Task("t", "switch the light on"),
        offer,
        world,
        scorer=UnitScorer(),
        settings=SearchSettings(samples=2),
        budget=Budget(expansions=4),
    )
    pressed = [n for n in result.fold.tree if n.action and n.action["name"] == "press"]
    assert pressed and not any("pressed" in n.observation for n in pressed)
    looked = [n.observation for n in result.fold.tree if n.action and n.action["name"] == "look"]
    assert "off" in looked
    await world.close()


async def test_a_server_that_cannot_be_started_is_told_by_name() -> None:
    with pytest.raises(TfgrpoError, match="MCP server"):
        await McpEnvironment([sys.executable, "-c", "raise SystemExit(3)"], timeout_s=5).open()


@pytest.mark.real
async def test_a_server_of_its_own_process_is_searched_over_stdio(tmp_path: Path) -> None:
    path = tmp_path / "lights.py"
    path.write_text(SERVER)
    world = await McpEnvironment([sys.executable, str(path)], is_simulator=True).open()
    start = await world.start()
    once = await world.apply(start, call("press", times=1))
    assert (await world.apply(once.state, call("look"))).observation == "on"
    assert (await world.apply(start, call("look"))).observation == "off"  # a fresh process
    assert world.replayed == 0
    await world.close()
