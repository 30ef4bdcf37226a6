"""`FleetLM`: many servers of one model as one backend.

One identity for the whole fleet (name, model, revision), so that a reply's key does not depend on
the server that gave it. One call is one call, as everywhere: what a server refuses before it has
answered goes to the next one, what breaks off leaves as a typed failure.

Does not know retries, prices, tasks. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tfgrpo.lm.first_token import on_first_token
from tfgrpo.lm.fleet.calls import FleetCalls
from tfgrpo.lm.fleet.hedging import Hedging
from tfgrpo.lm.fleet.members import Members
from tfgrpo.lm.fleet.placement import affinity_key
from tfgrpo.lm.fleet.settings import FleetSettings
from tfgrpo.lm.fleet.watch import Watch
from tfgrpo.lm.openai import OpenAILM, ServerRules, find_secret
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.runtime.event_loop import start_task

__all__ = ["Fleet", "FleetLM"]

_SETTINGS = frozenset(f.name for f in fields(FleetSettings))


class Fleet:
    """Members, hedging and watch of one fleet, put together from its settings.

    Args:
        name: the fleet's.
        settings: checked.
        api_key_env: environment variable of the key that all servers take.
        on_gone: told the URLs of servers that have left and are idle.
    """

    def __init__(
        self,
        name: str,
        settings: FleetSettings,
        api_key_env: str | None,
        on_gone: Callable[[list[str]], None],
    ) -> None:
        self.name, self.settings = name, settings
        self.members = Members(name, settings)
        self.hedging = Hedging(settings.hedge_share, settings.hedge_after)
        self.calls = FleetCalls(self.members, self.hedging)
        secret = find_secret(api_key_env, is_official=False)
        self.watch = Watch(self.members, settings, secret, on_gone)

    def figures(self) -> dict[str, Any]:
        """Return what the fleet did so far, for metrics and reports."""
        rows = {
            s.url: {
                "state": s.state,
                "in_flight": s.in_flight,
                "calls": s.calls,
                "failures": s.failures,
                "rests": s.rests,
                "at_home": s.at_home,
                "prompt_tokens": s.prompt_tokens,
                "cached_tokens": s.cached_tokens,
            }
            for s in self.members.servers.values()
        }
        return {"hedges": self.hedging.hedges, "servers": rows}


def split_options(options: Mapping[str, Any]) -> tuple[FleetSettings, dict[str, Any]]:
    """Return a fleet's settings, and the options of its servers' backend that stand beside them.

    Raises:
        ConfigError: a setting that cannot work.
        TypeError: `servers` or `model` is not given.
    """
    mine = {k: v for k, v in options.items() if k in _SETTINGS}
    return FleetSettings(**mine), {k: v for k, v in options.items() if k not in _SETTINGS}


class FleetLM:
    """A model on many servers.

    Args:
        name: the fleet's name: part of every key, so it stays when servers change.
        options: fields of `FleetSettings` (`servers`, `model`, …) and, beside them, options of
            `OpenAILM` that hold for every server (`api_key_env`, `stream`, `send_seed`, …).
    """

    def __init__(self, name: str, /, **options: Any) -> None:
        self._settings, self._options = split_options(options)
        self._lms: dict[str, OpenAILM] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.fleet = Fleet(name, self._settings, options.get("api_key_env"), self._drop)
        for url in self.fleet.members.servers:
            self._lm_of(url)

    def _lm_of(self, url: str) -> OpenAILM:
        if url not in self._lms:
            given = dict(self._options)
            rules = {f.name: given.pop(f.name) for f in fields(ServerRules) if f.name in given}
            self._lms[url] = OpenAILM(
                self._settings.model, base_url=url, rules=ServerRules(**rules), **given
            )
        return self._lms[url]

    def _drop(self, urls: list[str]) -> None:
        for url in urls:
            lm = self._lms.pop(url, None)
            if lm is not None:
                start_task(lm.aclose(), self._closing)

    @property
    def model_id(self) -> str:
        """`fleet:NAME`."""
        return f"fleet:{self.fleet.name}"

    @property
    def identity(self) -> Mapping[str, Any]:
        """Name, model and revision; which servers there are changes no answer."""
        return {
            "backend": "fleet",
            "name": self.fleet.name,
            "model": self._settings.model,
            "revision": self._settings.revision,
        }

    @property
    def prefers_n(self) -> bool:
        """True until a server turned out not to honour `n`."""
        return all(lm.prefers_n for lm in self._lms.values())

    async def complete(
        self, request: Request, n: int, seeds: Sequence[int | None]
    ) -> list[Completion]:
        """Return 1 to n replies, all of one server."""
        await self.fleet.watch.ready()
        key = affinity_key([_row(m) for m in request.messages], current_scope())

        async def begin(url: str, tell: Callable[[], None]) -> list[Completion]:
            with on_first_token(tell):
                return await self._lm_of(url).complete(request, n, seeds)

        attempt = await self.fleet.calls.first(key, begin, may_hedge=n == 1)
        replies = await attempt.task
        for reply in replies:
            attempt.server.prompt_tokens += reply.usage.prompt_tokens
            attempt.server.cached_tokens += reply.usage.cache_read_tokens
        return replies

    async def aclose(self) -> None:
        """Stop looking after the servers, and close the connections of the running loop."""
        await self.fleet.watch.aclose()
        await asyncio.gather(*(lm.aclose() for lm in self._lms.values()), *self._closing)


def _row(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}
