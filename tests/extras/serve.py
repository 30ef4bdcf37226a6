"""`serve`: a model is offered over HTTP and answers an OpenAI client."""

import asyncio
import socket

from tfgrpo import open_lm
from tfgrpo.lm.server.app import ServerSettings, serve
from tfgrpo.messages import Message
from tfgrpo.protocols import Request


async def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ready = asyncio.Event()
    settings = ServerSettings("echo", port=port)
    server = asyncio.create_task(serve(open_lm("scripted:echo"), settings, ready=ready))
    await ready.wait()
    client = open_lm(f"http://127.0.0.1:{port}/v1#echo")
    (reply,) = await client.complete(Request((Message("user", "hello"),)), 1, [0])
    await client.aclose()
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)
    assert reply.text == "hello", reply


asyncio.run(main())
