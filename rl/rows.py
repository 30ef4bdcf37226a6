"""Graded groups to training rows with advantages.

The groups of all processes are seen together, so that an estimator over the batch means the same
on one process and on several. Does not know models or losses. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tfgrpo.errors import ConfigError
from tfgrpo.rl import distributed
from tfgrpo.rl.advantages import ADVANTAGES
from tfgrpo.rl.batch import Floats, RewardBatch
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.multi_turn import row_of
from tfgrpo.rl.packing import Row
from tfgrpo.rl.registry import lookup
from tfgrpo.rl.update import TrainRow
from tfgrpo.rollout import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Graded:
    """One graded rollout with its tokens laid out."""

    group: int
    """Number of its group among this process's groups."""
    rollout: Rollout
    row: Row

    @property
    def reward(self) -> float:
        """Its reward."""
        assert self.rollout.score is not None
        return self.rollout.score.reward

    @property
    def parts(self) -> dict[str, float]:
        """The named parts of its score."""
        assert self.rollout.score is not None
        return dict(self.rollout.score.parts)


def graded_of(groups: Sequence[RolloutGroup]) -> list[Graded]:
    """Lay out the graded rollouts that have sampled tokens, group by group."""
    found = [
        (i, r) for i, g in enumerate(groups) for r in g.graded if any(s.token_ids for s in r.steps)
    ]
    return [Graded(i, r, row_of(r, index=n)) for n, (i, r) in enumerate(found)]


def rows_of(
    graded: Sequence[Graded], advantages: Sequence[float | tuple[float, ...]]
) -> list[TrainRow]:
    """Return the rows that bear a loss."""
    return [
        TrainRow(
            g.row,
            advantage,
            reward=g.reward,
            group=g.group,
            engine_logp=tuple(p for s in g.rollout.steps for p in (s.logprobs or ())) or None,
        )
        for g, advantage in zip(graded, advantages, strict=True)
        if g.row.n_loss
    ]


def reward_batch(graded: Sequence[Graded], n_groups: int) -> tuple[RewardBatch, slice]:
    """Return the rewards of all processes' rows, and where this process's rows stand."""
    mine = [(g.reward, g.group, g.row.n_loss, g.parts) for g in graded]
    everyone = distributed.gather_objects((mine, n_groups))
    offsets = np.cumsum([0, *(n for _, n in everyone)])
    whole = [
        (reward, group + int(offset), length, parts)
        for (rows, _), offset in zip(everyone, offsets, strict=False)
        for reward, group, length, parts in rows
    ]
    names = sorted({name for *_, parts in whole for name in parts})
    batch = RewardBatch(
        reward_R=np.array([r for r, *_ in whole], dtype=np.float64),
        group_R=np.array([g for _, g, *_ in whole], dtype=np.int64),
        length_R=np.array([n for _, _, n, _ in whole], dtype=np.int64),
        part_RM=np.array([[p.get(n, 0.0) for n in names] for *_, p in whole]) if names else None,
        part_names=tuple(names),
    )
    start = sum(len(rows) for rows, _ in everyone[: distributed.world()[0]])
    return batch, slice(start, start + len(mine))


def advantages_of(batch: RewardBatch, config: TrainConfig) -> Floats:
    """Return the chosen estimator's advantages, one a row or one a token."""
    entry = lookup(ADVANTAGES, "advantage", config.loss.advantage)
    found: Floats = entry.fn(batch, **config.loss.advantage_options)
    return found


def per_row(advantage: Floats, lengths: Sequence[int]) -> list[float | tuple[float, ...]]:
    """One advantage a row, or one a token cut into rows, by the estimator's own axis."""
    if len(advantage) == len(lengths):
        return [float(a) for a in advantage]
    if len(advantage) != sum(lengths):
        raise ConfigError(
            f"the estimator returned {len(advantage)} advantages for {len(lengths)} rollouts of "
            f"{sum(lengths)} tokens"
        )
    cuts = np.cumsum([0, *lengths])
    return [tuple(advantage[a:b].tolist()) for a, b in pairwise(cuts)]
