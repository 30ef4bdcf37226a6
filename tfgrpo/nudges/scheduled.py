"""A given `HintScheduler` as a method: the schedulers of training work here without training.

It sees each practice group as a bare one. Where it starts a failed task with a hint, that hint is
rolled; otherwise it is told of the failure and asked for the next. Its state lives as long as the
run's process: a resume runs the same steps again and brings a fresh scheduler to the same state.
Source: own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tfgrpo.context import ContextPart
from tfgrpo.errors import ConfigError
from tfgrpo.nudge_settings import NudgeConfig
from tfgrpo.nudges.plan import Nudge, Seen, has_failed
from tfgrpo.protocols import HintScheduler
from tfgrpo.rollout import RolloutGroup


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
        self._plans: dict[str, Any] = {}
        self.books: Counter[str] = Counter()

    async def prepare(self, seen: Seen) -> None:
        """Tell of ended epochs and of the groups that need no help."""
        if self._epoch is not None and seen.epoch != self._epoch:
            self._scheduler.epoch_end()
        self._epoch = seen.epoch
        for group in seen.groups:
            if group.rewards_G and not has_failed(group, self._config.success_above):
                self._scheduler.start(group.task)
                self._scheduler.after(group.task, None, group)

    def next(self, tried: Sequence[RolloutGroup], epoch: int) -> Nudge | None:
        """Return the scheduler's next plan.

        Raises:
            ConfigError: it returned something that is no plan for a prompt.
        """
        rounds = self._config.most_rounds
        if rounds is not None and len(tried) > rounds:
            return None
        task = tried[0].task
        if len(tried) == 1:
            plan = self._scheduler.start(task)
            if plan is None:
                plan = self._scheduler.after(task, None, tried[0])
        else:
            plan = self._scheduler.after(task, self._plans[task.task_id], tried[-1])
        if plan is None:
            return None
        self._plans[task.task_id] = plan
        return Nudge((part_of(plan),), getattr(plan, "n", None))


def part_of(plan: Any) -> ContextPart:
    """Return a scheduler's plan as a part of a context.

    Args:
        plan: a `ContextPart`; or a record with `part()`; or one with `text`, and perhaps `source`
            and `level`.

    Raises:
        ConfigError: none of these, or no text.
    """
    if isinstance(plan, ContextPart):
        return plan
    part = plan.part() if callable(getattr(plan, "part", None)) else None
    if isinstance(part, ContextPart):
        return part
    text = getattr(plan, "text", "")
    if isinstance(text, str) and text:
        source, level = getattr(plan, "source", "given"), getattr(plan, "level", 1)
        return ContextPart("hint", text, source=f"hint:{source}:{level}")
    raise ConfigError(
        f"the scheduler's plan is a {type(plan).__name__} without help for a prompt: return a "
        "ContextPart, or a record with text; None means no help"
    )
