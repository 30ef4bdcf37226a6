"""The MCP server: a real client over stdio reads the library and asks the router."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tfgrpo.context import render_messages
from tfgrpo.experience.artefact import Artefact, export_artefact
from tfgrpo.experience.library import from_texts

ROOT = Path(__file__).parents[2]


@pytest.mark.real
async def test_a_client_reads_the_library_and_asks_for_a_model(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    artefact = Artefact(from_texts(["Name the unit."]))
    export_artefact(artefact, tmp_path / "library")
    config = tmp_path / "gateway.toml"
    config.write_text(
        '[serve]\nfolder = "gateway"\n[upstreams.a]\nlm = "http://127.0.0.1:9/v1#m"\n'
        '[routes.r]\nupstreams = ["a"]\nlibrary = "library"\n'
    )
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-m", "tfgrpo", "serve", "mcp", str(config)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        tools = {tool.name for tool in (await session.list_tools()).tools}
        text = (await session.call_tool("library", {"route": "r"})).content[0].text
        found = await session.call_tool("route", {"route": "r", "prompt": "how far?"})
    assert tools == {"library", "route"}
    assert text == render_messages((), artefact.context)[0].content and "Name the unit." in text
    assert '"a"' in found.content[0].text
