"""`mcp`: tools of a server in a process of its own become an environment."""

import asyncio
import sys
from pathlib import Path

from tfgrpo.search import call
from tfgrpo.search.environments.mcp import McpEnvironment

SERVER = '''
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("lights")

@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def look() -> str:
    """Look at the light."""
    return "off"

server.run()
'''


async def main() -> None:
    Path("lights.py").write_text(SERVER, encoding="utf-8")
    world = await McpEnvironment([sys.executable, "lights.py"]).open()
    result = await world.apply(await world.start(), call("look"))
    await world.close()
    assert [s.name for s in world.specs] == ["look", "finish"]
    assert result.observation == "off", result


asyncio.run(main())
