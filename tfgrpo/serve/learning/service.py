"""The learning of all routes while the gateway runs: ticks, and what is kept for how long.

Does not know what a tick does. Source: own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from tfgrpo.errors import StoreError
from tfgrpo.serve.content import remove
from tfgrpo.serve.gateway import Gateway
from tfgrpo.serve.learning.proposing import Proposer, propose
from tfgrpo.serve.learning.route import Redraw, RouteLearning

__all__ = ["Learning"]


class Learning:
    """The learning of all routes.

    Args:
        gateway: the running parts.
        proposer: makes a candidate from groups.
        redraw: makes shadow draws; None makes none.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        proposer: Proposer = propose,
        redraw: Redraw | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._gateway, self._clock = gateway, clock
        self._proposer, self._redraw = proposer, redraw
        self.routes: dict[str, RouteLearning] = {}
        self.follow()
        self._task: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Learn for the routes whose settings say so; the others' states stay in the journal."""
        found = {}
        for name, route in self._gateway.routes.items():
            if route.settings.learn is not None:
                found[name] = self.routes.get(name) or RouteLearning(
                    self._gateway, route, proposer=self._proposer, redraw=self._redraw,
                    clock=self._clock,
                )  # fmt: skip
        self.routes = found

    def start(self, every_s: float = 10.0) -> None:
        """Tick all routes from now on."""
        self._task = asyncio.ensure_future(self._run(every_s))

    async def _run(self, every_s: float) -> None:
        while True:
            for route in tuple(self.routes.values()):
                await route.tick()
            self.purge()
            await asyncio.sleep(every_s)

    def purge(self) -> None:
        """Remove captured content that is older than its route keeps it."""
        for name, route in self._gateway.routes.items():
            before = self._clock() - route.settings.keep_days * 86_400.0
            old = "route = ? AND at < ? AND prompt NOT NULL"
            journal = self._gateway.journal
            with suppress(StoreError):  # told by /ready, tried again with the next tick
                if journal.writer.read(f"SELECT 1 FROM requests WHERE {old} LIMIT 1",
                                       (name, before)):  # fmt: skip
                    remove(journal, self._gateway.folder, old, (name, before))

    async def stop(self) -> None:
        """Tick no more; a proposal that is being made in its thread is left to itself."""
        for route in self.routes.values():
            route.stop.request()
        await self.pause()

    async def pause(self) -> None:
        """Tick no more until it is started again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
