"""What a nudge is and what a method of nudging does.

A nudge is context beside the library for one more group of a task on which every rollout failed.
A method says which comes next; it never rolls anything itself. Does not know the loop, limits or
how lessons are made. Source: own; HintScheduler's start and after as one pure question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tfgrpo.context import ContextPart
from tfgrpo.rollout import RolloutGroup


@dataclass(frozen=True, slots=True)
class Nudge:
    """What one more group of a task is given beside the library."""

    parts: tuple[ContextPart, ...]
    n: int | None = None
    """Rollouts; None is the group size."""


@dataclass(frozen=True, slots=True)
class StepView:
    """What a method may look at before a step's rounds."""

    epoch: int
    groups: tuple[RolloutGroup, ...]
    """The step's practice groups."""
    failed: tuple[RolloutGroup, ...]
    """Those of them in which nothing succeeded and for which there is room."""
    practised: tuple[RolloutGroup, ...]
    """All practice groups of the run so far, this step's included."""


class NudgeMethod(Protocol):
    """One way to help.

    Contract:
        1. `prepare` is called once a step, before `next`; it may ask an LM, and fills `books`.
        2. `next` gets the groups of one task, the bare failed one first, and returns what the next
           group is given, or None for no more. Equal runs give equal answers.
        3. No text made from the task's reference holds its answer.
        4. `books` counts `leaks` (texts refused because the answer stands in them) and what else a
           method wants to tell; it only grows.
    """

    @property
    def books(self) -> Counter[str]:
        """Counts over the run."""
        ...

    async def prepare(self, seen: StepView) -> None:
        """Get ready for a step."""
        ...

    def next(self, tried: Sequence[RolloutGroup], epoch: int) -> Nudge | None:
        """Return the next nudge of a task, or None."""
        ...


def has_success(group: RolloutGroup, above: float) -> bool:
    """Return whether a graded rollout has a reward larger than `above`."""
    return any(r > above for r in group.rewards_G)


def has_failed(group: RolloutGroup, above: float) -> bool:
    """Return whether something was graded and nothing succeeded; no verdict is no failure."""
    return bool(group.rewards_G) and not has_success(group, above)
