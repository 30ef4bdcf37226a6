"""The learning of one route while the gateway runs: its state, its commands, its job.

Every change is a transition in the journal; the route's libraries follow from the state. A tick
looks at what has come and does at most one thing: propose, judge, grow, promote, roll back. It
never touches traffic: a tick that fails leaves the state and says why.

Does not know HTTP or pages. Source: own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tfgrpo.errors import StoreError, TfgrpoError, boundary
from tfgrpo.experience.artefact import Artefact, from_row
from tfgrpo.experience.library import Library
from tfgrpo.rollout import RolloutGroup
from tfgrpo.runtime.redaction import redact
from tfgrpo.sampling import Stop
from tfgrpo.serve import tables
from tfgrpo.serve.gateway import Gateway
from tfgrpo.serve.learning import canary
from tfgrpo.serve.learning.evidence import closed_groups, read_seen, read_units
from tfgrpo.serve.learning.grouping import make_groups
from tfgrpo.serve.learning.proposing import (
    AskedQuestion,
    PendingLibrary,
    Proposer,
    propose,
    split_of,
)
from tfgrpo.serve.learning.states import LearningState, Transition, apply
from tfgrpo.serve.routes import Route
from tfgrpo.serve.settings import LearnSettings

log = logging.getLogger(__name__)

__all__ = ["Learning", "RouteLearning"]

MOST_FAILURES = 3


class RouteLearning:
    """One route's learning.

    Args:
        gateway, route: the running parts; the route has a `learn` section.
        proposer: makes a candidate from groups.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        gateway: Gateway,
        route: Route,
        *,
        proposer: Proposer = propose,
        clock: Callable[[], float] = time.time,
    ) -> None:
        assert route.settings.learn is not None
        self.gateway, self.route = gateway, route
        self.settings: LearnSettings = route.settings.learn
        self.configured = route.artefact
        self._proposer, self._clock = proposer, clock
        self._lock = asyncio.Lock()
        self.stop = Stop()
        self._is_ticking = False
        self.transitions: list[Transition] = _read(gateway, route.name)
        self.state = LearningState()
        for transition in self.transitions:
            self.state = apply(self.state, transition)
        self.verdict: canary.CanaryVerdict | None = None
        """Of the running test, for the page."""
        self._sync()

    def artefact(self, version: str) -> Artefact | None:
        """Return a library by version; empty means the configured one."""
        if not version:
            return self.configured
        for name, payload in reversed(self.gateway.journal.libraries()):
            if name == version:
                return from_row(payload, f"library {version} of the journal")
        return None

    @property
    def current(self) -> Artefact:
        """The library in force; an empty one where there is none."""
        return self.artefact(self.state.current) or Artefact(Library())

    @property
    def candidate(self) -> Artefact | None:
        """The library under discussion or test."""
        return self.artefact(self.state.candidate) if self.state.candidate else None

    async def act(
        self,
        event: str,
        who: str,
        reason: str = "",
        body: Mapping[str, Any] | None = None,
        *,
        expected: int | None = None,
    ) -> LearningState:
        """Make an event happen, once it is in the journal.

        Args:
            event: one of `EVENTS`.
            who: `person` or `job`.
            reason: in words.
            body: evidence.
            expected: version that the command was given for; None: the present one.

        Raises:
            ApiError: 409, not possible now or meant for another version.
            StoreError: it could not be written; nothing has changed.
        """
        async with self._lock:
            number = self.state.version + 1 if expected is None else expected + 1
            made = Transition(self._clock(), number, event, who, redact(reason)[:500], body or {})
            after = apply(self.state, made)
            row = (
                tables.TRANSITION,
                (made.at, self.route.name, made.version, event, who, made.reason,
                 json.dumps(dict(made.body))),
            )  # fmt: skip
            try:
                await self.gateway.journal.writer.commit([row])
            except TfgrpoError:
                self.gateway.journal.writer.drop([row])
                raise
            self.transitions.append(made)
            self.state = after
            self._sync()
            self.gateway.metrics.add("learning", {"route": self.route.name, "event": event})
            return after

    def _sync(self) -> None:
        """Give the route the libraries of the state."""
        state, route = self.state, self.route
        artefact = self.artefact(state.current)
        if artefact is not route.artefact:
            route.use(artefact)
        for version in state.previous:
            earlier = self.artefact(version)
            if earlier is not None:
                route.offer(earlier)
        if state.name == "canary":
            share = self.settings.canary.shares[state.share_index]
            if (route.experiment, route.share) != (state.experiment, share):
                route.test(state.experiment, self.candidate, share)
        elif route.candidate is not None or route.experiment:
            route.test("", None, 0.0)

    async def tick(self) -> None:
        """Do the next thing that is due, if any; failures become the state's reason.

        While one tick runs, another does nothing.
        """
        if self._is_ticking:
            return
        self._is_ticking = True
        try:
            with boundary(TfgrpoError, f"the learning job of route {self.route.name!r}"):
                await self._tick()
        except TfgrpoError as error:
            log.warning("%s", redact(str(error)))
            self.gateway.metrics.add("learning_failures", {"route": self.route.name})
            if self.state.name in ("proposing", "gating"):
                await self.act("failed", "job", str(error))
                await self._stop_after_failures()
        finally:
            self._is_ticking = False

    async def _tick(self) -> None:
        name = self.state.name
        if name in ("collecting", "watched"):
            if name == "watched":
                await self._watch()
            if self.settings.enabled:
                await self._collect()
        elif name in ("proposing", "gating"):
            # Only a killed process leaves these behind: its run is not trusted to be whole.
            await self.act("failed", "job", "the gateway was stopped while it learnt",
                           {"is_interrupted": True})  # fmt: skip
        elif name == "waiting":
            await self._wait()
        elif name == "canary":
            await self._judge()

    async def _stop_after_failures(self) -> None:
        if self.state.failures >= MOST_FAILURES:
            await self.act("freeze", "job", f"{MOST_FAILURES} proposals in a row came to nothing")

    def groups(self) -> list[RolloutGroup]:
        """Return the closed groups of what is kept of the traffic."""
        now = self._clock()
        since = now - self.route.settings.keep_days * 86_400.0
        journal = self.gateway.journal
        seen = read_seen(journal, self.route.name, self.settings.feedback, since=since)
        contexts = {v: i.context for v, i in self.route.versions.items()}
        closed = closed_groups(journal, self.route.name)
        return make_groups(
            seen, self.route.settings.groups, self.route.name, contexts, now=now, closed=closed
        )

    async def _collect(self) -> None:
        groups = self.groups()
        for group in groups:
            self.gateway.journal.record_group(group)
        informative = [g for g in groups if g.is_informative()]
        fresh = informative[self.state.used_groups :]
        if len(fresh) < self.settings.min_informative or self.gateway.is_busy:
            return
        await self.act(
            "propose", "job", f"{len(fresh)} informative groups",
            {"groups": len(informative), "group_ids": [g.group_id for g in fresh]},
        )  # fmt: skip
        await self._propose(limit_sources(fresh, self.settings.feedback.max_share), groups)

    async def _propose(self, fresh: Sequence[RolloutGroup], groups: Sequence[RolloutGroup]) -> None:
        secret = self.route.secret
        gate = {g.task.task_id: g.task for g in groups
                if split_of(secret, g.task.task_id) == "gate"}  # fmt: skip
        learnt_from = [g for g in fresh if g.task.task_id not in gate]
        if self.settings.verifier is None:
            gate, learnt_from = {}, list(fresh)
        first = self.gateway.settings.upstreams[self.route.settings.upstreams[0]]
        asked = AskedQuestion(
            folder=self.gateway.folder / "learn" / f"{self.route.name}-{self.state.version}",
            groups=learnt_from,
            gate_tasks=tuple(gate.values()),
            current=self.current,
            policy=first.lm,
            options=first.options,
            settings=self.settings,
            stop=self.stop,
        )
        proposal: PendingLibrary = await asyncio.to_thread(self._proposer, asked)
        if proposal.artefact is None:
            await self.act("failed", "job", "nothing new was found", proposal.evidence)
            await self._stop_after_failures()
            return
        version = proposal.artefact.library.version_id
        self.gateway.journal.record_library(version, proposal.artefact.to_dict())
        await self.act("proposed", "job", "", {"candidate": version, **proposal.evidence})
        gated = proposal.evidence.get("gate_tasks", 0)
        reason = f"gated on {gated} tasks" if gated else "no offline gate: no verifier is set"
        await self.act("gated", "job", reason)

    async def _wait(self) -> None:
        if self.settings.approve == "never":
            await self.act("approve", "job", "the settings ask for no approval")
        elif self._clock() - self.state.since > self.settings.expire_h * 3600.0:
            await self.act("expire", "job", "nobody answered in time")

    async def _judge(self) -> None:
        state, settings = self.state, self.settings.canary
        units = read_units(
            self.gateway.journal, self.route.name, self.settings.feedback, now=self._clock(),
            experiment=state.experiment,
        )  # fmt: skip
        verdict = self.verdict = canary.live_verdict(
            units, settings, number=state.number, share_index=state.share_index
        )
        if verdict.action == "wait":
            return
        needs = 2 if self.settings.approve == "before_promotion" else 1
        if verdict.action == "promote" and state.approvals < needs:
            return  # the page asks for it
        await self.act(verdict.action, "job", verdict.reason, verdict.to_dict())

    async def _watch(self) -> None:
        """Look whether outcomes have fallen since the promotion."""
        promoted = next((t for t in reversed(self.transitions) if t.event == "promote"), None)
        if promoted is None or self.state.reason.startswith("outcomes fell"):
            return
        units = read_units(
            self.gateway.journal, self.route.name, self.settings.feedback, now=self._clock(),
            since=promoted.at,
        )  # fmt: skip
        floor = self._floor(promoted)
        fell, holdout_fell = canary.drift(units, floor)
        if not fell:
            return
        if holdout_fell:
            await self.act("alarm", "job", "outcomes fell, the holdout's too: the traffic or the "
                           "model changed", {"floor": floor})  # fmt: skip
        elif self.settings.drift == "auto":
            await self.act("roll_back", "job", "outcomes fell under the library alone",
                           {"floor": floor})  # fmt: skip
        else:
            await self.act("alarm", "job", "outcomes fell under the library alone: consider a "
                           "roll-back", {"floor": floor})  # fmt: skip

    def _floor(self, promoted: Transition) -> float:
        """Return the mean that the promoted library should keep: what its arm had, less harm."""
        start = next((t.at for t in self.transitions if t.event == "approve"), 0.0)
        units = read_units(
            self.gateway.journal, self.route.name, self.settings.feedback, now=self._clock(),
            since=start,
        )  # fmt: skip
        outcomes = [u.outcome for u in units
                    if u.arm == "candidate" and u.outcome is not None
                    and u.at <= promoted.at]  # fmt: skip
        mean = sum(outcomes) / len(outcomes) if outcomes else 0.0
        width = 1.0 / math.sqrt(max(1, len(outcomes)))
        return mean - width - self.settings.canary.max_harm


