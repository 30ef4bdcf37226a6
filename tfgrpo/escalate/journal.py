"""What an escalation has drawn, kept in a journal of its own, so that nothing is drawn twice.

A stage's groups are found again by stage and arm; a stage that was cut is drawn anew as a whole.
Decisions (plan, looks, choice) stand beside them. The lock keeps a second escalation out.

Does not know what is drawn. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tfgrpo.errors import VerifierError
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.store import Budget, Journal

Draws = Callable[[], list[RolloutGroup]]


class EscalationJournal:
    """The journal in the escalation's folder.

    Args:
        folder: made where it does not exist.
        config: the run's settings and those of the escalation; a resume must have the same.
        verifier_id: kept with the groups.
        budget: caps on what a judge's LM may use in the whole escalation.

    Raises:
        ConfigError: the folder holds an escalation with other settings or of another run.
        StoreError: it is in use, or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        verifier_id: str,
        budget: Budget | None = None,
    ) -> None:
        self.store = Journal.open(folder, create=True, config=config, budget=budget)
        self._verifier_id = verifier_id

    def drawn(self, stage: str, arm: str, tasks: Sequence[Task], draw: Draws) -> list[RolloutGroup]:
        """Return a stage's groups, one a task in order: those kept, or fresh ones.

        Raises:
            VerifierError: nothing of a fresh stage could be graded.
        """
        found = {g.task.task_id: g for g in self.store.groups(stage) if g.metadata["arm"] == arm}
        if all(t.task_id in found for t in tasks):
            return [found[t.task_id] for t in tasks]
        groups = draw()
        if not any(g.graded for g in groups):
            errors = [r.error for g in groups for r in g.rollouts if r.error]
            raise VerifierError(
                f"escalate, {stage} groups of {arm!r}: nothing could be graded; the first cause: "
                f"{errors[0] if errors else 'no rollouts'}"
            )
        known = {"stage": stage, "arm": arm, "verifier_id": self._verifier_id}
        groups = [replace(g, metadata={**g.metadata, **known}) for g in groups]
        for group in groups:
            self.store.record_group(group)
        return groups

    def decide(self, kind: str, payload: Mapping[str, Any], key: str) -> None:
        """Keep a decision."""
        self.store.record_decision(kind, dict(payload), key=key)

    def decided(self, kind: str) -> dict[str, Any]:
        """Return the newest decision of a kind for each key."""
        return dict(self.store.decisions(kind))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.store.__exit__(kind, error, trace)
