"""Options of each strategy of `rollout.strategy`, as they stand in `rollout.strategy_options`.

Does not know how a strategy works. Sources: named at each strategy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tfgrpo.config.sections import explain
from tfgrpo.errors import ConfigError


class Options(BaseModel):
    """What all have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LatrOptions(Options):
    """Constants; the defaults are the release's."""

    tau_abs: float = Field(default=0.2, gt=0, lt=1)
    """Least probability of a token to branch to."""
    tau_rel: float = Field(default=0.2, gt=0, le=1)
    """Most that it may lie below the likeliest."""
    ahead: int = Field(default=30, ge=1)
    """Tokens of a look ahead, and of a window."""
    edit: float = Field(default=0.4, ge=0, le=1)
    """A child whose look ahead is edited from its parent's by less than this share is dropped."""
    leave: int = Field(default=1024, ge=1)
    """Tokens after which nothing branches any more."""
    shares: dict[int, float] = {0: 1.0, 100: 0.75, 200: 0.5, 300: 0.25}
    """From which training step on which share of a group may come from the tree."""

    def share_at(self, step: int) -> float:
        """Return the share at a step.

        >>> LatrOptions().share_at(99), LatrOptions().share_at(250)
        (1.0, 0.5)
        """
        known = [s for s in self.shares if s <= step]
        return self.shares[max(known)] if known else 1.0


class TreeOptions(Options):
    """Shape of a tree."""

    factors: tuple[int, ...] = (2, 2, 2)
    """Children a node, level by level; their product is the group size."""
    segment: int = Field(default=32, ge=1)
    """Tokens of a level; the last goes to the end."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.factors or min(self.factors) < 1:
            raise ValueError(f"factors {self.factors} must be one or more numbers from 1")
        return self

    def check(self, group_size: int) -> None:
        """Refuse a group size that the tree cannot have.

        Raises:
            ConfigError: it is not the product of the factors.
        """
        leaves = math.prod(self.factors)
        if leaves != group_size:
            raise ConfigError(
                f"rollout.strategy 'tree' with factors {list(self.factors)} has {leaves} leaves, "
                f"and rollout.group_size is {group_size}: make them equal"
            )


class ChainOptions(Options):
    """Where rows are cut and how cuts are valued; the defaults are the release's."""

    every: int = Field(default=5, ge=1)
    """Uncertain tokens of a segment."""
    below: float = Field(default=0.9, gt=0, le=1)
    """A token of a smaller probability is uncertain."""
    draws: int = Field(default=9, ge=1)
    """Continuations a cut."""
    most_cuts: int = Field(default=8, ge=0)
    """Of a row; later ones are left out."""


class EchoOptions(Options):
    """Constants, all ours."""

    window: int = Field(default=32, ge=1)
    """Tokens between two looks."""
    first: int = Field(default=2, ge=1)
    """Rows at the start."""
    most_width: int = Field(default=3, ge=1)
    """Most children of a row at a look, itself included."""
    reference: float = Field(default=1.0, gt=0)
    """Entropy in nats at which a row of an unsure group has the greatest width."""
    floor: float = Field(default=0.2, ge=0, le=1)
    """Mean probability of its tokens below which a row is unsure."""
    checks: int = Field(default=2, ge=1)
    """Looks in a row that it may be unsure at."""


class PartialOptions(Options):
    """How much is begun."""

    over: float = Field(default=1.5, ge=1)
    """Groups in flight over the groups of a step."""
    window: int = Field(default=0, ge=0)
    """Tokens that a resumed row makes at least in each step, so that a reply of L tokens ends
    within ⌈L / window⌉ steps after its first; 0 promises nothing."""


class ArpoOptions(Options):
    """Constants; the defaults are the release's."""

    first: int | None = Field(default=None, ge=1)
    """Rollouts from the start; None is half of the group."""
    beam: int = Field(default=2, ge=1)
    """Most branches at a place."""
    p: float = Field(default=0.5, ge=0, le=1)
    """Chance of a branch where uncertainty is what it was at first."""
    w: float = Field(default=0.2, ge=0)
    """How much more likely a branch becomes with uncertainty, which is over the logarithm of the
    vocabulary."""
    tokens: int = Field(default=20, ge=1)
    """First tokens of a turn that are looked at."""


class TurnTreeOptions(Options):
    """Shape of a tree of turns."""

    first: int = Field(default=2, ge=1)
    """Rollouts from the start."""
    factor: int = Field(default=2, ge=1)
    """Most branches of a fork, the first one included."""
    depth: int = Field(default=4, ge=1)
    """Turns after which nothing forks."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.first < 2 and self.factor < 2:
            raise ValueError("first and factor are both 1: nothing would branch")
        return self


OPTIONS: Mapping[str, type[Options]] = {
    "latr": LatrOptions,
    "tree": TreeOptions,
    "spo_chain": ChainOptions,
    "echo": EchoOptions,
    "april": PartialOptions,
    "arpo": ArpoOptions,
    "turn_tree": TurnTreeOptions,
}
"""By the name of the strategy; `plain` has none."""
TURNS = ("arpo", "turn_tree")
"""Strategies of rollouts of several turns."""
SEGMENTED = ("tree", "spo_chain")
"""Strategies that cut a reply into segments for credit."""


def strategy_options(strategy: str, given: Mapping[str, Any]) -> Options | None:
    """Return the checked options of a strategy; None for `plain`.

    Raises:
        ConfigError: a wrong option, with the nearest known one.
    """
    if strategy == "plain":
        if given:
            raise ConfigError(
                f"rollout.strategy_options has {sorted(given)}, and rollout.strategy 'plain' has "
                "no options: name a strategy or leave them out"
            )
        return None
    kind = OPTIONS[strategy]
    try:
        return kind.model_validate(dict(given))
    except ValidationError as exc:
        raise ConfigError(explain(exc, kind, "rollout.strategy_options")) from None


def refuse_beside(told: str, others: Mapping[str, bool]) -> None:
    """Refuse a strategy beside what also decides how a group is made, by name whether it is set.

    Raises:
        ConfigError: something is set.
    """
    for other, is_set in others.items():
        if is_set:
            raise ConfigError(
                f"{told} with {other}: both decide how a group is made; leave one of them out"
            )
