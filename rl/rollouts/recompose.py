"""Recomposition: short right and long wrong rollouts are trained now, the others later together.

Every rollout is trained or kept exactly once; a full store forgets its oldest. Does not know
losses. Source: RoRecomp, abstract (approximation: shares, period and the bound of the store are
ours, and a recomposed group has a baseline of its own).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class RecomposeOptions:
    """How a step's rollouts are parted."""

    share: float = 0.5
    """Trained now: of a group's right rollouts the shortest, of its wrong ones the longest."""
    every: int = 4
    """Steps between two batches of what was left."""
    keep: int = 256
    """Rollouts kept at most."""
    success_above: float = 0.0
    """A larger reward is right."""

    @classmethod
    def of(cls, options: Mapping[str, float]) -> RecomposeOptions:
        """Check the options of a config.

        Raises:
            ConfigError: an unknown one, or a value out of range.
        """
        known = {f: options[f] for f in ("share", "success_above") if f in options}
        whole = {f: int(options[f]) for f in ("every", "keep") if f in options}
        unknown = sorted(set(options) - set(known) - set(whole))
        if unknown:
            raise ConfigError(
                f"curriculum.select_options has no option {unknown[0]!r}; known are share, every, "
                "keep and success_above"
            )
        made = cls(**known, **whole)  # type: ignore[arg-type]
        if not 0 < made.share <= 1 or made.every < 1 or made.keep < 1:
            raise ConfigError(
                f"curriculum.select_options: share {made.share} must be in (0, 1], every "
                f"{made.every} and keep {made.keep} at least 1"
            )
        return made


@dataclass(slots=True)
class Recomposed:
    """What a step trains on."""

    groups: list[RolloutGroup]
    replayed: frozenset[str] = frozenset()
    """Ids of rollouts of earlier steps."""
    figures: dict[str, int] = field(default_factory=dict)


class Recompose:
    """Parts groups and keeps what is left.

    Args:
        options: shares and period.
    """

    def __init__(self, options: RecomposeOptions) -> None:
        self._options = options
        self._kept: list[tuple[int, RolloutGroup]] = []

    def select(self, groups: Sequence[RolloutGroup], step: int) -> Recomposed:
        """Return the groups to train on in a step, counted from 0."""
        o, now = self._options, []
        for group in groups:
            chosen, rest = self._parts(group)
            now.append(chosen)
            if rest.rollouts:
                self._kept.append((step, rest))
        forgotten = self._forget()
        later: list[RolloutGroup] = []
        if (step + 1) % o.every == 0:
            later, self._kept = [g for _, g in self._kept], []
        old = {r.rollout_id for g in later for r in g.rollouts}
        fresh = {r.rollout_id for g in groups for r in g.rollouts}
        return Recomposed(
            [*now, *later],
            frozenset(old - fresh),
            {
                "rollouts_now": sum(len(g.rollouts) for g in now),
                "rollouts_later": len(old),
                "rollouts_kept": sum(len(g.rollouts) for _, g in self._kept),
                "rollouts_forgotten": forgotten,
            },
        )

    def _parts(self, group: RolloutGroup) -> tuple[RolloutGroup, RolloutGroup]:
        """The rollouts for now and those for later; without a reward they stay where they are."""
        o = self._options
        right = sorted((r for r in group.graded if _reward(r) > o.success_above), key=_length)
        wrong = sorted((r for r in group.graded if _reward(r) <= o.success_above), key=_length)
        wrong.reverse()
        chosen = {
            r.rollout_id for part in (right, wrong) for r in part[: math.ceil(o.share * len(part))]
        }
        first = [r for r in group.rollouts if r.rollout_id in chosen or r.score is None]
        rest = [r for r in group.graded if r.rollout_id not in chosen]
        if not rest:
            return group, replace(group, rollouts=())
        return replace(group, rollouts=tuple(first)), replace(group, rollouts=tuple(rest))

    def _forget(self) -> int:
        total, forgotten = sum(len(g.rollouts) for _, g in self._kept), 0
        while self._kept and total - forgotten > self._options.keep:
            forgotten += len(self._kept.pop(0)[1].rollouts)
        return forgotten

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"groups": [[step, g.to_dict()] for step, g in self._kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._kept = [(int(step), RolloutGroup.from_dict(g)) for step, g in state["groups"]]


def _reward(rollout: Rollout) -> float:
    return 0.0 if rollout.score is None else rollout.score.reward


def _length(rollout: Rollout) -> tuple[int, int]:
    return sum(len(s.token_ids or ()) for s in rollout.steps), rollout.sample_index
