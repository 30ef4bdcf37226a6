"""What a step's groups pass through: makers, strategies, stores.

Does not know a step. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tfgrpo.protocols import HintScheduler, Sampling
from tfgrpo.rl.rollouts.curriculum import Draw
from tfgrpo.rl.rollouts.figures import RolloutFigures
from tfgrpo.rl.rollouts.recompose import Recompose
from tfgrpo.rl.rollouts.replay_buffer import Replay
from tfgrpo.rollout import RolloutGroup, Task

MakeGroups = Callable[[Sequence[Task], int], list[RolloutGroup]]
"""(tasks of a step, seed) to one group a task, with token ids: a user's own rollouts."""


class RolloutMaker(Protocol):
    """What makes one group per task: `SingleTurnMaker`, or `MultiTurnMaker` for several turns."""

    figures: RolloutFigures
    beside: dict[str, tuple[RolloutGroup, ...]]
    """Further groups to train on of the last call's tasks, by task id."""

    def make(
        self,
        tasks: Sequence[Task],
        group_size: int | Sequence[int],
        *,
        seed: int,
        hints: HintScheduler | None = None,
        sampling: Sampling | None = None,
    ) -> list[RolloutGroup]:
        """Return one group a task, in order; `group_size` is one number or one a task."""
        ...


class GroupGrower(Protocol):
    """What makes groups by a strategy, such as `strategies.maker.GrowingMaker`."""

    figures: RolloutFigures

    def make(
        self, tasks: Sequence[Task], group_size: Sequence[int], *, seed: int, step: int
    ) -> list[RolloutGroup]:
        """Return one group a task, in order."""
        ...


class WholeGroups(Protocol):
    """Groups that became whole in a step."""

    @property
    def groups(self) -> list[RolloutGroup]:
        """Oldest first."""
        ...

    @property
    def resumed(self) -> frozenset[str]:
        """Ids of rollouts that earlier steps began."""
        ...

    @property
    def figures(self) -> Mapping[str, float]:
        """For the log."""
        ...


class GroupsInFlight(Protocol):
    """Groups that take several steps, such as `strategies.partial.PartialRolls`."""

    figures: RolloutFigures

    def step(
        self,
        wanted: int,
        draw: Callable[[int, Iterable[str]], list[Draw]],
        *,
        seed: int,
        step: int,
    ) -> WholeGroups:
        """Return up to so many whole groups; `draw` gives further tasks."""
        ...


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a step's groups pass through."""

    replay: Replay | None = None
    """Past groups."""
    hints: HintScheduler | None = None
    """When a failed task gets which hint."""
    make_groups: MakeGroups | None = None
    """A user's own maker, in place of the trainer's."""
    grower: GroupGrower | None = None
    """What makes groups by a strategy, in place of plain rollouts."""
    partial: GroupsInFlight | None = None
    """Groups that stay in flight over several steps."""
    recompose: Recompose | None = None
    """What is trained now and what later."""
    knows: bool = False
    """Write what the curriculum knows of a task into its group, for estimators that need it."""
    greedy: bool = False
    """Also roll each task greedily once, for estimators that need a baseline."""
