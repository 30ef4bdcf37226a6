"""POPE: hard tasks in two versions, with the beginning of a solution in the prompt and without.

A task alternates between visits that are guided and visits that are not; a guided visit looks for
the shortest beginning under which something succeeds and remembers it. The beginning is context,
never a target: gradients fall on generated tokens alone. Does not know who solved the tasks.

Source: POPE (arXiv 2601.18779), abstract and excerpts. Approximation: the rule for the length of
the beginning, the share of guided copies (1:1) and the instruction are our reading. The paper puts
both versions into the data; here one visit is one version, so that a step holds one group a task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup
from tfgrpo.hints.metadata import MetadataHints, PlansOf
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.prompts import render
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed


class Pope(RecordedScheduler):
    """A `HintScheduler` over beginnings of solutions.

    Args:
        plans_of: a task's beginnings, shortest first.
        max_level: longest beginning tried, at least 1.
        guided_share: share of a task's visits that are guided, in (0, 1]; tasks are out of phase,
            so that each epoch holds about this share of guided tasks.
        instruct: tell the policy to build on the beginning; False gives the beginning alone.
        success_above: a rollout with a larger reward is a success.
    """

    name = "pope"

    def __init__(
        self,
        plans_of: PlansOf | None = None,
        *,
        max_level: int = 4,
        guided_share: float = 0.5,
        instruct: bool = True,
        success_above: float = 0.0,
    ) -> None:
        self._plans_of = (
            plans_of
            if plans_of is not None
            # A hint written beforehand is no beginning, so only the solution is read.
            else MetadataHints(levels=max_level, hints_key="oracle_prefixes")
        )
        self._max_level = max_level
        self._share = guided_share
        self._instruct = instruct
        self.record = Record(success_above)

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the remembered beginning on a guided visit; the bare task on another."""
        plans = self._plans(task)
        state = self.record.of(task.task_id)
        if not plans or not is_guided(task.task_id, state.visits, self._share):
            return [BARE]
        level = max(1, state.level)
        return [next((p for p in plans if p.level >= level), plans[-1])]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return the next longer beginning where a guided group failed."""
        last = made[-1]
        if last.plan.is_bare or not self.record.has_failed(last.group):
            return ()
        longer = [p for p in self._plans(task) if p.level > last.plan.level]
        return longer[:1]

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return the last group. The next guided visit starts where a guided one ended, also
        where the longest beginning failed."""
        last = made[-1]
        state = self.record.close(made, last.plan, last.group)
        if not last.plan.is_bare:
            state.level = last.plan.level
        return last.group

    def _plans(self, task: Task) -> list[HintPlan]:
        plans = [p for p in self._plans_of(task) if p.level <= self._max_level]
        if not self._instruct:
            return plans
        return [replace(p, text=render("hint_partial", text=p.text)) for p in plans]


def is_guided(task_id: str, visit: int, share: float) -> bool:
    """Return whether a task's visit is guided: evenly spread, `share` of them in the long run.

    >>> sum(is_guided("t", v, 0.25) for v in range(400))
    100
    """
    # 2^-20 steps and not a float phase: a phase with rounding could lose a visit.
    phase = derive_seed("guided visit", task_id) % 2**20 / 2**20
    at = visit * share + phase
    return math.floor(at + share) > math.floor(at)


def hard_tasks(successes: Mapping[str, int], *, most: int = 0) -> tuple[str, ...]:
    """Return the ids of the tasks that succeeded at most `most` times, in order.

    POPE's hard set is `most=0` of 128 draws, QuestA's at most 4. Easy tasks beside hard ones slow
    the hard ones down ("ray interference"), so train on these alone.

    >>> hard_tasks({"a": 0, "b": 3, "c": 0})
    ('a', 'c')
    """
    return tuple(task_id for task_id, n in successes.items() if n <= most)
