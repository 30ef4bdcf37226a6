"""A gateway over a scripted upstream, both through real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tfgrpo.serve.process import Running
from tfgrpo.serve.settings import GatewaySettings
from tfgrpo.testing.fault_server import FaultServer

pytest.importorskip("aiohttp")
import aiohttp

ADMIN = "admin-secret-of-a-test"


class Client:
    """A started gateway with a plain HTTP client."""

    def __init__(self, running: Running, session: aiohttp.ClientSession) -> None:
        self.running, self.session = running, session
        self.gateway = running.gateway
        self.url = running.api_url

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """Post JSON; header names take underscores for hyphens."""
        rows = {k.replace("_", "-"): v for k, v in headers.items()}
        return self.session.post(self.url + path, json=body, headers=rows)

    def get(self, path: str, **headers: str) -> Any:
        """Get a path."""
        rows = {k.replace("_", "-"): v for k, v in headers.items()}
        return self.session.get(self.url + path, headers=rows)

    async def chat(self, text: str = "hi", **fields: Any) -> tuple[int, Any, Any]:
        """Ask route `r`; return status, body and headers."""
        headers = fields.pop("headers", {})
        body = {"model": "r", "messages": [{"role": "user", "content": text}], **fields}
        async with self.post("/v1/chat/completions", body, **headers) as response:
            return response.status, await response.json(), response.headers

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Read the journal, with what is still to be written."""
        self.gateway.journal.writer.flush()
        return self.gateway.journal.writer.read(sql, values)


def settings(folder: Path, upstream: FaultServer | None = None, **changes: Any) -> GatewaySettings:
    """Return settings with one route `r` over one upstream `a`."""
    price = {"input": 1.0, "output": 2.0}
    spec = upstream.spec("m") if upstream is not None else "scripted:echo"
    values: dict[str, Any] = {
        "serve": {"folder": str(folder), "listen": "127.0.0.1:0", "admin_listen": ""},
        "upstreams": {"a": {"lm": spec, "price": price}},
        "routes": {"r": {"upstreams": ["a"]}},
    }
    for section, rows in changes.items():
        for name, row in rows.items():
            if isinstance(row, dict) and isinstance(values.get(section, {}).get(name), dict):
                values[section][name] |= row
            else:
                values.setdefault(section, {})[name] = row
    return GatewaySettings.from_mapping(values)


Start = Callable[..., Awaitable[Client]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start gateways; they are stopped at the end of the test."""
    async with AsyncExitStack() as stack:

        async def run(
            upstream: FaultServer | None = None, *, folder: Path | None = None, **changes: Any
        ) -> Client:
            found = settings(folder or tmp_path / "gateway", upstream, **changes)
            running = await Running.start(found, ADMIN)
            stack.push_async_callback(running.stop, 0.0)
            await running.learning.pause()  # tests tick when they want to
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return Client(running, session)

        yield run
