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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tfgrpo.errors import TfgrpoError, boundary
from tfgrpo.experience.artefact import Artefact, from_row
from tfgrpo.experience.library import Library
from tfgrpo.rollout import RolloutGroup
from tfgrpo.runtime.redaction import redact
from tfgrpo.sampling import Stop
from tfgrpo.serve import tables
from tfgrpo.serve.gateway import Gateway
from tfgrpo.serve.learning import canary
from tfgrpo.serve.learning.proposing import (
    AskedQuestion,
    PendingLibrary,
    Proposer,
    limit_sources,
    propose,
    split_of,
)
from tfgrpo.serve.learning.purse import Purse
from tfgrpo.serve.learning.states import LearningState, Transition, apply
from tfgrpo.serve.learning.traffic import Traffic
from tfgrpo.serve.routes import Route
from tfgrpo.serve.settings import LearnSettings, UpstreamSettings
from tfgrpo.serve.wire.errors import ApiError

log = logging.getLogger(__name__)

__all__ = ["Redraw", "RouteLearning"]

MOST_FAILURES = 3
SILENT_UNITS = 200
"""Units in a row without feedback that pause a live test."""
UPSTREAMS_REST = "every upstream of the route rests"


Redraw = Callable[["RouteLearning"], Awaitable[None]]
"""Draws again what a route served of late."""


