"""How large the groups of a step are: an allocator is asked, and what it says is checked.

The seam between rollout budgets and whoever samples: learning and training both go through it.

    sizes = GroupSizes(allocate, tasks, history, budget)
    groups = roll(tasks, sizes.now)
    while sizes.grow(groups):
        groups = roll(tasks, sizes.now)       the same groups, larger, and perhaps new ones

Does not know who rolls, or how an allocator decides. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfgrpo.errors import ConfigError
from tfgrpo.protocols import Allocator, GrowingAllocator
from tfgrpo.rollout import RolloutGroup, Task

__all__ = ["GroupSizes"]


class GroupSizes:
    """Rollouts of each task of one step; only a `GrowingAllocator` changes them after the first.

    Args:
        allocate: decides.
        tasks: the candidates, in order.
        history: groups of earlier steps.
        budget: rollouts of the step at most.

    Raises:
        ConfigError: the allocator breaks its contract.
    """

    def __init__(
        self,
        allocate: Allocator,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        budget: int,
    ) -> None:
        self._allocate, self._tasks = allocate, list(tasks)
        self._history, self._budget = list(history), budget
        self.now = self._checked(allocate(tasks, history, budget), [0] * len(tasks))
        """Rollouts a task in all, in the order of the tasks."""

    def grow(self, groups: Sequence[RolloutGroup]) -> bool:
        """Ask again with the step's groups so far; return whether any task gets more.

        Raises:
            ConfigError: the allocator breaks its contract.
        """
        if not isinstance(self._allocate, GrowingAllocator):
            return False
        given = self._allocate.grow(self._tasks, self._history, groups, self.now, self._budget)
        before, self.now = self.now, self._checked(given, self.now)
        return self.now != before

    def _checked(self, given: Sequence[int], least: Sequence[int]) -> list[int]:
        fits = len(given) == len(self._tasks) and sum(given) <= self._budget
        if not fits or any(new < old for new, old in zip(given, least, strict=True)):
            raise ConfigError(
                f"the allocator gave {list(given)!r:.120} for {len(self._tasks)} tasks and a "
                f"budget of {self._budget}: one number a task is needed, none negative or below "
                "what the task has already, at most the budget in all"
            )
        return [int(n) for n in given]
