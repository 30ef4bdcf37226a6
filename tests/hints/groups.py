"""Tasks and groups by reward, and a loop that drives a scheduler as the rollout maker does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfgrpo.context import EMPTY_CONTEXT
from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup
from tfgrpo.protocols import HintScheduler
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task

SOLUTION = "First add the tens, then add the ones, then carry what is over and read it off."


def task(task_id: str = "t", **metadata: object) -> Task:
    return Task(task_id, "What is 17 + 25?", reference="42", metadata=metadata)


def hinted_task(task_id: str = "t", n: int = 3) -> Task:
    return task(task_id, hints=[f"hint {i} of {task_id}" for i in range(1, n + 1)])


def group(
    of: Task, rewards: Sequence[float | None], plan: HintPlan = BARE, number: int = 0
) -> RolloutGroup:
    """A group with these rewards; None is a rollout that was not graded."""
    rollouts = []
    for i, reward in enumerate(rewards):
        rollout = Rollout(f"{of.task_id}-{number}-{i}", of.task_id, sample_index=i)
        if reward is None:
            rollouts.append(rollout.failed("verifier_failed", "no score"))
        else:
            rollouts.append(rollout.graded(Score(reward)))
    part = plan.part()
    context = EMPTY_CONTEXT if part is None else EMPTY_CONTEXT.with_parts(part)
    return RolloutGroup(f"g{number}", of, tuple(rollouts), context)


def rounds(
    scheduler: HintScheduler,
    of: Task,
    rewards_of: Callable[[HintPlan], Sequence[float | None]],
    group_size: int = 4,
) -> tuple[list[list[HintPlan]], RolloutGroup]:
    """Visit a task as the rollout maker does; return the plans of each round and what is accepted.

    A plan's group has as many of the rewards as the plan asks for.
    """
    made: list[PlannedGroup] = []
    asked = [list(scheduler.start(of, group_size))]
    while asked[-1]:
        for plan in asked[-1]:
            rewards = rewards_of(plan)[: plan.n or None]
            made.append(PlannedGroup(plan, group(of, rewards, plan, len(made))))
        asked.append(list(scheduler.after(of, made)))
    return asked[:-1], scheduler.accept(of, made)


def visit(
    scheduler: HintScheduler,
    of: Task,
    rewards_at: Callable[[int], Sequence[float | None]],
) -> list[int]:
    """Visit a task; return the levels tried in order."""
    asked, _ = rounds(scheduler, of, lambda plan: rewards_at(plan.level))
    return [plan.level for plans in asked for plan in plans]


def solved_from(level: int, size: int = 4) -> Callable[[int], list[float | None]]:
    """One success of `size` at this level and above."""
    return lambda at: [1.0 if at >= level and i == 0 else 0.0 for i in range(size)]