class RouteLearning:
    """One route's learning.

    Args:
        gateway, route: the running parts; the route has a `learn` section.
        proposer: makes a candidate from groups.
        redraw: makes shadow draws; None makes none.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        gateway: Gateway,
        route: Route,
        *,
        proposer: Proposer = propose,
        redraw: Redraw | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        assert route.settings.learn is not None
        self.gateway, self.route = gateway, route
        self._proposer, self._redraw, self._clock = proposer, redraw, clock
        self._lock = asyncio.Lock()
        self.stop = Stop()
        self._is_ticking = False
        self.traffic = Traffic(gateway, route, clock)
        self.transitions: list[Transition] = _read(gateway, route.name)
        self.state = LearningState()
        for transition in self.transitions:
            self.state = apply(self.state, transition)
        self.verdict: canary.CanaryVerdict | None = None
        """Of the running test, for the page."""
        self._sync()

    @property
    def settings(self) -> LearnSettings:
        """The route's, which may be read anew."""
        return self.traffic.settings

    def artefact(self, version: str) -> Artefact | None:
        """Return a library by version; empty means the configured one."""
        if not version:
            return self.route.configured
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
        if self._redraw is not None and self.settings.shadow is not None and name != "frozen":
            await self._redraw(self)
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
        elif name == "paused" and self.state.reason == UPSTREAMS_REST and not self._all_rest:
            await self.act("resume", "job", "an upstream answers again")

    async def _stop_after_failures(self) -> None:
        if self.state.failures >= MOST_FAILURES:
            await self.act("freeze", "job", f"{MOST_FAILURES} proposals in a row came to nothing")

    async def _collect(self) -> None:
        groups = await self.traffic.aside(self.traffic.groups)
        self.traffic.record(groups)
        informative = [g for g in groups if g.is_informative()]
        used = {
            group_id
            for t in self.transitions
            if t.event == "propose"
            for group_id in t.body.get("group_ids", ())
        }
        fresh = [g for g in informative if g.group_id not in used]
        if len(fresh) < self.settings.min_informative or self.gateway.is_busy:
            return
        spec = self.settings.critic or self._first.lm
        try:
            purse = await Purse.open(self.gateway, self.route, self.settings.usd, spec)
        except ApiError as error:
            self.gateway.metrics.add("learning_waits", {"route": self.route.name})
            log.info("route %s does not learn yet: %s", self.route.name, error.message)
            return
        evidence = {
            "groups": self.state.used_groups + len(fresh),
            "group_ids": [g.group_id for g in fresh],
            "gate_group_ids": [g.group_id for g in groups if self._is_gate(g)],
        }
        kept = limit_sources(fresh, self.settings.feedback.max_share)
        try:
            await self.act("propose", "job", f"{len(fresh)} informative groups", evidence)
            proposal = await self._learn(kept, groups)
        except BaseException as error:
            purse.abandon(type(error).__name__)
            raise
        await purse.settle(proposal.evidence.get("spend"))
        await self._take(proposal)

    @property
    def _first(self) -> UpstreamSettings:
        return self.gateway.settings.upstreams[self.route.settings.upstreams[0]]

    def _is_gate(self, group: RolloutGroup) -> bool:
        """True for a group whose task compares libraries offline and teaches nothing."""
        if self.settings.verifier is None:
            return False
        return split_of(self.route.secret, group.task.task_id) == "gate"

    async def _learn(
        self, fresh: Sequence[RolloutGroup], groups: Sequence[RolloutGroup]
    ) -> PendingLibrary:
        gate = {g.task.task_id: g.task for g in groups if self._is_gate(g)}
        learnt_from = [g for g in fresh if g.task.task_id not in gate]
        asked = AskedQuestion(
            folder=self.gateway.folder / "learn" / f"{self.route.name}-{self.state.version}",
            groups=learnt_from,
            gate_tasks=tuple(gate.values()),
            current=self.current,
            policy=self._first.lm,
            options=self._first.options,
            settings=self.settings,
            stop=self.stop,
        )
        return await asyncio.to_thread(self._proposer, asked)

    async def _take(self, proposal: PendingLibrary) -> None:
        """Make a proposal wait for a person, or tell that there is none."""
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
        if self.settings.feedback.missing == "verifier":
            await self.traffic.judge_silent(state.experiment)
        gated = next((t.at for t in reversed(self.transitions) if t.event == "gated"), 0.0)
        units = await self.traffic.units(experiment=state.experiment, since=gated)
        if await self._pause_where_due(units):
            return
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
        units = await self.traffic.units(since=promoted.at)
        floor = await self._floor(promoted)
        fell, holdout_fell = canary.drift(units, floor)
        if not fell:
            return
        if holdout_fell:
            await self.act("freeze", "job", "outcomes fell, the holdout's too: the traffic or the "
                           "model changed; learning waits for a person",
                           {"floor": floor})  # fmt: skip
        elif self.settings.drift == "auto":
            await self.act("roll_back", "job", "outcomes fell under the library alone",
                           {"floor": floor})  # fmt: skip
        else:
            await self.act("alarm", "job", "outcomes fell under the library alone: consider a "
                           "roll-back", {"floor": floor})  # fmt: skip

    @property
    def _all_rest(self) -> bool:
        return len(self.gateway.resting(self.route)) == len(self.route.settings.upstreams)

    async def _pause_where_due(self, units: Sequence[canary.LiveUnit]) -> bool:
        """Pause a test that nothing can be learnt from; return whether it was."""
        latest = units[-SILENT_UNITS:]
        if self._all_rest:
            await self.act("pause", "job", UPSTREAMS_REST)
        elif len(latest) == SILENT_UNITS and not any(u.has_feedback for u in latest):
            await self.act(
                "pause", "job", f"no feedback on the last {SILENT_UNITS} units of the test"
            )
        else:
            return False
        return True

    async def _floor(self, promoted: Transition) -> float:
        """Return the mean that the promoted library should keep: what its arm had, less harm."""
        start = next((t.at for t in self.transitions if t.event == "approve"), 0.0)
        units = await self.traffic.units(since=start)
        outcomes = [u.outcome for u in units
                    if u.arm == "candidate" and u.outcome is not None
                    and u.at <= promoted.at]  # fmt: skip
        mean = sum(outcomes) / len(outcomes) if outcomes else 0.0
        width = 1.0 / math.sqrt(max(1, len(outcomes)))
        return mean - width - self.settings.canary.max_harm


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
