"""Rollouts of several turns that branch after a tool's answer, as hint schedulers.

A branch keeps the turns before its fork with their tokens and takes the next turn anew. ARPO
branches where the first tokens after an answer are more uncertain than the rollout's first ones;
PORTool's tree forks breadth first. What is missing is rolled freshly, so a group has its size.

Does not know tools or tokens. Sources: ARPO, released code dongguanting/ARPO (entropies averaged
here, no table kept between batches, missing rollouts fresh instead of copied); uncertainty is the
mean surprise of the sampled tokens, whose mean is their entropy, in place of the ten likeliest.
PORTool, abstract and summary (approximation: how forks share the budget is ours).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tfgrpo.hint_plan import HintPlan, PlannedGroup
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.rl.strategy_options import ArpoOptions, TurnTreeOptions
from tfgrpo.rollout import Rollout, RolloutGroup, Step, Task
from tfgrpo.runtime.canonical import derive_seed


def uncertainty(step: Step, tokens: int, vocabulary: int) -> float:
    """Return the mean surprise of a turn's first tokens over log V; 0 where none are known."""
    logps = (step.logprobs or ())[:tokens]
    return -math.fsum(logps) / len(logps) / math.log(vocabulary) if logps else 0.0


def branch_chance(options: ArpoOptions, first: float, now: float) -> float:
    """Return the chance of a branch where uncertainty went from `first` to `now`.

    >>> branch_chance(ArpoOptions(), 0.1, 0.6), branch_chance(ArpoOptions(p=1.0), 0.1, 0.9)
    (0.6, 1.0)
    """
    return min(1.0, max(0.0, options.p + options.w * (now - first)))


def branch_plan(rollout: Rollout, turn: int, number: int) -> HintPlan:
    """Return the plan of one branch that takes the turn of this number anew."""
    return HintPlan(n=1, level=number, replay=rollout.steps[:turn])


def places_of(made: Sequence[PlannedGroup]) -> Iterator[tuple[Rollout, int]]:
    """Yield each turn that follows an answer and is its rollout's own: where a branch may fork."""
    for one in made:
        for rollout in one.group.rollouts:
            for turn in range(len(one.plan.replay) + 1, len(rollout.steps)):
                if rollout.steps[turn - 1].observations:
                    yield rollout, turn


class _Branching(RecordedScheduler):
    """What both share: a group of its size, in rounds."""

    def __init__(self) -> None:
        self.record = Record()
        self._sizes: dict[str, int] = {}
        """Group sizes of visits that are open."""

    def _begin(self, task: Task, group_size: int, first: int) -> Sequence[HintPlan]:
        self._sizes[task.task_id] = group_size
        return [HintPlan(n=min(first, group_size))]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return further branches, or what is missing as fresh rollouts."""
        size = self._sizes[task.task_id]
        room = size - sum(len(one.group.rollouts) for one in made)
        if room < 1:
            return ()
        known = [one.plan for one in made]
        wanted = [plan for plan in self._wanted(task, made) if plan not in known]
        return wanted[:room] or [HintPlan(n=room)]

    def _wanted(self, task: Task, made: Sequence[PlannedGroup]) -> list[HintPlan]:
        raise NotImplementedError

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return all rollouts as one group."""
        first = made[0].group
        rollouts = [r for one in made for r in one.group.rollouts]
        numbered = tuple(replace(r, sample_index=i) for i, r in enumerate(rollouts))
        group = replace(first, rollouts=numbered) if len(made) > 1 else first
        self.record.close(made, made[0].plan, group)
        self._sizes.pop(task.task_id, None)
        return group


class Arpo(_Branching):
    """Branches where the turn after an answer is uncertain (see the module).

    Args:
        options: constants.
        vocabulary: number of tokens.
        seed: fixes the chances.
    """

    name = "arpo"

    def __init__(self, options: ArpoOptions, vocabulary: int, seed: int = 0) -> None:
        super().__init__()
        self._options = options
        self._vocabulary = vocabulary
        self._seed = seed

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the rollouts from the start."""
        return self._begin(task, group_size, self._options.first or math.ceil(group_size / 2))

    def _wanted(self, task: Task, made: Sequence[PlannedGroup]) -> list[HintPlan]:
        o, visit = self._options, self.record.of(task.task_id).visits
        found = []
        for rollout, turn in places_of(made):
            first = uncertainty(rollout.steps[0], o.tokens, self._vocabulary)
            now = uncertainty(rollout.steps[turn], o.tokens, self._vocabulary)
            chance = branch_chance(o, first, now)
            for number in range(1, o.beam + 1):
                draw = derive_seed("arpo", self._seed, visit, rollout.rollout_id, turn, number)
                if draw / 2**31 < chance:
                    found.append(branch_plan(rollout, turn, number))
        return found


class TurnTree(_Branching):
    """Forks breadth first (see the module).

    Args:
        options: shape.
    """

    name = "turn_tree"

    def __init__(self, options: TurnTreeOptions) -> None:
        super().__init__()
        self._options = options

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the rollouts from the start."""
        return self._begin(task, group_size, self._options.first)

    def _wanted(self, task: Task, made: Sequence[PlannedGroup]) -> list[HintPlan]:
        o = self._options
        places = [(turn, i, rollout) for i, (rollout, turn) in enumerate(places_of(made))]
        ordered = sorted((p for p in places if p[0] < o.depth), key=lambda p: p[:2])
        return [
            branch_plan(rollout, turn, number)
            for turn, _, rollout in ordered
            for number in range(1, o.factor)
        ]
