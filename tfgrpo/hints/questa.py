"""QuestA: a fixed share of the reference solution in the prompt, less in each stage.

Every visit of every task is hinted with the first share of its solution; the share falls at given
epochs. Meant for hard tasks only (`hard_tasks`). Does not know rewards: nothing is rolled again.

Source: QuestA's released code: 50 % of the characters, then 25 % from the first stage's
checkpoint, hard tasks with 0 to 4 successes. A share of 0 as last stage trains on the bare task.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import BARE, HintPlan, PlannedGroup
from tfgrpo.hints.answer_leaks import cut_before_leak
from tfgrpo.hints.metadata import share_of, solution_of
from tfgrpo.hints.state import Record, RecordedScheduler
from tfgrpo.rollout import RolloutGroup, Task


class Questa(RecordedScheduler):
    """A `HintScheduler` with one share a stage.

    Args:
        shares: share of the solution's characters by stage, in [0, 1], never rising.
        epochs: after how many epochs each next stage begins; one entry fewer than `shares`, rising.
        solution_key: where the solution stands in a task's metadata.
        missing_is_error: a task without a solution is an error; False trains it bare.
        success_above: a rollout with a larger reward is a success, in the figures.

    Raises:
        ConfigError: shares or epochs of wrong number or order.
    """

    name = "questa"

    def __init__(
        self,
        *,
        shares: Sequence[float] = (0.5, 0.25),
        epochs: Sequence[int] = (1,),
        solution_key: str = "solution",
        missing_is_error: bool = True,
        success_above: float = 0.0,
    ) -> None:
        falling = list(shares) == sorted(shares, reverse=True)
        if not shares or not falling or not all(0 <= s <= 1 for s in shares):
            raise ConfigError(
                f"hints.shares is {list(shares)}: give shares in [0, 1], none larger than the one "
                "before it"
            )
        if len(epochs) != len(shares) - 1 or list(epochs) != sorted(set(epochs)):
            raise ConfigError(
                f"hints.epochs is {list(epochs)} for {len(shares)} shares: give the rising epoch "
                f"numbers at which the {len(shares) - 1} later stages begin"
            )
        self._shares = tuple(shares)
        self._epochs = tuple(epochs)
        self._key = solution_key
        self._missing_is_error = missing_is_error
        self.record = Record(success_above)

    @property
    def share(self) -> float:
        """The share of the present stage."""
        return self._shares[sum(self.record.epoch >= e for e in self._epochs)]

    def start(self, task: Task, group_size: int) -> Sequence[HintPlan]:
        """Return the hint of the present stage; the bare task where its share is 0.

        Raises:
            ConfigError: the task has no solution and that is an error.
        """
        solution = solution_of(task, self._key)
        if not solution and self._missing_is_error:
            raise ConfigError(
                f"task {task.task_id!r} has no metadata.{self._key}: give it a worked solution, or "
                "set hints.missing = 'plain' to train such tasks without hints"
            )
        cut = share_of(solution, self.share)
        safe = cut_before_leak(solution, task)
        text = cut if len(cut) <= len(safe) else safe
        # The strongest stage has the highest level, as in the other schedulers.
        level = len(self._shares) - self._shares.index(self.share)
        return [HintPlan(text=text, level=level, source="reference") if text else BARE]

    def after(self, task: Task, made: Sequence[PlannedGroup]) -> Sequence[HintPlan]:
        """Return nothing: one group a visit."""
        return ()

    def accept(self, task: Task, made: Sequence[PlannedGroup]) -> RolloutGroup:
        """Return the group."""
        self.record.close(made, made[-1].plan, made[-1].group)
        return made[-1].group


def is_kept(
    group: RolloutGroup, *, low: float = 0.05, high: float = 0.95, success_above: float = 0.0
) -> bool:
    """Return whether QuestA trains on a group: its accuracy lies strictly between the bounds."""
    rewards_G = group.rewards_G
    if not rewards_G:
        return False
    return low < sum(r > success_above for r in rewards_G) / len(rewards_G) < high
