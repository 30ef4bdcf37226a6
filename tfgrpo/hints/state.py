"""Per-task state of a scheduler and the figures that are always kept, as JSON.

Does not know methods. Idea: levels stored per task (SAGE-light's released code); counting only
bare rollouts in the accuracy without hints is own, as is the reliance reading below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

from tfgrpo.errors import StoreError
from tfgrpo.hint_plan import HintPlan, PlannedGroup
from tfgrpo.rollout import RolloutGroup

EMA = 0.7
"""Weight of the past in a task's running accuracy."""


@dataclass(slots=True)
class TaskState:
    """What a scheduler remembers of one task."""

    level: int = 0
    """Where the next visit starts, or the last level that worked; the method says which."""
    visits: int = 0
    """Accepted groups."""
    attempts: int = 0
    """Groups rolled, those that were not accepted included."""
    accuracy: float | None = None
    """Share of successes in the last accepted group."""
    accuracy_ema: float | None = None
    """The same, smoothed over visits."""


@dataclass(slots=True)
class Record:
    """States of all tasks and counts over the run."""

    success_above: float = 0.0
    """A rollout with a larger reward is a success."""
    tasks: dict[str, TaskState] = field(default_factory=dict)
    epoch: int = 0
    accepted: dict[str, int] = field(default_factory=dict)
    """Accepted groups by level."""
    informative: dict[str, int] = field(default_factory=dict)
    """Accepted groups whose rewards differ, by level."""
    rollouts: int = 0
    bare_rollouts: int = 0
    """Graded rollouts without help."""
    bare_successes: int = 0
    accepted_rollouts: int = 0
    level_ema: float | None = None
    """Level of accepted groups, smoothed over the run's last dozen or so."""
    drift_ema: float = 0.0
    """Levels that a task's accepted group moved since its visit before, smoothed likewise."""
    written: dict[str, float] = field(default_factory=dict)
    """Figures of writing the hints beforehand, such as `parse_rate`."""

    def of(self, task_id: str) -> TaskState:
        """Return a task's state; one that was never visited has a fresh one, which is not kept."""
        return self.tasks.get(task_id) or TaskState()

    def successes(self, group: RolloutGroup) -> int:
        """Return how many rollouts succeeded."""
        return sum(r > self.success_above for r in group.rewards_G)

    def has_failed(self, group: RolloutGroup) -> bool:
        """True when something was graded and nothing succeeded; no verdict is no failure."""
        return bool(group.rewards_G) and self.successes(group) == 0

    def close(self, made: Sequence[PlannedGroup], plan: HintPlan, group: RolloutGroup) -> TaskState:
        """Count a visit: all that was made, and the group that is trained on under its plan."""
        self.tasks.setdefault(group.task.task_id, TaskState())
        for one in made:
            self._rolled(one.plan, one.group)
        self._accepted(plan, group)
        return self.of(group.task.task_id)

    def _rolled(self, plan: HintPlan, group: RolloutGroup) -> None:
        self.rollouts += len(group.rollouts)
        if plan.is_bare:
            self.bare_rollouts += len(group.rewards_G)
            self.bare_successes += self.successes(group)
        self.of(group.task.task_id).attempts += 1

    def _accepted(self, plan: HintPlan, group: RolloutGroup) -> None:
        level = str(plan.level)
        past = self.level_ema
        self.level_ema = plan.level if past is None else 0.9 * past + 0.1 * plan.level
        self.accepted[level] = self.accepted.get(level, 0) + 1
        self.accepted_rollouts += len(group.rollouts)
        if group.is_informative():
            self.informative[level] = self.informative.get(level, 0) + 1
        state = self.of(group.task.task_id)
        if state.visits:
            self.drift_ema = 0.9 * self.drift_ema + 0.1 * (plan.level - state.level)
        state.visits += 1
        if group.rewards_G:
            now = self.successes(group) / len(group.rewards_G)
            before = state.accuracy_ema
            state.accuracy = now
            state.accuracy_ema = now if before is None else EMA * before + (1 - EMA) * now

    def figures(self) -> dict[str, float]:
        """Return what a report shows; shares are left out where nothing was counted."""
        made = {f"level_{k}": float(n) for k, n in sorted(self.accepted.items())}
        for name, levels in (("bare", ["0"]), ("hinted", [k for k in self.accepted if k != "0"])):
            total = sum(self.accepted.get(k, 0) for k in levels)
            if total:
                signal = sum(self.informative.get(k, 0) for k in levels)
                made[f"informative_share_{name}"] = signal / total
        if self.bare_rollouts:
            made["bare_accuracy"] = self.bare_successes / self.bare_rollouts
        groups = sum(self.accepted.values())
        if groups:
            made["extra_rollouts_per_group"] = (self.rollouts - self.accepted_rollouts) / groups
        return made | self.written

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Restore a record.

        Raises:
            StoreError: the state is not one that `to_dict` wrote.
        """
        if set(row) != {f.name for f in fields(cls)}:
            raise StoreError(
                f"hint state has the fields {sorted(row)}; this build writes "
                f"{sorted(f.name for f in fields(cls))}: the checkpoint is of another build"
            )
        values = dict(row)
        values["tasks"] = {k: TaskState(**v) for k, v in row["tasks"].items()}
        for name in ("accepted", "informative", "written"):
            values[name] = dict(row[name])
        return cls(**values)


def record_of(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the record in a scheduler's state.

    Raises:
        StoreError: the state is another scheduler's.
    """
    if state.get("name") != name:
        raise StoreError(
            f"the checkpoint's hint state is of {state.get('name')!r} and the run's scheduler is "
            f"{name!r}; restore hints.name or start a new run folder"
        )
    record: Mapping[str, Any] = state["record"]
    return record


class RecordedScheduler:
    """What schedulers share: a `Record`, counted epochs, and a state that resumes.

    `name` is the scheduler's own; a checkpoint of another one is refused.
    """

    name: ClassVar[str]
    record: Record

    def epoch_end(self) -> None:
        """Count the epoch."""
        self.record.epoch += 1

    def figures(self) -> dict[str, float]:
        """Return the record's figures."""
        return self.record.figures()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"name": self.name, "record": self.record.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state.

        Raises:
            StoreError: the state is another scheduler's.
        """
        self.record = Record.from_dict(record_of(state, self.name))


def reliance(hinted_logp_T: Sequence[float], bare_logp_T: Sequence[float]) -> float:
    """Return how much likelier a rollout's tokens are with the hint than without, nats a token.

    Approximation: our per-token reading of HiLL (arXiv 2604.00698). About 0 means that the policy
    could have written it alone; a large value is a success that may not carry over.

    Raises:
        ValueError: no tokens, or unequal lengths.

    >>> reliance([-1.0, -1.0], [-2.0, -1.5])
    0.75
    """
    if len(hinted_logp_T) != len(bare_logp_T) or not hinted_logp_T:
        raise ValueError(
            f"reliance needs one log-prob a token twice, got {len(hinted_logp_T)} with the hint "
            f"and {len(bare_logp_T)} without"
        )
    gains = (h - b for h, b in zip(hinted_logp_T, bare_logp_T, strict=True))
    return math.fsum(gains) / len(hinted_logp_T)
