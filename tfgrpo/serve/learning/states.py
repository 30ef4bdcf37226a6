"""Where a route's learning stands: a pure fold of its transitions.

    collecting → proposing → gating → waiting → canary → watched (promoted)
         ↑           │          │        │         │         │
         └───────────┴──────────┴────────┴── rejected, rolled back, expired
    any → frozen (a person) · canary → paused → canary

Nothing that a model or user wrote reaches live prompts before the event `approve`, which only a
person gives unless the route says `approve = "never"`. Every event carries the version it was meant
for; a stale one is refused, so two people, or a person and the job, never act on different states.

Does not know HTTP, statistics or libraries. Source: own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from tfgrpo.serve.wire.errors import ApiError

__all__ = ["EVENTS", "LearningState", "Transition", "apply", "fold"]

Name = Literal[
    "collecting", "proposing", "gating", "waiting", "canary", "paused", "watched", "frozen"
]

_UNFROZEN = ("collecting", "proposing", "gating", "waiting", "canary", "paused", "watched")
EVENTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        # event: {state it is allowed in: state after it}
        "propose": {"collecting": "proposing", "watched": "proposing"},
        "proposed": {"proposing": "gating"},
        "failed": {"proposing": "collecting", "gating": "collecting"},
        "gated": {"gating": "waiting"},
        "refused": {"gating": "collecting"},
        "approve": {"waiting": "canary", "canary": "canary"},
        "reject": {"waiting": "collecting", "canary": "collecting", "paused": "collecting"},
        "expire": {"waiting": "collecting", "canary": "collecting", "paused": "collecting"},
        "grow": {"canary": "canary"},
        "promote": {"canary": "watched"},
        "roll_back": {"canary": "collecting", "paused": "collecting", "watched": "collecting",
                      "collecting": "collecting"},
        "pause": {"canary": "paused"},
        "resume": {"paused": "canary"},
        "alarm": {"watched": "watched"},
        "rest": {"watched": "collecting"},
        "freeze": dict.fromkeys(_UNFROZEN, "frozen"),
        "thaw": {"frozen": "collecting"},
    }
)  # fmt: skip
"""What may happen when."""
KEPT_VERSIONS = 20
"""Libraries that can be rolled back to."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One event."""

    at: float
    version: int
    event: str
    who: str
    """`job`, `person` or `start`."""
    reason: str
    body: Mapping[str, Any] = field(default_factory=dict)
    """Evidence: candidate, share, figures."""


@dataclass(frozen=True, slots=True)
class LearningState:
    """What the transitions add up to."""

    name: str = "collecting"
    version: int = 0
    """How many transitions there were."""
    since: float = 0.0
    reason: str = ""
    current: str = ""
    """Version of the library in force; empty: the configured one."""
    candidate: str = ""
    number: int = 0
    """How many candidates were tested live so far, this one included."""
    experiment: str = ""
    share_index: int = 0
    approvals: int = 0
    """How often a person agreed to this candidate."""
    failures: int = 0
    """Proposals in a row that came to nothing."""
    used_groups: int = 0
    """Informative groups that proposals have used."""
    previous: tuple[str, ...] = ()
    """Libraries that were in force before, the newest last."""


def apply(state: LearningState, transition: Transition) -> LearningState:
    """Return the state after an event.

    Raises:
        ApiError: 409, the event is not allowed in this state or was meant for another version.
    """
    if transition.version != state.version + 1:
        raise ApiError(
            "version_conflict",
            f"the learning state is at version {state.version}; this was meant for "
            f"{transition.version - 1}: look again",
        )
    allowed = EVENTS.get(transition.event)
    if allowed is None or state.name not in allowed:
        raise ApiError(
            "version_conflict", f"{transition.event!r} is not possible while {state.name}"
        )
    after = replace(
        state,
        name=allowed[state.name],
        version=transition.version,
        since=transition.at,
        reason=transition.reason,
    )
    return _changed(after, state, transition)


def _changed(after: LearningState, before: LearningState, given: Transition) -> LearningState:
    body, event = given.body, given.event
    if event == "propose":
        return replace(after, used_groups=int(body.get("groups", before.used_groups)))
    if event == "proposed":
        return replace(after, candidate=str(body["candidate"]), approvals=0)
    if event == "failed":
        counted = 0 if body.get("is_interrupted") else 1
        return replace(after, candidate="", failures=before.failures + counted)
    if event == "gated":
        return replace(after, failures=0)
    if event == "approve":
        return _approved(after, before)
    if event == "grow":
        return replace(after, share_index=before.share_index + 1)
    if event == "promote":
        return _in_force(_without_candidate(after), before, before.candidate)
    if event == "roll_back":
        return _rolled_back(after, before)
    if event in ("reject", "expire", "refused", "freeze"):
        return _without_candidate(after)
    return after


def _approved(after: LearningState, before: LearningState) -> LearningState:
    if before.name == "canary":  # agreed to the promotion, where that is asked for
        return replace(after, approvals=before.approvals + 1)
    number = before.number + 1
    return replace(after, approvals=1, number=number, experiment=f"x{number}", share_index=0)


def _without_candidate(state: LearningState) -> LearningState:
    return replace(state, candidate="", experiment="", share_index=0, approvals=0)


def _in_force(after: LearningState, before: LearningState, version: str) -> LearningState:
    previous = (*before.previous, before.current)[-KEPT_VERSIONS:]
    return replace(after, current=version, previous=previous)


def _rolled_back(after: LearningState, before: LearningState) -> LearningState:
    """A candidate under test goes; without one, the library before the one in force returns."""
    if before.candidate:
        return _without_candidate(after)
    if not before.previous:
        raise ApiError("version_conflict", "there is no earlier library to go back to")
    return replace(after, current=before.previous[-1], previous=before.previous[:-1])


def fold(transitions: Iterable[Transition]) -> LearningState:
    """Return the state that transitions add up to, oldest first."""
    state = LearningState()
    for transition in transitions:
        state = apply(state, transition)
    return state