def limit_sources(groups: Sequence[RolloutGroup], most: float) -> list[RolloutGroup]:
    """Return groups of which no source gives more than its share, where there are enough sources.

    With fewer sources than 1 / `most` nobody can stay under the share, and all groups count.
    """
    names = [str(s) for g in groups for s in g.metadata.get("sources", ())]
    if len(set(names)) * most < 1.0:
        return list(groups)
    limit = max(1, int(most * len(groups)))
    counts: Counter[str] = Counter()
    kept = []
    for group in groups:
        sources = [str(s) for s in group.metadata.get("sources", ())]
        if all(counts[s] < limit for s in sources):
            counts.update(sources)
            kept.append(group)
    return kept


def _read(gateway: Gateway, route: str) -> list[Transition]:
    rows = gateway.journal.writer.read(
        "SELECT at, version, event, who, reason, body FROM transitions WHERE route = ?"
        " ORDER BY version",
        (route,),
    )
    return [
        Transition(at, version, event, who, reason, json.loads(body))
        for at, version, event, who, reason, body in rows
    ]


class Learning:
    """The learning of all routes.

    Args:
        gateway: the running parts.
        proposer: makes a candidate from groups.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        proposer: Proposer = propose,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.routes = {
            name: RouteLearning(gateway, route, proposer=proposer, clock=clock)
            for name, route in gateway.routes.items()
            if route.settings.learn is not None
        }
        self._gateway, self._clock = gateway, clock
        self._task: asyncio.Task[None] | None = None

    def start(self, every_s: float = 10.0) -> None:
        """Tick all routes from now on."""
        if self.routes or any(r.settings.capture for r in self._gateway.routes.values()):
            self._task = asyncio.ensure_future(self._run(every_s))

    async def _run(self, every_s: float) -> None:
        while True:
            for route in self.routes.values():
                await route.tick()
            self.purge()
            await asyncio.sleep(every_s)

    def purge(self) -> None:
        """Remove captured content that is older than its route keeps it."""
        for name, route in self._gateway.routes.items():
            before = self._clock() - route.settings.keep_days * 86_400.0
            with suppress(StoreError):  # told by /ready, tried again with the next tick
                tables.purge(self._gateway.journal, name, before)

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
