"""A search log back to where it stopped: the tree by folding, and the visits that were running.

Works in both modes, because the log says in which order visits were selected and committed.
Does not know asyncio or budgets. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Usage
from tfgrpo.search.algorithms.protocol import VisitRequest
from tfgrpo.search.environments.protocol import StepResult
from tfgrpo.search.event_log import LOG_VERSION, EventLog, check_version
from tfgrpo.search.node import NodeScore, Proposal
from tfgrpo.search.state import SearchState, VisitResult

__all__ = ["Pending", "begin_or_replay", "fold_events"]


@dataclass(slots=True)
class Pending:
    """A visit that was selected, with what had arrived of it."""

    number: int
    work: VisitRequest
    visit: VisitResult = field(default_factory=VisitResult)


def begin_or_replay(
    log: EventLog | None,
    created: Mapping[str, Any],
    fold: SearchState,
    on_commit: Callable[[Pending], None],
) -> list[Pending]:
    """Write the first event of a new log, or fold an old one; return the visits left open.

    Raises:
        ConfigError: the log belongs to another task, algorithm or settings.
    """
    if log is None:
        return []
    events = log.events()
    if not events:
        log.append({"event": "created", "version": LOG_VERSION, **created})
        return []
    check_version(events)
    for name, value in created.items():
        if events[0].get(name) != value:
            raise ConfigError(
                f"this search log was made with {name}={events[0].get(name)!r}, now it is "
                f"{value!r}: continue with the same, or start another log"
            )
    return fold_events(events, fold, on_commit)


def fold_events(
    events: list[dict[str, Any]],
    fold: SearchState,
    on_commit: Callable[[Pending], None] = lambda pending: None,
) -> list[Pending]:
    """Apply a log's events to a fresh fold; return the visits that were not committed."""
    open_visits: dict[int, Pending] = {}
    for event in events:
        kind = event["event"]
        if kind == "selected":
            work = VisitRequest(
                event["node"], event.get("k", 0), event.get("arm", 0), event.get("prefix", "")
            )
            chosen = fold.select()
            if chosen != work:
                raise ConfigError(
                    f"this search log cannot be continued: the algorithm now chooses {chosen}, "
                    f"the log says {work}. Use the algorithm and the options that wrote it"
                )
            open_visits[event["ticket"]] = Pending(event["ticket"], work)
        elif kind == "commit":
            pending = open_visits.pop(event["ticket"])
            on_commit(pending)
            fold.commit(pending.work, pending.visit)
        elif "ticket" in event:
            _take(open_visits[event["ticket"]], event, fold)
    return list(open_visits.values())


def _take(pending: Pending, event: Mapping[str, Any], fold: SearchState) -> None:
    visit, kind = pending.visit, event["event"]
    if kind == "executed":
        visit.outcome = StepResult.from_dict(event["outcome"])
        _take_tool(visit, visit.outcome)
    elif kind == "proposed":
        visit.proposals = [Proposal.from_dict(row) for row in event["proposals"]]
        _take_usage(visit, event)
    elif kind == "child":
        if visit.outcomes is None:
            node = fold.tree[pending.work.node]
            visit.outcomes = [None] * len(fold.provisional(node, visit.proposals or ()))
        outcome = StepResult.from_dict(event["outcome"])
        visit.outcomes[event["index"]] = outcome
        _take_tool(visit, outcome)
    elif kind == "scored":
        visit.scores = [NodeScore.from_dict(row) for row in event["scores"]]
        _take_usage(visit, event)
    elif kind == "verified":
        visit.reward = event["reward"]
    elif kind == "failed":
        visit.error = event["error"]
        _take_usage(visit, event)
    elif kind == "unscored":
        visit.gave_up |= {"score"}
        _take_usage(visit, event)
    elif kind == "unverified":
        visit.gave_up |= {"verify"}


def _take_tool(visit: VisitResult, outcome: StepResult) -> None:
    visit.tool_calls += outcome.tool_calls
    if outcome.usage.calls or outcome.usage.total_tokens:
        visit.spend("tool", outcome.usage)


def _take_usage(visit: VisitResult, event: Mapping[str, Any]) -> None:
    """The log keeps a visit's usage so far; tool usage is counted from the outcomes."""
    for role, row in event["usage"].items():
        if role != "tool":
            visit.usage[role] = Usage.from_dict(row)
