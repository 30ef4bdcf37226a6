"""Examples: a failed task again behind solved rollouts of other practice tasks, as chat turns.

A task's own rollouts, and those of tasks with equal text, are never among its examples. They hold
answers of other tasks, which nobody made from this task's reference.

Source: ICPO, "Think Outside the Policy: In-Context Steered Policy Optimization" (abstract only, so
an approximation): demonstrations in context for part of the rollouts. The reward region in which
its expert rollouts are accepted is here success, as the verifier says; its bonus shapes a loss and
has no place. Which examples: the nearest by words (own).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tfgrpo.config.nudge import NudgeConfig
from tfgrpo.context import ContextPart
from tfgrpo.experience.exemplars import is_fit, rollout_exemplar
from tfgrpo.experience.similarity import jaccard, normal
from tfgrpo.nudges.method import Nudge, StepView, has_failed
from tfgrpo.rollout import Rollout, RolloutGroup, Task


class Examples:
    """A `NudgeMethod` with worked examples of other tasks.

    Args:
        config: how many, rounds, what a success is.
    """

    def __init__(self, config: NudgeConfig) -> None:
        self._config = config
        self._solved: dict[str, tuple[RolloutGroup, Rollout]] = {}
        self.books: Counter[str] = Counter()

    async def prepare(self, seen: StepView) -> None:
        """Keep the best solved rollout of each practice task."""
        self._solved = {}
        for group in seen.practised:
            rollout = solved(group, self._config.success_above)
            if rollout is not None:
                before = self._solved.get(group.task.task_id)
                if before is None or _rank(rollout) < _rank(before[1]):
                    self._solved[group.task.task_id] = (group, rollout)

    def next(self, tried: Sequence[RolloutGroup], epoch: int) -> Nudge | None:
        """Return the nearest examples not yet tried while the last group failed."""
        task, number = tried[0].task, len(tried) - 1
        rounds = self._config.most_rounds or 1
        if number >= rounds or not has_failed(tried[-1], self._config.success_above):
            return None
        shots = self._config.shots
        chosen = nearest(task, list(self._solved.values()))[number * shots : (number + 1) * shots]
        parts = tuple(
            ContextPart(
                "exemplar",
                turns=rollout_exemplar(group, rollout).turns,
                source=f"example:{group.task.task_id}",
            )
            for group, rollout in reversed(chosen)  # the nearest stands next to the task
        )
        return Nudge(parts) if parts else None


def solved(group: RolloutGroup, above: float) -> Rollout | None:
    """Return the best whole rollout of a group that succeeded, or None."""
    good = [
        r
        for r in group.graded
        if (r.reward or 0.0) > above and r.answer.strip() and not r.is_truncated
    ]
    return min((r for r in good if is_fit(r, group.task)), key=_rank, default=None)


def nearest(
    task: Task, pool: Sequence[tuple[RolloutGroup, Rollout]]
) -> list[tuple[RolloutGroup, Rollout]]:
    """Return the examples of other tasks, those that share most words with the task first."""
    own = normal(task.text)
    others = [
        (group, rollout)
        for group, rollout in pool
        if group.task.task_id != task.task_id and normal(group.task.text) != own
    ]
    return sorted(
        others,
        key=lambda pair: (-jaccard(task.text, pair[0].task.text, 1), pair[0].task.task_id),
    )


def _rank(rollout: Rollout) -> tuple[float, int, str]:
    return (-(rollout.reward or 0.0), len(rollout.answer), rollout.rollout_id)
