"""A given `HintScheduler` as a method: the schedulers of training work here without training.

Every practice task is a visit. Where a scheduler asks for the bare task, the practice group is the
answer; help is asked for only where that group failed. A visit is accepted once, at the latest
before the next step. The scheduler's state lives as long as the process: a resume runs the same
steps again and brings a fresh scheduler to the same state. Source: own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup
from tfgrpo.nudge_settings import NudgeConfig
from tfgrpo.nudges.plan import Nudge, Seen, has_failed
from tfgrpo.protocols import HintScheduler
from tfgrpo.rollout import RolloutGroup


@dataclass(slots=True)
class _Visit:
    """One task in one step, as its scheduler sees it."""

    bare: RolloutGroup
    waiting: list[HintPlan] = field(default_factory=list)
    made: list[PlannedGroup] = field(default_factory=list)
    now: HintPlan = BARE
    """The plan that is being rolled."""


class Scheduled:
    """A `NudgeMethod` that asks a scheduler.

    Args:
        config: rounds, what a failure is.
        scheduler: a fresh one, without groups of an earlier run.
    """

    def __init__(self, config: NudgeConfig, scheduler: HintScheduler) -> None:
        self._config = config
        self._scheduler = scheduler
        self._epoch: int | None = None
        self._plans: dict[str, list[HintPlan]] = {}
        """Per task, the plan of each group tried in this step."""
        self.books: Counter[str] = Counter()

    async def prepare(self, seen: Seen) -> None:
        """Tell of ended epochs and of the groups that need no help."""
        if self._epoch is not None and seen.epoch != self._epoch:
            self._scheduler.epoch_end()
        self._epoch = seen.epoch
        for group in seen.groups:
            if group.rewards_G and not has_failed(group, self._config.success_above):
                self._scheduler.accept(group.task, [PlannedGroup(BARE, group)])

    def next(self, tried: Sequence[RolloutGroup], epoch: int) -> Nudge | None:
        """Return the scheduler's next plan whose help stands in the prompt; None where the visit
        is over, of which the scheduler is told."""
        task = tried[0].task
        plans = self._plans.setdefault(task.task_id, []) if len(tried) > 1 else []
        self._plans[task.task_id] = plans = plans or [BARE]
        made = [PlannedGroup(p, g) for p, g in zip(plans, tried, strict=True)]
        rounds = self._config.most_rounds
        if rounds is None or len(tried) <= rounds:
            asked = [
                *(self._scheduler.start(task, len(tried[0].rollouts)) if len(tried) == 1 else ()),
                *self._scheduler.after(task, made),
            ]
            for plan in asked:
                if plan.text:
                    plans.append(plan)
                    return Nudge(tuple(p for p in [plan.part()] if p), plan.n)
        self._scheduler.accept(task, made)
        return None
