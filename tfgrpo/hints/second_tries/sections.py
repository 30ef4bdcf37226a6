"""The `[hints]` sections of second tries, checked and made into schedulers.

Does not know how schedulers work. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from tfgrpo.hint_plan import Condition
from tfgrpo.hints.second_tries.contexts import Icpo, NudgeContexts, Seeding
from tfgrpo.hints.second_tries.drafts import IGrpo
from tfgrpo.hints.second_tries.perturbed import Lope
from tfgrpo.hints.second_tries.recycled import Scope
from tfgrpo.hints.second_tries.reflected import R3L
from tfgrpo.hints.sections import Common, Recorded

__all__ = ["SECTIONS"]


class _IGrpo(Common):
    drafts: int = Field(default=4, ge=0)
    refinements: int | None = Field(default=None, ge=1)
    only_failed: bool = False
    seed: int = 0

    def make(self) -> Recorded:
        """Build the scheduler."""
        return IGrpo(
            drafts=self.drafts,
            refinements=self.refinements,
            only_failed=self.only_failed,
            seed=self.seed,
            success_above=self.success_above,
        )


class _Lope(Common):
    resamples: int | None = Field(default=None, ge=1)
    words: tuple[int, int] = (50, 150)
    text: Literal["lorem", "none"] = "lorem"
    condition: Condition = "corrected"
    shaping: float = Field(default=0.0, ge=0)
    whole_baseline: bool = False
    seed: int = 0

    @model_validator(mode="after")
    def _fits(self) -> _Lope:
        if not 1 <= self.words[0] <= self.words[1]:
            raise ValueError(f"words {self.words} must be two numbers, the smaller first, from 1")
        if self.shaping and self.condition != "corrected":
            raise ValueError("shaping is of the ratio to the sampler: set condition = 'corrected'")
        return self

    @property
    def needs_ratio(self) -> bool:
        """True where the ratio is to the perturbed prompt."""
        return self.condition == "corrected" and self.text != "none"

    def make(self) -> Recorded:
        """Build the scheduler."""
        return Lope(
            resamples=self.resamples,
            words=self.words,
            text=self.text,
            condition=self.condition,
            shaping=self.shaping,
            whole_baseline=self.whole_baseline,
            seed=self.seed,
            success_above=self.success_above,
        )


class _R3L(Common):
    full: float = 1.0
    retries: int = Field(default=0, ge=0)
    writer_tokens: int = Field(default=512, ge=1)

    def make(self) -> Recorded:
        """Build the scheduler."""
        return R3L(
            full=self.full,
            retries=self.retries,
            max_tokens=self.writer_tokens,
            success_above=self.success_above,
        )


class _Nudge(Common):
    advantage = "nudge"

    strategies: tuple[str, ...] = ()
    strategies_key: str = "strategies"
    writer: str = "given"
    """`given` reads the texts; `self` has the policy write them before training; else the spec of
    an LM."""
    retries: int = Field(default=3, ge=0)
    writer_tokens: int = Field(default=512, ge=1)
    contexts: int = Field(default=2, ge=1)
    per_context: int = Field(default=4, ge=1)
    dropout: float = Field(default=0.25, ge=0, le=1)
    distil: float = Field(default=0.01, ge=0)
    seed: int = 0

    @property
    def adds_rows(self) -> bool:
        """True with its second term."""
        return self.distil > 0

    def make(self) -> Recorded:
        """Build the scheduler."""
        return NudgeContexts(
            strategies=self.strategies,
            strategies_key=self.strategies_key,
            contexts=self.contexts,
            per_context=self.per_context,
            dropout=self.dropout,
            distil=self.distil,
            missing_is_error=self.missing == "error",
            seed=self.seed,
            success_above=self.success_above,
        )


class _Icpo(Common):
    expert: int = Field(default=4, ge=0)
    examples: int = Field(default=1, ge=1)
    bound: float = 1.0
    bonus: float = Field(default=0.1, ge=0)
    bonus_groups: int = Field(default=1600, ge=1)
    groups_per_step: int = Field(default=16, ge=1)
    gamma: float = Field(default=0.1, gt=0)

    @property
    def needs_ratio(self) -> bool:
        """True where rollouts with examples train the bare prompt."""
        return self.expert > 0

    def make(self) -> Recorded:
        """Build the scheduler."""
        return Icpo(
            expert=self.expert,
            examples=self.examples,
            bound=self.bound,
            bonus=self.bonus,
            bonus_groups=self.bonus_groups,
            groups_per_step=self.groups_per_step,
            gamma=self.gamma,
            solution_key=self.solution_key,
            success_above=self.success_above,
        )


class _Xrpo(Common):
    examples: int = Field(default=1, ge=1)
    keep: int = Field(default=256, ge=1)

    def make(self) -> Recorded:
        """Build the scheduler."""
        return Seeding(examples=self.examples, keep=self.keep, success_above=self.success_above)


class _Scope(Common):
    forces_prefix = True

    weight: float = Field(default=0.5, ge=0)
    most: int = Field(default=1, ge=1)
    retries: int = Field(default=1, ge=0)
    writer_tokens: int = Field(default=64, ge=1)

    def make(self) -> Recorded:
        """Build the scheduler."""
        return Scope(
            weight=self.weight,
            most=self.most,
            retries=self.retries,
            max_tokens=self.writer_tokens,
            solution_key=self.solution_key,
            missing_is_error=self.missing == "error",
            success_above=self.success_above,
        )


SECTIONS: Mapping[str, type[Common]] = {
    "igrpo": _IGrpo,
    "lope": _Lope,
    "r3l": _R3L,
    "nudge": _Nudge,
    "icpo": _Icpo,
    "xrpo": _Xrpo,
    "scope": _Scope,
}
"""By the name of the method."""
