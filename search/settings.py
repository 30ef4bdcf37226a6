"""How a search is driven, and what it returns.

Does not know asyncio, models or tools. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.errors import ConfigError, TfgrpoError
from tfgrpo.rollout import Task, Usage
from tfgrpo.search.node import Node
from tfgrpo.search.state import Merge, SearchState

if TYPE_CHECKING:
    import asyncio

    from tfgrpo.protocols import Verifier
    from tfgrpo.search.environments.protocol import Environment
    from tfgrpo.search.event_log import EventLog
    from tfgrpo.search.proposers.expander import Expander
    from tfgrpo.search.scorers.scorer import Scorer

__all__ = ["SearchJob", "SearchResult", "SearchSettings"]


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How a search is driven."""

    samples: int = 8
    """Samples a visit draws where the algorithm does not say; at most as many children."""
    mode: Literal["deterministic", "fast"] = "deterministic"
    concurrency: int = 8
    """Visits whose work may run at the same time."""
    lookahead: int = 0
    """Visits open at once in deterministic mode; 0 takes the algorithm's own."""
    execution: Literal["lazy", "eager"] = "lazy"
    merge: Merge = "off"
    verify: Literal["after", "during"] = "after"
    """Whether a verifier may steer the search. `during` uses the answer key while searching: right
    for making training data, never for a benchmark."""
    verifier_timeout_s: float = 120.0
    """Wall time of one verification, seconds."""
    patience: int | None = None
    """Stop after this many expansions without a better best node."""
    max_failures: int = 8
    """Stop after this many visits in a row whose model call failed."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "concurrency", "max_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: give at least 1")
        if self.merge != "off" and self.execution != "eager":
            raise ConfigError(
                f"merge={self.merge!r} needs execution='eager': equal states are known only once "
                "the children's actions have run"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return what fixes the tree; concurrency does not in deterministic mode."""
        names = ("samples", "mode", "lookahead", "execution", "merge", "verify", "patience")
        row = {name: getattr(self, name) for name in names}
        return row | {"seed": self.seed}


@dataclass(frozen=True, slots=True)
class SearchJob:
    """What one search works on and with."""

    task: Task
    expander: Expander
    environment: Environment
    scorer: Scorer
    settings: SearchSettings = SearchSettings()
    context: Context = EMPTY_CONTEXT
    verifier: Verifier | None = None
    """Judges finished paths during the search where the settings say so."""
    log: EventLog | None = None
    """Where events go; a log with events is continued."""
    cancel: asyncio.Event | None = None
    """Set it to stop with the best so far."""
    on_commit: Callable[[SearchState], None] | None = None
    """Called after each commit, for live views; must be quick."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found, whether it ended or was stopped."""

    fold: SearchState
    task: Task
    stop_reason: str
    """`goal`, `exhausted`, `converged`, `patience`, `cancelled`, `budget: RESOURCE`,
    `provider: KIND`, or the algorithm's own."""
    best: Node
    usage_by_role: dict[str, Usage]
    counters: dict[str, int]
    """visits, expansions, nodes, tool_calls, replayed_steps, merged_siblings, merged_states,
    unscored_visits, cut_proposals."""
    spent: dict[str, float]
    error: TfgrpoError | None = None
    """What stopped it, where that was a failure."""

    @property
    def plan(self) -> list[Any]:
        """Actions of the best path."""
        return self.fold.tree.plan(self.best)

    @property
    def is_solved(self) -> bool:
        """True when the best node is a goal."""
        return self.best.is_goal and self.best.status == "terminal"

    @property
    def frontier(self) -> list[Node]:
        """Nodes generated and not yet worked on."""
        return self.fold.tree.with_status("open", "in_flight")

    @property
    def usage(self) -> Usage:
        """Everything together."""
        return sum(self.usage_by_role.values(), Usage())
