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

from tfgrpo.config.nudge import NudgeConfig
from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup
from tfgrpo.nudges.method import Nudge, StepView, has_failed
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
        group_size: told to the scheduler.
    """

    def __init__(self, config: NudgeConfig, scheduler: HintScheduler, group_size: int) -> None:
        self._config = config
        self._scheduler = scheduler
        self._group_size = group_size
        self._epoch: int | None = None
        self._open: dict[str, _Visit] = {}
        self.books: Counter[str] = Counter()

    async def prepare(self, seen: StepView) -> None:
        """Close what the last step left open, and tell of the groups that need no help."""
        for visit in list(self._open.values()):
            self._accept(visit)
        if self._epoch is not None and seen.epoch != self._epoch:
            self._scheduler.epoch_end()
        self._epoch = seen.epoch
        for group in seen.groups:
            if group.rewards_G and not has_failed(group, self._config.success_above):
                self._scheduler.start(group.task, self._group_size)
                self._accept(_Visit(group))

    def next(self, tried: Sequence[RolloutGroup], epoch: int) -> Nudge | None:
        """Return the scheduler's next plan.

        Raises:
            ConfigError: it wants to force the start of a response, or a text of the policy.
        """
        task, rounds = tried[0].task, self._config.most_rounds
        if len(tried) == 1:
            visit = _Visit(tried[0], list(self._scheduler.start(task, self._group_size)))
            self._open[task.task_id] = visit
        else:
            visit = self._open[task.task_id]
            visit.made.append(PlannedGroup(visit.now, tried[-1]))
        plan = self._plan(visit)
        if plan is None or (rounds is not None and len(tried) > rounds):
            self._accept(visit)
            return None
        part = plan.part()
        if plan.forces_prefix or plan.replay or part is None:
            raise ConfigError(
                f"the scheduler's plan for task {task.task_id!r} ({plan.label}) forces the start "
                "of a response: over an API help can only stand in the prompt, so take a scheduler "
                "whose plans have text alone"
            )
        visit.now = plan
        return Nudge((part,), plan.n)

    def _plan(self, visit: _Visit) -> HintPlan | None:
        """Return the next plan with help; for the bare task there is a group already."""
        while True:
            while visit.waiting:
                plan = visit.waiting.pop(0)
                if not plan.is_bare:
                    return plan
                visit.made.append(PlannedGroup(plan, visit.bare))
            asked = self._scheduler.after(visit.bare.task, tuple(visit.made))
            more = [plan for plan in asked if isinstance(plan, HintPlan)]
            if len(more) < len(asked):
                raise ConfigError(
                    f"the scheduler asks the policy for a text on task {visit.bare.task.task_id!r} "
                    "within a visit, which only the trainer's sampler can give: take a scheduler "
                    "whose hints are written beforehand"
                )
            if all(plan.is_bare for plan in more):  # the same group again would say nothing new
                return None
            visit.waiting = more

    def _accept(self, visit: _Visit) -> None:
        made = tuple(visit.made) or (PlannedGroup(BARE, visit.bare),)
        self._scheduler.accept(visit.bare.task, made)
        self._open.pop(visit.bare.task.task_id, None)
