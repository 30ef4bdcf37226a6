"""One route while the gateway runs: its libraries, its arms, and who gets which.

A unit (a session, else a task, else a request) gets its arm by a keyed digest: the holdout never
gets a library, a candidate gets its share of the rest, everybody else the current library. Shares
only grow within an experiment, so nobody moves back and forth. A session keeps arm and library of
its first turn.

Does not know HTTP, money or how a candidate came about. Source: own.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from tfgrpo.experience.artefact import Artefact
from tfgrpo.serve.identity import Extensions
from tfgrpo.serve.inject import EMPTY, Injection
from tfgrpo.serve.settings import RouteSettings
from tfgrpo.serve.wire.errors import ApiError
from tfgrpo.store import Journal

__all__ = ["Arm", "Assignment", "Chooser", "Route", "by_weight", "draw"]

Arm = Literal["current", "candidate", "holdout", "pinned"]
_SESSIONS = 50_000
"""Sessions remembered; older ones are read from the journal."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a request gets."""

    unit: str
    experiment: str
    arm: Arm
    share: float
    """Probability of the candidate among units outside the holdout, when it was drawn."""
    injection: Injection
    upstream: str = ""
    """The model of the session's first turn."""


class Chooser(Protocol):
    """Orders upstreams by what they are worth for a prompt."""

    def order(self, prompt: str, names: list[str]) -> tuple[list[str], dict[str, float]]:
        """Return the names, best first, and the predicted success of those that are covered."""
        ...


def by_weight(secret: bytes, unit: str, weights: Mapping[str, float]) -> list[str]:
    """Return names in an order drawn by their weights, fixed by secret and unit.

    The first is a name with the probability of its share; so is each next one among the rest.
    """
    # The smallest of exponential waiting times at rates w is the one of w with probability w / Σw.
    waits = {n: -math.log(1.0 - draw(secret, f"weight:{n}", unit)) / w for n, w in weights.items()}
    return sorted(waits, key=lambda n: (waits[n], n))


def draw(secret: bytes, experiment: str, unit: str) -> float:
    """Return a number in [0, 1) fixed by secret, experiment and unit."""
    digest = hmac.digest(secret, f"{experiment}\0{unit}".encode(), "sha256")
    return int.from_bytes(digest[:8]) / 2**64


class Route:
    """The state of one route.

    Args:
        name, settings: as configured.
        secret: the gateway's.
        artefact: the library in force at the start, or None.
    """

    def __init__(
        self, name: str, settings: RouteSettings, secret: bytes, artefact: Artefact | None
    ) -> None:
        self.name = name
        self.settings = settings
        self.secret = hashlib.sha256(b"route\0" + name.encode() + secret).digest()
        self.current = Injection.of(artefact)
        self.artefact = artefact
        self.configured = artefact
        """The library that the settings name; a promoted one may be in force in its place."""
        self.candidate: Injection | None = None
        self.experiment = ""
        self.share = 0.0
        self.versions: dict[str, Injection] = {"empty": EMPTY, self.current.version: self.current}
        """Libraries that a session or a pin may still ask for."""
        self._sessions: OrderedDict[str, Assignment] = OrderedDict()
        self.chooser: Chooser | None = None
        """Orders the upstreams for a prompt; None keeps the configured order."""
        self._anew_since = 0.0
        self.limited_at = -math.inf
        """Monotonic time at which a provider last refused a call of it for its rate."""
        self.note = ""
        """What is wrong with it and keeps nobody from being served, for the page and /ready."""

    def use(self, artefact: Artefact | None) -> None:
        """Make a library the current one; running sessions keep theirs."""
        self.artefact = artefact
        self.current = Injection.of(artefact)
        self.versions[self.current.version] = self.current

    def configure(self, artefact: Artefact | None) -> None:
        """Take another configured library; it is in force at once unless one was promoted."""
        is_in_force = self.artefact is self.configured
        self.configured = artefact
        if is_in_force:
            self.use(artefact)
        elif artefact is not None:
            self.offer(artefact)

    def offer(self, artefact: Artefact) -> None:
        """Let sessions and pins still ask for a library."""
        injection = Injection.of(artefact)
        self.versions.setdefault(injection.version, injection)

    def test(self, experiment: str, artefact: Artefact | None, share: float) -> None:
        """Give a candidate its share of the traffic; None ends the test."""
        self.experiment, self.share = experiment, share
        self.candidate = None if artefact is None else Injection.of(artefact)
        if self.candidate is not None:
            self.versions[self.candidate.version] = self.candidate

    def forget_sessions(self, *, everywhere: bool = False) -> None:
        """Forget what is remembered of sessions.

        Args:
            everywhere: also leave out what the journal says of earlier ones, so that running
                sessions get what is in force now.
        """
        self._sessions.clear()
        if everywhere:
            self._anew_since = time.time()

    def assign(self, ext: Extensions, response_id: str, journal: Journal) -> Assignment:
        """Return the arm and library of a request.

        Raises:
            ApiError: 404, a pinned version that the route does not have.
        """
        if ext.library:
            injection = EMPTY if ext.library == "off" else self.versions.get(ext.library)
            if injection is None:
                raise ApiError(
                    "not_found",
                    f"route {self.name!r} has no library {ext.library!r}",
                    param="tfgrpo.library",
                )
            return Assignment(_unit(ext, response_id), "", "pinned", 0.0, injection)
        if not ext.session_id:
            return self._draw(_unit(ext, response_id))
        found = self._sessions.get(ext.session_id) or self._earlier(ext.session_id, journal)
        if found is None:
            found = self._draw(_unit(ext, response_id))
        self.keep(ext.session_id, found)
        return found

    def keep(self, session_id: str, assignment: Assignment) -> None:
        """Remember what a session has."""
        self._sessions[session_id] = assignment
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)

    def _earlier(self, session_id: str, journal: Journal) -> Assignment | None:
        rows = journal.writer.read(
            "SELECT q.unit, q.experiment, q.arm, q.share, q.library, r.upstream FROM requests q"
            " LEFT JOIN replies r ON r.response_id = q.response_id"
            " WHERE q.session_id = ? AND q.session_id <> '' AND q.route = ? AND q.at >= ?"
            " ORDER BY q.at LIMIT 1",
            (session_id, self.name, self._anew_since),
        )
        if not rows or rows[0][4] not in self.versions:
            return None
        unit, experiment, arm, share, library, upstream = rows[0]
        return Assignment(unit, experiment, arm, share, self.versions[library], upstream or "")

    def _draw(self, unit: str) -> Assignment:
        holdout = self.settings.holdout
        u = draw(self.secret, self.experiment or "base", unit) if holdout or self.share else 1.0
        # The holdout is drawn without the experiment, so that it stays the same people.
        if holdout and draw(self.secret, "holdout", unit) < holdout:
            return Assignment(unit, self.experiment, "holdout", self.share, EMPTY)
        if self.candidate is not None and u < self.share:
            return Assignment(unit, self.experiment, "candidate", self.share, self.candidate)
        return Assignment(unit, self.experiment, "current", self.share, self.current)


def _unit(ext: Extensions, response_id: str) -> str:
    if ext.session_id:
        return f"s:{ext.session_id}"
    return f"t:{ext.task_id}" if ext.task_id else f"r:{response_id}"
