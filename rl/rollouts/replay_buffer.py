"""Past groups whose rewards differ, used again under a correction for their age.

A kept group has its rewards, its token ids and the log-probs that its sampler reported. Those are
log π_old in the ratio when it is used again, so clipped and importance-weighted losses stay right
for rollouts of older weights; losses without a ratio (`ratio` is not in their `needs`) are refused.

Does not know losses. Ideas: replay of mixed groups (survey of rollout strategies, GFCR); `refilled`
is R3's (abstract; approximation), which mixes policies inside a baseline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tfgrpo.rollout import Rollout, RolloutGroup
from tfgrpo.runtime.canonical import derive_seed


class Replay:
    """A bounded store of groups, oldest first.

    Args:
        keep: groups kept at most.
        age: steps after which one is forgotten.
        seed: fixes which are picked.
    """

    def __init__(self, *, keep: int, age: int, seed: int) -> None:
        self._keep, self._age, self._seed = keep, age, seed
        self._kept: list[tuple[int, RolloutGroup]] = []

    def pick(self, n: int, step: int, busy: Collection[str]) -> list[RolloutGroup]:
        """Return up to n kept groups of tasks that are not `busy`, no task twice."""
        self._kept = [(s, g) for s, g in self._kept if step - s <= self._age]
        rng = np.random.default_rng(derive_seed(self._seed, "replay", step))
        found: dict[str, RolloutGroup] = {}
        for i in rng.permutation(len(self._kept)):
            group = self._kept[int(i)][1]
            if len(found) < n and group.task.task_id not in busy:
                found.setdefault(group.task.task_id, group)
        return list(found.values())

    def of_task(self, task_id: str, step: int) -> list[Rollout]:
        """Return a task's kept rollouts, newest first."""
        return [
            r
            for s, g in reversed(self._kept)
            if g.task.task_id == task_id and step - s <= self._age
            for r in g.graded
        ]

    def add(self, groups: Iterable[RolloutGroup], step: int) -> None:
        """Keep the groups whose rewards differ, graded rollouts only."""
        self._kept += [
            (step, replace(g, rollouts=tuple(g.graded))) for g in groups if g.is_informative()
        ]
        del self._kept[: -self._keep]

    def __len__(self) -> int:
        return len(self._kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"groups": [[step, g.to_dict()] for step, g in self._kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        rows: Sequence[tuple[int, dict[str, Any]]] = state["groups"]
        self._kept = [(int(step), RolloutGroup.from_dict(g)) for step, g in rows]


def refilled(
    group: RolloutGroup, past: Sequence[Rollout], most: int, success_above: float = 0.0
) -> tuple[RolloutGroup, list[Rollout]]:
    """Return a flat group with its last rollouts replaced by past ones of the other outcome.

    At least one of its own stays, and its size is kept; a group whose rewards differ, or that has
    no such past, is given back as it is. Also returns the past rollouts that were used.
    """
    rewards_G = group.rewards_G
    if not rewards_G or group.is_informative():
        return group, []
    has_succeeded = rewards_G[0] > success_above
    other = [r for r in past if r.score and (r.score.reward > success_above) != has_succeeded]
    places = [i for i, r in enumerate(group.rollouts) if r.score is not None][1:]
    used = other[: min(most, len(places))]
    rollouts = list(group.rollouts)
    for place, old in zip(reversed(places), used, strict=False):
        rollouts[place] = replace(old, sample_index=rollouts[place].sample_index)
    return (replace(group, rollouts=tuple(rollouts)) if used else group), used
