"""One record for every kind of help, and a group that was made under it.

A plan carries text; whoever rolls it turns text into token ids. Help that stands in the prompt
becomes a `ContextPart`; help forced at the start of a response stays in the plan, because a context
cannot hold it. Does not know when a plan is used (schedulers do), models or tokens.

Idea: the seven axes on which SAGE, Scaf-GRPO, ADHint, POPE, QuestA, BREAD and StepHint differ, as
one record (own).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tfgrpo.context import ContextPart
from tfgrpo.errors import ConfigError
from tfgrpo.rollout import RolloutGroup

__all__ = ["BARE", "Condition", "HintPlan", "HintSource", "PlannedGroup", "TrainOn", "level_of"]

HintSource = Literal["none", "self", "teacher", "reference", "oracle", "given"]
"""Who wrote the help; `given` stood in the task's metadata without a writer's name."""
TrainOn = Literal["generated", "generated_and_prefix_if_positive", "none"]
"""Which tokens carry a loss: what the policy wrote; also a forced prefix, unless the advantage is
negative; or nothing."""
Condition = Literal["as_rolled", "original"]
"""Log-probs under the prompt as rolled, or under the bare task's prompt (off-policy)."""


@dataclass(frozen=True, slots=True)
class HintPlan:
    """What one set of rollouts of a task is given, and how it is trained on."""

    text: str = ""
    """Help that stands in the prompt; empty for none."""
    response_prefix: str = ""
    """Text forced at the start of the response; empty for none."""
    n: int | None = None
    """Rollouts under this plan; None is the group size."""
    level: int = 0
    """Strength index; 0 is the bare task."""
    source: HintSource = "none"
    group_key: str = ""
    """Rollouts of a group whose plans have equal keys share a baseline."""
    weight: float = 1.0
    """Loss weight of the plan's rows, at least 0."""
    train_on: TrainOn = "generated"
    condition: Condition = "as_rolled"
    weigh_prefix: bool = False
    """Trained prefix tokens weigh less where their entropy is unlike the policy's own (ADHint)."""

    def __post_init__(self) -> None:
        if self.level < 0 or self.weight < 0 or (self.n is not None and self.n < 1):
            raise ConfigError(
                f"hint plan: level {self.level} and weight {self.weight} must be at least 0, "
                f"n {self.n} at least 1 (None is the group size)"
            )

    @property
    def is_bare(self) -> bool:
        """True when the policy is given nothing but the task."""
        return not self.text and not self.response_prefix

    @property
    def label(self) -> str:
        """`none` for the bare task, else kind, writer and level, as figures count it.

        >>> HintPlan(text="x", level=2, source="self").label, HintPlan().label
        ('hint:self:2', 'none')
        >>> HintPlan(response_prefix="x", level=1, source="oracle").label
        'prefix:oracle:1'
        """
        if self.is_bare:
            return "none"
        return f"{'hint' if self.text else 'prefix'}:{self.source}:{self.level}"

    def part(self) -> ContextPart | None:
        """Return the help in the prompt as a part of a context, or None where there is none.

        >>> HintPlan(text="Factor it.", level=2, source="self").part().source
        'hint:self:2'
        """
        if not self.text:
            return None
        return ContextPart("hint", self.text, source=f"hint:{self.source}:{self.level}")


BARE = HintPlan()
"""The task alone."""


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A plan and the graded rollouts that were made under it."""

    plan: HintPlan
    group: RolloutGroup


def level_of(part: ContextPart | None) -> int:
    """Return the level that `HintPlan.part` wrote into a part's source; 0 for the bare task.

    Raises:
        ConfigError: the part was not made by a hint plan.

    >>> level_of(None), level_of(ContextPart("hint", "x", source="hint:reference:3"))
    (0, 3)
    """
    if part is None:
        return 0
    found = re.fullmatch(r"hint:[a-z]+:(\d+)", part.source)
    if found is None:
        raise ConfigError(
            f"context part with source {part.source!r} was not made by a hint plan; its source "
            "must read hint:WRITER:LEVEL"
        )
    return int(found[1])
