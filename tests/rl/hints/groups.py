"""Tasks and groups by reward, and a loop that drives a scheduler as the rollout maker does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfgrpo.context import EMPTY_CONTEXT, ContextPart
from tfgrpo.protocols import HintScheduler
from tfgrpo.rl.hints.plan import level_of
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task

SOLUTION = "First add the tens, then add the ones, then carry what is over and read it off."


def task(task_id: str = "t", **metadata: object) -> Task:
    return Task(task_id, "What is 17 + 25?", reference="42", metadata=metadata)


def hinted_task(task_id: str = "t", n: int = 3) -> Task:
    return task(task_id, hints=[f"hint {i} of {task_id}" for i in range(1, n + 1)])


def group(
    of: Task, rewards: Sequence[float | None], plan: ContextPart | None = None
) -> RolloutGroup:
    """A group with these rewards; None is a rollout that was not graded."""
    rollouts = []
    for i, reward in enumerate(rewards):
        rollout = Rollout(f"{of.task_id}-{level_of(plan)}-{i}", of.task_id, sample_index=i)
        if reward is None:
            rollouts.append(rollout.failed("verifier_failed", "no score"))
        else:
            rollouts.append(rollout.graded(Score(reward)))
    context = EMPTY_CONTEXT if plan is None else EMPTY_CONTEXT.with_parts(plan)
    return RolloutGroup("g", of, tuple(rollouts), context)


def visit(
    scheduler: HintScheduler,
    of: Task,
    rewards_at: Callable[[int], Sequence[float | None]],
) -> list[int]:
    """Visit a task as the rollout maker does; return the levels tried, the last one accepted."""
    plan = scheduler.start(of)
    levels = []
    while True:
        levels.append(level_of(plan))
        following = scheduler.after(of, plan, group(of, rewards_at(levels[-1]), plan))
        if following is None:
            return levels
        plan = following


def solved_from(level: int, size: int = 4) -> Callable[[int], list[float | None]]:
    """One success of `size` at this level and above."""
    return lambda at: [1.0 if at >= level and i == 0 else 0.0 for i in range(size)]
