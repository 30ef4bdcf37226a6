"""The `[nudge]` section: help for practice tasks on which every rollout failed, and its limits.

Does not know how help is made or rolled. Source: own; the methods' papers are named in
`tfgrpo.nudges`.
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

NudgeKind = Literal["off", "hints", "strategies", "drafts", "perturb", "examples", "scheduler"]
_OPTIONS: dict[str, tuple[NudgeKind, ...]] = {
    "levels": ("hints", "drafts", "examples", "scheduler"),
    "writer": ("hints", "strategies"),
    "hints_key": ("hints",),
    "solution_key": ("hints",),
    "strategies": ("strategies",),
    "contexts": ("strategies",),
    "resamples": ("perturb",),
    "words": ("perturb",),
    "shots": ("examples",),
    "scheduler": ("scheduler",),
}
"""Options that belong to some kinds only."""
_LEVELS: dict[NudgeKind, int] = {"hints": 3, "drafts": 1, "examples": 1}


class NudgeConfig(BaseModel):
    """What a practice task gets after a group in which nothing succeeded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: NudgeKind = "off"
    """What helps: hints, strategies, drafts, perturbed prompts, examples, or a scheduler of yours;
    `off` does without."""
    success_above: float = Field(default=0.0, allow_inf_nan=False)
    """A rollout with a larger reward is a success."""
    max_share: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Extra rollouts of a step, those of the recheck included, over its practice rollouts."""
    levels: int | None = Field(default=None, ge=1)
    """Most rounds a task; None is 3 for hints, 1 for drafts and examples, no limit of its own for
    a scheduler."""
    between: bool = True
    """Where no nudged group differs in itself but one succeeded, let the critic compare it with
    the failed group of the same task."""
    recheck: int = Field(default=4, ge=0)
    """Draws a nudged task without help, under the library that its step gave; 0 leaves it out."""
    control: bool = True
    """Draw as many under the library before the step: chance alone turns some tasks."""
    writer: Literal["task", "policy", "critic"] | None = None
    """Who writes hints or strategies; None is the task's metadata for hints, and for strategies
    the critic's LM where none are given."""
    hints_key: str = "hints"
    """Metadata key of written hints."""
    solution_key: str = "solution"
    """Metadata key of a worked solution."""
    strategies: tuple[str, ...] = ()
    """Texts of strategies to try; empty lets a model write them."""
    contexts: int = Field(default=2, ge=1)
    """Strategies tried a visit; the group's rollouts are shared out over them."""
    resamples: int | None = Field(default=None, ge=1)
    """Rollouts a task, each behind a text of its own; None is the group size."""
    words: tuple[int, int] = (50, 150)
    """Shortest and longest perturbing text."""
    shots: int = Field(default=2, ge=1)
    """Worked examples a prompt."""
    scheduler: str = ""
    """A hint scheduler, or a function without arguments that makes one, as `module:name`."""

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        if self.kind == "off":
            return self
        for name, kinds in _OPTIONS.items():
            is_set = getattr(self, name) != type(self).model_fields[name].default
            if is_set and self.kind not in kinds:
                raise ValueError(
                    f"{name} belongs to kind {' or '.join(map(repr, kinds))}, and kind "
                    f"is {self.kind!r}: leave it out"
                )
        if self.strategies and self.writer is not None:
            raise ValueError("strategies are given, so leave writer out")
        if self.kind == "strategies" and self.writer == "task":
            raise ValueError("strategies are not read from tasks: writer is 'policy' or 'critic'")
        if not 1 <= self.words[0] <= self.words[1]:
            raise ValueError(f"words {self.words} must be two numbers, the smaller first, from 1")
        return self

    @property
    def most_rounds(self) -> int | None:
        """How often a task may be rolled again; None leaves it to the cap."""
        return self.levels if self.levels is not None else _LEVELS.get(self.kind)

    @property
    def asks_lm(self) -> bool:
        """True when an LM writes the texts."""
        if self.kind == "strategies":
            return not self.strategies
        return self.kind == "hints" and self.writer in ("policy", "critic")

    @property
    def recheck_rollouts(self) -> int:
        """Rollouts that checking one task without help takes."""
        return self.recheck * (2 if self.control else 1)

    def cap(self, rollouts: int) -> int:
        """Return how many extra rollouts a step of so many practice rollouts may make."""
        return math.floor(self.max_share * rollouts + 1e-9)

    def share(self, group_size: int) -> int:
        """Return the rollouts of one nudged group of this kind."""
        if self.kind == "perturb":
            return 1
        return max(1, group_size // self.contexts) if self.kind == "strategies" else group_size

    def most_rollouts(self, group_size: int) -> int | None:
        """Return the most rollouts under help for one task and visit; None leaves it to the cap."""
        if self.kind == "perturb":
            return self.resamples or group_size
        if self.kind == "strategies":
            return self.contexts * self.share(group_size)
        return None if self.most_rounds is None else self.most_rounds * group_size
