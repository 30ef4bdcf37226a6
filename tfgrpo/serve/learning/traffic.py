"""What a route's traffic adds up to while it goes on: groups, units, verdicts on silence.

Reads the journal beside the event loop. Does not know states or what is decided. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.serve import tables
from tfgrpo.serve.gateway import Gateway
from tfgrpo.serve.learning.canary import LiveUnit
from tfgrpo.serve.learning.evidence import (
    SILENT,
    closed_groups,
    read_seen,
    read_silent,
    read_units,
)
from tfgrpo.serve.learning.grouping import make_groups, read_turns
from tfgrpo.serve.learning.judging import Judged, RouteVerifier
from tfgrpo.serve.routes import Route
from tfgrpo.serve.settings import LearnSettings
from tfgrpo.store import Journal

__all__ = ["Traffic"]

T = TypeVar("T")


class Traffic:
    """The traffic of one route.

    Args:
        gateway, route: the running parts.
        clock: seconds since the epoch.
    """

    def __init__(self, gateway: Gateway, route: Route, clock: Callable[[], float]) -> None:
        self._gateway, self._route, self._clock = gateway, route, clock
        self._verifier = RouteVerifier()
        self._recorded: dict[str, tuple[int, str]] = {}
        """Rollouts and verifier of the groups that were written down, by id."""

    @property
    def settings(self) -> LearnSettings:
        """The route's, which may be read anew."""
        return self._route.settings.learn or LearnSettings(enabled=False)

    async def aside(self, read: Callable[[Journal], T]) -> T:
        """Read the journal beside the event loop, on a connection of its own: traffic goes on."""

        def run() -> T:
            with Journal.open(self._gateway.folder, readonly=True) as journal:
                return read(journal)

        self._gateway.journal.writer.flush()
        return await asyncio.to_thread(run)

    def groups(self, journal: Journal) -> list[RolloutGroup]:
        """Return the closed groups of what is kept of the traffic."""
        now = self._clock()
        since = now - self._route.settings.keep_days * 86_400.0
        groups = self._route.settings.groups
        seen = read_seen(
            journal, self._route.name, self.settings.feedback, since=since,
            identified=groups.task_identity == "id",
        )  # fmt: skip
        contexts = {v: i.context for v, i in self._route.versions.items()}
        closed = closed_groups(journal, self._route.name)
        return make_groups(seen, groups, self._route.name, contexts, now=now, closed=closed)

    def record(self, groups: Sequence[RolloutGroup]) -> None:
        """Keep groups as every run does, with the requests that each was made of."""
        journal = self._gateway.journal
        for group in groups:
            verifier_id = str(group.metadata["verifier_id"])
            state = (len(group.rollouts), verifier_id)
            if self._recorded.get(group.group_id) == state:
                continue
            journal.record_group(group)
            journal.writer.put(
                [(tables.GROUP_RESPONSE, (group.group_id, r)) for r in group.metadata["responses"]]
            )
            self._recorded[group.group_id] = state

    async def judge_silent(self, experiment: str) -> None:
        """Let the verifier judge what nobody rated within its window."""
        feedback, journal = self.settings.feedback, self._gateway.journal
        before = self._clock() - feedback.window_h * 3600.0
        silent = await self.aside(
            lambda journal: read_silent(journal, self._route.name, experiment, before)
        )
        for response_id, task_id, turns, message, answer in silent:
            task = Task(task_id or response_id, read_turns(turns), answer)
            value = await self._verifier.value(task, message, self.settings)
            if value is not None:
                judged = Judged(response_id, 0, value, SILENT)
                journal.writer.put([judged.row(feedback.metric, "", self._clock())])

    async def units(self, **which: Any) -> list[LiveUnit]:
        """Return the closed units of the traffic; `which` as `read_units` takes it."""
        settings, now = self.settings.feedback, self._clock()
        return await self.aside(
            lambda journal: read_units(journal, self._route.name, settings, now=now, **which)
        )
