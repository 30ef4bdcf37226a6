"""BREAD: the shortest expert prefix from which something succeeds, found by bisection.

Where all of a task's own rollouts fail, prefixes of an expert's solution are tried; rollouts then
branch from the shortest that works. Does not know how a prefix is forced.

Source: BREAD (arXiv 2506.17211), second hand. Approximation: bisection assumes that a longer
prefix is no harder; where chance breaks that, the result works but may not be the shortest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup
from tfgrpo.hints.metadata import steps_of
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.rollout import RolloutGroup, Task


@dataclass(frozen=True, slots=True)
class PrefixSearch:
    """Bisection over prefixes 1 … `n_prefixes`; the bare task (0) is known to fail.

    >>> search = PrefixSearch(4)
    >>> while (k := search.next()) is not None:
    ...     search = search.told(k, succeeded=k >= 3)
    >>> search.found, search.tries
    (3, 2)
    """

    n_prefixes: int
    fails: int = 0
    """Longest prefix known to fail."""
    works: int | None = None
    """Shortest prefix known to work."""
    tries: int = 0

    def next(self) -> int | None:
        """Return the prefix to try, or None when the search is over."""
        top = self.n_prefixes + 1 if self.works is None else self.works
        return (self.fails + top) // 2 if top - self.fails > 1 else None

    def told(self, prefix: int, *, succeeded: bool) -> PrefixSearch:
        """Return the search after a try.

        Raises:
            ConfigError: the prefix is not the one that `next` named.
        """
        if prefix != self.next():
            raise ConfigError(f"prefix {prefix} was tried; the search asked for {self.next()}")
        if succeeded:
            return replace(self, works=prefix, tries=self.tries + 1)
        return replace(self, fails=prefix, tries=self.tries + 1)

    @property
    def found(self) -> int | None:
        """The shortest prefix that worked, once the search is over; None where none did."""
        return self.works if self.next() is None else None


def branch_plan(steps: Sequence[str], prefix: int, *, n: int | None = None) -> HintPlan:
    """Return the plan that branches n rollouts after the first `prefix` steps of an expert.

    The expert's steps are not trained on; log-probs of what follows stand under the original
    prompt and the prefix.

    Raises:
        ConfigError: `prefix` is not in 1 … len(steps) − 1: the whole solution is never given.
    """
    if not 1 <= prefix < len(steps):
        raise ConfigError(
            f"prefix {prefix} of {len(steps)} steps: give 1 to {len(steps) - 1}; the whole "
            "solution would leave nothing to learn"
        )
    return HintPlan(
        response_prefix="".join(steps[:prefix]),
        n=n,
        level=prefix,
        source="oracle",
        condition="original",
    )


class Bread(RecordedScheduler):
    """A `HintScheduler` that branches a failed task from the shortest prefix that works.

    Each try of a prefix is a whole group; the accepted one is the shortest prefix's, so it has one
    context. Where no prefix works, the bare group is accepted.

    Args:
        most_steps: most steps that a solution is cut into, at least 2.
        steps_key: where steps stand in a task's metadata; else the solution's clauses are taken.
        solution_key: where the solution stands.
        missing_is_error: a task without either is an error; False trains it bare.
        success_above: a rollout with a larger reward is a success.
    """

    name = "bread"

    def __init__(
        self,
        *,
        most_steps: int = 8,
        steps_key: str = "steps",
        solution_key: str = "solution",
        missing_is_error: bool = True,
        success_above: float = 0.0,
    ) -> None:
        self._most = most_steps
        self._keys = (steps_key, solution_key)
        self._missing_is_error = missing_is_error
        self.record = Record(success_above)

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the bare task.

        Raises:
            ConfigError: the task has no steps and that is an error.
        """
        if self._missing_is_error and not self._steps(task):
            raise ConfigError(
                f"task {task.task_id!r} has neither metadata.{self._keys[0]} nor "
                f"metadata.{self._keys[1]}: give it a solution, or set hints.missing = 'plain'"
            )
        return [BARE]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return the next prefix of the bisection where the bare group failed."""
        if not self.record.has_failed(made[0].group):
            return ()
        steps = self._steps(task)
        following = self._search(made, len(steps) - 1).next()
        return () if following is None else [branch_plan(steps, following)]

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return the group of the shortest prefix that worked, else the bare one."""
        worked = [one for one in made[1:] if self.record.successes(one.group)]
        chosen = min(worked, key=lambda one: one.plan.level, default=made[0])
        self.record.close(made, chosen.plan, chosen.group).level = chosen.plan.level
        return chosen.group

    def _steps(self, task: Task) -> tuple[str, ...]:
        return steps_of(task, steps_key=self._keys[0], solution_key=self._keys[1], most=self._most)

    def _search(self, made: Sequence[PlannedGroup], n_prefixes: int) -> PrefixSearch:
        search = PrefixSearch(max(0, n_prefixes))
        for one in made[1:]:
            search = search.told(one.plan.level, succeeded=bool(self.record.successes(one.group)))
        return search
