"""MCP servers through the official client: in-process, and over stdio in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.errors import TfgrpoError
from tfgrpo.rollout import Task
from tfgrpo.search import FunctionExpander, SearchSettings, UnitScorer, call, search_tree
from tfgrpo.search.environments.mcp import McpEnvironment, McpSession
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


def block(kind: str, **fields: Any) -> Any:
    return SimpleNamespace(type=kind, **fields)


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (
            [
                block("text", text="successfully downloaded"),
                block("resource", resource=block("r", uri="file:///a", text="hello world 42")),
            ],
            "successfully downloaded\nhello world 42",
        ),
        ([block("text", text=""), block("text", text="b")], "b"),
        ([block("text", text="")], ""),
        (
            [block("resource_link", uri="file:///a.txt", name="a.txt", mime_type="text/plain")],
            "[link · a.txt · file:///a.txt · text/plain]",
        ),
        (
            [block("resource", resource=block("r", uri="x:y", mime_type="a/b", blob="AAAA"))],
            "[resource · x:y · a/b · 3 bytes]",
        ),
        (
            [
                block("resource", resource=block("r", uri="x:y", mime_type=kind, blob="aMOpbGxv"))
                for kind in ("text/csv", "application/sql", "application/ld+json")
            ],
            "héllo\nhéllo\nhéllo",
        ),
        (
            [
                block(
                    "resource", resource=block("r", uri="x:y", mime_type="text/plain", blob="//8=")
                )
            ],
            "[resource · x:y · text/plain · 3 bytes]",
        ),
        ([block("image", data="AAAA", mime_type="image/png")], "[image · image/png · 3 bytes]"),
        ([block("audio", data="AAAAAAAA", mime_type="audio/wav")], "[audio · audio/wav · 6 bytes]"),
        ([], '{"a": 1}'),
    ],
)
def test_every_block_of_a_result_is_told(blocks: list[Any], text: str) -> None:
    session = McpSession(None, timeout_s=1.0, max_observation_bytes=1000)
    result = SimpleNamespace(content=blocks, structured_content=None if blocks else {"a": 1})
    assert session._text(result)[0] == text


@pytest.mark.parametrize(
    ("texts", "structured", "shown"),
    [
        (["ok"], {"value": "Zürich"}, 'ok\n{"value": "Zürich"}'),
        (['{"value": 42}'], {"value": 42}, '{"value": 42}'),
        (["42"], {"result": 42}, "42"),
        (["a", "b"], {"result": ["a", "b"]}, "a\nb"),
    ],
)
def test_a_structured_result_is_told_where_no_block_says_it(
    texts: list[str], structured: dict[str, Any], shown: str
) -> None:
    session = McpSession(None, timeout_s=1.0, max_observation_bytes=1000)
    blocks = [block("text", text=text) for text in texts]
    result = SimpleNamespace(content=blocks, structured_content=structured)
    assert session._text(result)[0] == shown


@given(st.lists(st.tuples(st.sampled_from(["text", "resource"]), st.text(max_size=9)), min_size=1))
def test_no_text_of_a_result_is_lost(parts: list[tuple[str, str]]) -> None:
    blocks = [
        block(k, text=t) if k == "text" else block(k, resource=block("r", uri="u", text=t))
        for k, t in parts
    ]
    session = McpSession(None, timeout_s=1.0, max_observation_bytes=10_000)
    text, _ = session._text(SimpleNamespace(content=blocks, structured_content=None))
    assert text == "\n".join(t for _, t in parts if t)


@pytest.mark.real
async def test_an_embedded_file_of_a_real_server_reaches_the_plan() -> None:
    from mcp.server.mcpserver import MCPServer
    from mcp.types import EmbeddedResource, TextContent, TextResourceContents

    server = MCPServer("files")

    @server.tool(structured_output=False)
    def fetch() -> list[Any]:
        """Fetch."""
        file = TextResourceContents(uri="file:///a", text="hello world 42")
        return [
            TextContent(type="text", text="successfully downloaded"),
            EmbeddedResource(type="resource", resource=file),
        ]

    session = await McpSession(lambda: server, timeout_s=20, max_observation_bytes=1000).open()
    try:
        assert "hello world 42" in (await session.act(call("fetch"))).observation
    finally:
        await session.close()
