"""SAGE: climb from the bare task until something succeeds; SAGE-light: move a level an epoch.

SAGE rolls a failed task again, whole, under a stronger hint until a rollout succeeds or the levels
are used up; the accepted group stands under one context. SAGE-light rolls each task once, at a
level kept for it, and moves the level by one after an epoch. Neither knows who wrote the hints.

Source: Self-Hinting Language Models Enhance Reinforcement Learning (arXiv 2602.03143) and its
released code (BaohaoLiao/SAGE). The paper's equation 13 climbs from the stored level, its
algorithm 1 and the code from the bare task at each visit (`restart`). SAGE-light's thresholds
differ too: the paper only raises, below 0.35; the released code raises at or below a low threshold
and lowers above 0.35. With hints cut from a solution into three levels SAGE's climb is GHPO's
(25, 50, 75 % of the characters).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfgrpo.context import ContextPart
from tfgrpo.errors import ConfigError
from tfgrpo.rl.hints.plan import level_of
from tfgrpo.rl.hints.record import Record, record_of
from tfgrpo.rl.hints.texts import MetadataHints, PlansOf
from tfgrpo.rollout import RolloutGroup, Task


class Sage:
    """A `HintScheduler` that climbs within a visit.

    Args:
        plans_of: a task's plans, weakest first.
        max_level: strongest level tried, at least 1.
        restart: each visit starts at the bare task; False starts at the last accepted level.
        success_above: a rollout with a larger reward is a success.
    """

    def __init__(
        self,
        plans_of: PlansOf | None = None,
        *,
        max_level: int = 3,
        restart: bool = True,
        success_above: float = 0.0,
    ) -> None:
        self._plans_of = plans_of if plans_of is not None else MetadataHints(levels=max_level)
        self._max_level = max_level
        self._restart = restart
        self.record = Record(success_above)

    def start(self, task: Task) -> ContextPart | None:
        """Return None (the bare task), or the stored level's hint."""
        plans = self._plans_of(task)  # read first, so that a task without help is told early
        level = 0 if self._restart else self.record.of(task.task_id).level
        at = [p for p in plans if p.level == level]
        return at[0].part() if at else None

    def after(
        self, task: Task, plan: ContextPart | None, group: RolloutGroup
    ) -> ContextPart | None:
        """Return the next stronger hint where all failed; None accepts the group."""
        state = self.record.rolled(plan, group)
        level = level_of(plan)
        if self.record.has_failed(group):
            for stronger in self._plans_of(task):
                if level < stronger.level <= self._max_level:
                    return stronger.part()
        state.level = level
        self.record.accept(plan, group)
        return None

    def epoch_end(self) -> None:
        """Count the epoch."""
        self.record.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"name": "sage", "record": self.record.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state.

        Raises:
            StoreError: the state is another scheduler's.
        """
        self.record = Record.from_dict(record_of(state, "sage"))


class SageLight:
    """A `HintScheduler` that rolls once a visit and moves a task's level after each epoch.

    Args:
        plans_of: a task's plans, weakest first.
        max_level: strongest level, at least 1.
        raise_at: an accuracy of at most this, in [0, 1], goes one level up. The paper's rule is
            "below 0.35", which is `raise_at` just under it with `lower_above` None.
        lower_above: an accuracy above this goes one level down; None never goes down.
        success_above: a rollout with a larger reward is a success.

    Raises:
        ConfigError: `lower_above` is below `raise_at`.
    """

    def __init__(
        self,
        plans_of: PlansOf | None = None,
        *,
        max_level: int = 3,
        raise_at: float = 0.0,
        lower_above: float | None = 0.35,
        success_above: float = 0.0,
    ) -> None:
        if lower_above is not None and lower_above < raise_at:
            raise ConfigError(
                f"hints.lower_above {lower_above} is below hints.raise_at {raise_at}: an accuracy "
                "between them would go both ways; make lower_above the larger one"
            )
        self._plans_of = plans_of if plans_of is not None else MetadataHints(levels=max_level)
        self._max_level = max_level
        self._raise_at = raise_at
        self._lower_above = lower_above
        self.record = Record(success_above)
        self._top: dict[str, int] = {}
        """Tasks graded in this epoch, and the strongest level there is for each."""

    def start(self, task: Task) -> ContextPart | None:
        """Return the hint of the task's level; None at level 0."""
        plans = self._plans_of(task)
        level = self.record.of(task.task_id).level
        at = [p for p in plans if p.level == level]
        return at[0].part() if at else None

    def after(
        self, task: Task, plan: ContextPart | None, group: RolloutGroup
    ) -> ContextPart | None:
        """Accept always; remember how it went."""
        self.record.rolled(plan, group)
        self.record.accept(plan, group)
        if group.rewards_G:
            strongest = max((p.level for p in self._plans_of(task)), default=0)
            self._top[task.task_id] = min(strongest, self._max_level)
        return None

    def epoch_end(self) -> None:
        """Move the levels of the tasks that were graded in this epoch."""
        for task_id, top in self._top.items():
            state = self.record.of(task_id)
            assert state.accuracy is not None  # `after` enters graded groups alone
            if state.accuracy <= self._raise_at:
                state.level = min(state.level + 1, top)
            elif self._lower_above is not None and state.accuracy > self._lower_above:
                state.level = max(state.level - 1, 0)
        self._top = {}
        self.record.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "name": "sage_light",
            "record": self.record.to_dict(),
            "this_epoch": dict(self._top),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state.

        Raises:
            StoreError: the state is another scheduler's.
        """
        self.record = Record.from_dict(record_of(state, "sage_light"))
        self._top = dict(state["this_epoch"])
