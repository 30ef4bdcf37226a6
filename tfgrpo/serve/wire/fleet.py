"""A fleet of servers as one upstream: bytes come and go untouched, the fleet says through whom.

Each call goes to the server that knows its prompt: `Exchange` puts the session or task into the
call scope, else the body's first turns decide. A stream may be sent twice where its first bytes are
late; whole replies never are.

Does not know placement, health or money. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.lm.fleet.calls import Attempt
from tfgrpo.lm.fleet.fleet_lm import Fleet, split_options
from tfgrpo.lm.fleet.placement import affinity_key
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.runtime.event_loop import start_task
from tfgrpo.serve.wire.upstream import HttpUpstream

__all__ = ["FleetUpstream"]

_AHEAD = 8
"""Pieces of a stream that are read before the client takes them."""


class FleetUpstream:
    """Many servers that speak the API, as one.

    Args:
        name: the fleet's.
        options: fields of `FleetSettings`, and `api_key_env`.

    Raises:
        ConfigError: an option that cannot work or is not known.
    """

    def __init__(self, name: str, /, **options: Any) -> None:
        try:
            self._settings, rest = split_options(options)
        except TypeError as exc:
            raise ConfigError(
                f"upstream fleet:{name} needs its servers and its model: set [fleets.{name}] "
                'servers = ["http://HOST:8000/v1", …] and model = "…"'
            ) from exc
        self._key_env = rest.pop("api_key_env", None)
        if rest:
            raise ConfigError(f"fleets.{name}: unknown here: {', '.join(sorted(rest))}")
        self._upstreams: dict[str, HttpUpstream] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.fleet = Fleet(name, self._settings, self._key_env, self._drop)

    def _at(self, url: str) -> HttpUpstream:
        if url not in self._upstreams:
            self._upstreams[url] = HttpUpstream(
                self._settings.model, base_url=url, api_key_env=self._key_env
            )
        return self._upstreams[url]

    def _drop(self, urls: list[str]) -> None:
        for url in urls:
            upstream = self._upstreams.pop(url, None)
            if upstream is not None:
                start_task(upstream.aclose(), self._closing)

    @property
    def model(self) -> str:
        """The name that the servers' bodies carry."""
        return self._settings.model

    @property
    def spec(self) -> str:
        """`fleet:NAME`."""
        return f"fleet:{self.fleet.name}"

    def endpoints(self) -> frozenset[str]:
        """Whatever a server has, it is asked for."""
        return frozenset({"/chat/completions", "/responses", "/embeddings"})

    @property
    def has_other_hosts(self) -> bool:
        """True where a server is left that can take the next call."""
        return bool(self.fleet.members.candidates(""))

    async def call(self, endpoint: str, body: Mapping[str, Any], timeout_s: float) -> bytes:
        """Return the bytes of a reply with status 200."""
        await self.fleet.watch.ready()

        async def begin(url: str, tell: Callable[[], None]) -> bytes:
            return await self._at(url).call(endpoint, body, timeout_s)

        attempt = await self.fleet.calls.first(_key(body), begin, may_hedge=False, may_repeat=True)
        return await attempt.task

    @asynccontextmanager
    async def stream(
        self, endpoint: str, body: Mapping[str, Any], timeout_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give the pieces of an event stream."""
        await self.fleet.watch.ready()
        queues: dict[str, asyncio.Queue[bytes | None]] = {}

        async def begin(url: str, tell: Callable[[], None]) -> None:
            # Opened and closed in one task, as its deadline must be; the client reads the queue.
            queue = queues[url] = asyncio.Queue(_AHEAD)
            try:
                async with self._at(url).stream(endpoint, body, timeout_s) as pieces:
                    async for piece in pieces:
                        await queue.put(piece)
                        tell()
            finally:
                task = asyncio.current_task()
                if task is not None and not task.cancelling():
                    await queue.put(None)

        attempt = await self.fleet.calls.first(_key(body), begin, may_hedge=True, may_repeat=True)
        try:
            yield _pieces(queues[attempt.server.url], attempt)
        finally:
            attempt.task.cancel()
            await asyncio.gather(attempt.task, return_exceptions=True)

    async def aclose(self) -> None:
        """Close the connections."""
        await self.fleet.watch.aclose()
        await asyncio.gather(*(u.aclose() for u in self._upstreams.values()), *self._closing)


async def _pieces(
    queue: asyncio.Queue[bytes | None], attempt: Attempt[None]
) -> AsyncIterator[bytes]:
    """Give the pieces that an attempt puts into its queue, then raise what it failed with."""
    while (piece := await queue.get()) is not None:
        yield piece
    await attempt.task


def _key(body: Mapping[str, Any]) -> str:
    turns = body.get("messages")
    if turns is None:
        given = body.get("input")
        turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(turns, list):
        return ""
    return affinity_key([t for t in turns if isinstance(t, Mapping)], current_scope())
