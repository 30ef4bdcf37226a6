"""Looks after the servers of a fleet: the list of them, their health, and that they have the model.

Every `health_s` seconds each server's `/health` and `/v1/models` are read. A server that cannot be
reached is down; one that says that it is not healthy is draining; one that lists other models or
other weights is refused, by name. All three are looked at again and come back by themselves.

Does not know calls. Source: own; vLLM's health and metrics endpoints.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tfgrpo.errors import ConfigError
from tfgrpo.lm.fleet.members import Members, Server, State
from tfgrpo.lm.fleet.settings import FleetSettings, read_servers
from tfgrpo.lm.http_pool import LOOPBACK
from tfgrpo.runtime.redaction import Secret, redact, redact_logs

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

__all__ = ["Watch"]

_TIMEOUT_S = 5.0
_WAITING = re.compile(r"^vllm:num_requests_waiting(?:\{[^}]*\})? (\S+)$", re.M)


class Watch:
    """Keeps the states of a fleet's servers true.

    Args:
        members: whose states are set.
        settings: list of servers, model and times.
        secret: the key that the servers want.
        on_gone: told the URLs of servers that have left and are idle.
    """

    def __init__(
        self,
        members: Members,
        settings: FleetSettings,
        secret: Secret | None,
        on_gone: Callable[[list[str]], None],
    ) -> None:
        self._members, self._settings, self._on_gone = members, settings, on_gone
        self._headers = {} if secret is None else {"authorization": f"Bearer {secret.value}"}
        self._root = ""
        self._rounds: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._first: dict[asyncio.AbstractEventLoop, asyncio.Event] = {}
        members.keep(read_servers(settings.servers))

    async def ready(self) -> None:
        """Return once every server was looked at; the looking goes on in the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._rounds:
            for old in [one for one in self._rounds if one.is_closed()]:
                del self._rounds[old], self._first[old]
            self._first[loop] = asyncio.Event()
            self._rounds[loop] = asyncio.create_task(self._run(self._first[loop]))
        if not self._first[loop].is_set():
            await self._first[loop].wait()
        if self._rounds[loop].done():  # a bug: better told than servers that nobody looks after
            self._rounds[loop].result()

    async def _run(self, first: asyncio.Event) -> None:
        import aiohttp

        redact_logs("aiohttp")
        hosts = {urlsplit(url).hostname for url in self._members.servers}
        try:
            async with aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
                trust_env=not hosts <= LOOPBACK,
                headers=self._headers,
            ) as client:
                while True:
                    self._read_list()
                    servers = [s for s in self._members.servers.values() if not s.has_left]
                    await asyncio.gather(*(self._look_at(client, server) for server in servers))
                    first.set()
                    await asyncio.sleep(self._settings.health_s)
        finally:
            first.set()

    def _read_list(self) -> None:
        try:
            urls = read_servers(self._settings.servers)
        except ConfigError as exc:
            log.warning("fleet %r keeps its servers: %s", self._members.name, exc)
            return
        gone = self._members.keep(urls)
        if gone:
            self._on_gone(gone)

    async def _look_at(self, client: aiohttp.ClientSession, server: Server) -> None:
        import aiohttp

        base = server.url
        root = base.removesuffix("/v1")
        try:
            status, _ = await _get(client, f"{root}/health")
            if status >= 500:
                self._set(server, "draining", f"/health says {status}")
                return
            status, body = await _get(client, f"{base}/models")
            if status >= 500:
                self._set(server, "draining", f"/models says {status}")
                return
            why = self._why_not(status, body)
            if why:
                self._set(server, "refused", why)
                return
            if self._settings.queue_metrics:
                _, body = await _get(client, f"{root}/metrics")
                server.waiting = _waiting_in(body.decode(errors="replace"))
        except (aiohttp.ClientError, OSError, ValueError) as exc:  # ValueError: no URL
            said = f"{type(exc).__name__}: {exc}".rstrip(": ")
            self._set(server, "down", redact(f"no connection ({said})"))
            return
        self._set(server, "up", "")

    def _why_not(self, status: int, listed: bytes) -> str:
        """Return why a server with this list of models is not of the fleet; empty where it is."""
        model = self._settings.model
        if status != 200:
            return f"/models says {status}; check api_key_env and the URL"
        try:
            rows = json.loads(listed).get("data")
        except (ValueError, AttributeError):
            return "/models is no list of models; check the URL"
        named = {r.get("id"): r for r in rows or () if isinstance(r, Mapping)}
        if model not in named:
            return f"it has no model {model!r}, but {', '.join(map(repr, named)) or 'none'}"
        root = named[model].get("root")
        if not (isinstance(root, str) and root and self._settings.same_root):
            return ""
        self._root = self._root or root
        if root != self._root:
            return f"its {model!r} has the weights {root!r}, the first server's {self._root!r}"
        return ""

    def _set(self, server: Server, state: State, why: str) -> None:
        if (server.state, server.why) != (state, why):
            level = logging.INFO if state == "up" else logging.WARNING
            log.log(level, "fleet %r: %s is %s%s", self._members.name, server.url, state,
                    f": {why}" if why else "")  # fmt: skip
        server.state, server.why = state, why

    async def aclose(self) -> None:
        """Look no longer in the running loop."""
        loop = asyncio.get_running_loop()
        rounds, _ = self._rounds.pop(loop, None), self._first.pop(loop, None)
        if rounds is not None:
            rounds.cancel()
            await asyncio.gather(rounds, return_exceptions=True)


async def _get(client: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    async with client.get(url, allow_redirects=False) as reply:
        return reply.status, await reply.read()


def _waiting_in(metrics: str) -> float:
    """Return the requests that vLLM's metrics call waiting, over all its engines.

    >>> _waiting_in('vllm:num_requests_waiting{engine="0"} 3.0\\n')
    3.0
    """
    return sum(map(_number, _WAITING.findall(metrics)))


def _number(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0
