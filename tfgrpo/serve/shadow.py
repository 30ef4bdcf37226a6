"""Shadow draws: further draws of a served request, later and out of a purse of their own.

A request that was answered once gets `group_size - 1` further draws from the same model with the
same context, and a verifier judges them beside the served reply: a whole group from one request.
Asked are tasks that the value model expects to be mixed, or a fixed share while it abstains.
Nothing is drawn while the route is short of rate, tool calls are never carried out, and a reply
with tool calls is not shadowed.

Does not know states or the critic. Source: own.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tfgrpo.rollout import Task
from tfgrpo.serve import tables
from tfgrpo.serve.endpoints.best_of import BestOf
from tfgrpo.serve.endpoints.dialects import CHAT
from tfgrpo.serve.exchange import Exchange
from tfgrpo.serve.gateway import Gateway, Model, shadow_key
from tfgrpo.serve.identity import Extensions
from tfgrpo.serve.inject import Injection
from tfgrpo.serve.learning.grouping import read_turns
from tfgrpo.serve.learning.judging import Judged, RouteVerifier
from tfgrpo.serve.learning.route import RouteLearning
from tfgrpo.serve.routes import Route, draw
from tfgrpo.serve.settings import LearnSettings
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.store import Journal
from tfgrpo.store.rows import Statement

log = logging.getLogger(__name__)

__all__ = ["Served", "Shadow", "Shadows", "read_served"]

SOURCE = "verifier:shadow"
RECENT_S = 3600.0
"""How long ago a request may have been served."""
CALM_S = 60.0
"""Pause after a provider's refusal for its rate."""
AT_A_TIME = 8
MOST_READ = 500
"""Requests that are looked at in one tick."""


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was answered with one reply."""

    response_id: str
    at: float
    """When it was answered."""
    task_id: str
    library: str
    upstream: str
    prediction: float | None
    asked: Mapping[str, Any]
    """The kept body: turns, tools, fields."""
    message: Mapping[str, Any]
    finish: str
    answer: Any
    """The right answer, where feedback said it."""


def read_served(journal: Journal, route: str, since: float, answered_since: float) -> list[Served]:
    """Return the single-call requests of a route in order of their answers, without those that
    were drawn for before.

    Args:
        journal, route: where and whose.
        since: the earliest that they were asked at.
        answered_since: the earliest that they were answered at.
    """
    rows = journal.writer.read(
        "SELECT q.response_id, r.at, q.task_id, q.library, r.upstream, q.prediction, q.prompt,"
        " c.body, c.finish, (SELECT f.value FROM feedback f WHERE f.target_kind = 'response'"
        "  AND f.target = q.response_id AND f.kind = 'answer' ORDER BY f.feedback DESC LIMIT 1)"
        " FROM requests q JOIN replies r ON r.response_id = q.response_id"
        " JOIN choices c ON c.response_id = q.response_id AND c.choice = 0"
        " WHERE q.route = ? AND q.at >= ? AND r.at >= ? AND q.prompt NOT NULL AND r.state = 'ok'"
        " AND q.session_id = '' AND q.key <> ? AND q.endpoint = '/chat/completions'"
        " AND NOT EXISTS (SELECT 1 FROM choices d WHERE d.response_id = q.response_id"
        "  AND d.choice > 0)"
        " AND NOT EXISTS (SELECT 1 FROM notes n WHERE n.kind = 'shadowed'"
        "  AND n.name = q.response_id)"
        f" ORDER BY r.at LIMIT {MOST_READ}",
        (route, since, answered_since, shadow_key(route)),
    )
    found = []
    for response_id, at, task, library, upstream, prediction, prompt, body, finish, answer in rows:
        message = json.loads(body)
        if not message.get("tool_calls"):
            found.append(
                Served(response_id, at, task, library, upstream, prediction, json.loads(prompt),
                       message, finish, json.loads(answer) if answer else None)
            )  # fmt: skip
    return found


class Shadows:
    """The shadow draws of all routes; what a route's learning calls at each tick.

    Args:
        gateway: the running parts.
        clock: seconds since the epoch.
    """

    def __init__(self, gateway: Gateway, *, clock: Callable[[], float] = time.time) -> None:
        self._gateway, self._clock = gateway, clock
        self._routes: dict[str, Shadow] = {}

    async def __call__(self, learning: RouteLearning) -> None:
        """Draw for some of what a route served of late."""
        route = learning.route
        found = self._routes.get(route.name)
        if found is None or found.route is not route:
            found = self._routes[route.name] = Shadow(self._gateway, route, self._clock)
        since, looked_until = self._clock() - RECENT_S, found.looked_until
        served = await learning.traffic.aside(
            lambda journal: read_served(journal, route.name, since, looked_until)
        )
        await found.run(served, learning.settings)


class Shadow:
    """The shadow draws of one route.

    Args:
        gateway, route: the running parts.
        clock: seconds since the epoch.
    """

    def __init__(self, gateway: Gateway, route: Route, clock: Callable[[], float]) -> None:
        self._gateway, self.route, self._clock = gateway, route, clock
        self.looked_until = 0.0
        """When the newest request was answered that was looked at."""
        self._verifier = RouteVerifier()

    async def run(self, served: list[Served], settings: LearnSettings) -> int:
        """Draw for some of what was served; return for how many requests."""
        drawn = 0
        for one in served:
            if drawn >= AT_A_TIME or not self._has_room():
                break
            self.looked_until = one.at
            if not self._is_chosen(one, settings):
                continue
            try:
                await self._draw(one, settings)
            except ApiError as error:
                if error.code == "budget_exceeded":
                    break  # the purse of the day is empty
                log.info("shadow draws of %s failed: %s", one.response_id, error.message)
            drawn += 1
        return drawn

    def _has_room(self) -> bool:
        calm = time.monotonic() - self.route.limited_at >= CALM_S
        return calm and not self._gateway.is_busy

    def _is_chosen(self, one: Served, settings: LearnSettings) -> bool:
        shadow = settings.shadow
        assert shadow is not None
        if one.upstream not in self._gateway.models or one.library not in self.route.versions:
            return False
        if one.prediction is not None:
            return shadow.mixed[0] <= one.prediction <= shadow.mixed[1]
        return draw(self.route.secret, "shadow", one.response_id) < shadow.share

    async def _draw(self, one: Served, settings: LearnSettings) -> None:
        assert settings.shadow is not None
        journal = self._gateway.journal
        # Noted first: whatever happens now, a request is drawn for once.
        noted = (tables.NOTE, (self._clock(), "shadowed", one.response_id, self.route.name))
        await journal.writer.commit([noted])
        wanted = settings.shadow.group_size - 1
        body = {**one.asked.get("fields", {}), "messages": one.asked["messages"]}
        if one.asked.get("tools"):
            body["tools"] = one.asked["tools"]
        ext = Extensions(task_id=one.task_id, samples=wanted, select="vote", library=one.library)
        exchange = Exchange(
            self._gateway, self.route, CHAT.endpoint, body, len(json.dumps(body)),
            shadow_key(self.route.name), ext,
        )  # fmt: skip

        def make(model: Model, injection: Injection) -> dict[str, Any]:
            return CHAT.make(body, model.upstream.model, injection)

        best = BestOf(self._gateway, exchange, make, CHAT.prefix + exchange.response_id)
        await best.run([one.upstream])
        draws: list[tuple[int, Mapping[str, Any]]] = [
            (int(choice), json.loads(raw))
            for choice, raw in journal.writer.read(
                "SELECT choice, body FROM choices WHERE response_id = ? ORDER BY choice",
                (exchange.response_id,),
            )
        ]
        place = len(draws)
        kept = json.dumps(one.message).encode()
        rows: list[Statement] = [(tables.CHOICE, (exchange.response_id, place, one.finish, kept))]
        draws.append((place, one.message))
        rows += await self._ratings(one, exchange.response_id, draws, settings)
        await journal.writer.commit(rows)
        self._gateway.metrics.add("shadow_draws", {"route": self.route.name}, place)

    async def _ratings(
        self,
        one: Served,
        response_id: str,
        draws: list[tuple[int, Mapping[str, Any]]],
        settings: LearnSettings,
    ) -> list[Statement]:
        turns = read_turns(one.asked["messages"])
        task = Task(one.task_id or one.response_id, turns, one.answer)
        rows: list[Statement] = []
        for choice, message in draws:
            value = await self._verifier.value(task, message, settings)
            if value is not None:
                judged = Judged(response_id, choice, value, SOURCE)
                key = shadow_key(self.route.name)
                rows.append(judged.row(settings.feedback.metric, key, self._clock()))
        return rows
