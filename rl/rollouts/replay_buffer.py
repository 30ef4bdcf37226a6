"""Past groups whose rewards differ, used again under a correction for their age.

A kept group has its rewards, its token ids and the log-probs that its sampler reported. Those are
log π_old in the ratio when it is used again, so clipped and importance-weighted losses stay right
for rollouts of older weights; losses without a ratio (`ratio` is not in their `needs`) are refused.

Does not know losses. Ideas: replay of mixed groups (survey of rollout strategies, GFCR); R3 refills
collapsed groups instead, which mixes policies inside a baseline and is not done here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tfgrpo.rollout import RolloutGroup
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
