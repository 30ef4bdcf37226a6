"""Groups under several plans made into one group, and what of a forced prefix is trained on.

Failures replaced by hinted successes (`replace_k`), all sets as one (`mixed`), or two sets with
advantages of their own (`side_by_side`). A group of several contexts says so in its metadata
(`hint: mixed`). Pure functions over groups; does not know schedulers or tokens.

Sources: Scaf-GRPO (replacement), StepHint (all as one), ADHint (side by side, approximation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfgrpo.advantage import advantages_G
from tfgrpo.errors import ConfigError
from tfgrpo.hint_plan import PlannedGroup
from tfgrpo.rollout import Rollout, RolloutGroup

MIXED = "mixed"
"""Stands in the metadata of a group whose rollouts have several contexts."""


def mixed(made: Sequence[PlannedGroup]) -> RolloutGroup:
    """Return the rollouts of all sets as one group, numbered anew, in the order of the sets.

    Group id, context and policy are the first set's.

    Raises:
        ConfigError: no sets, or sets of several tasks.
    """
    _one_task([one.group for one in made])
    rollouts = [r for one in made for r in one.group.rollouts]
    first = made[0].group
    if len(made) == 1:
        return first
    return replace(
        first,
        rollouts=tuple(replace(r, sample_index=i) for i, r in enumerate(rollouts)),
        metadata={**first.metadata, "hint": MIXED},
    )


def with_advantages(group: RolloutGroup, values_G: Sequence[float]) -> RolloutGroup:
    """Return the group with an advantage written into each graded rollout, in order.

    Training takes these in place of its estimator's.

    Raises:
        ValueError: another number of values than of graded rollouts.
    """
    if len(values_G) != len(group.graded):
        raise ValueError(f"{len(values_G)} advantages for {len(group.graded)} graded rollouts")
    values = iter(values_G)
    return replace(
        group,
        rollouts=tuple(
            r if r.score is None else noted(r, advantage=next(values)) for r in group.rollouts
        ),
    )


def untrained(group: RolloutGroup) -> RolloutGroup:
    """Return the group with no loss on any of its rollouts."""
    return replace(group, rollouts=tuple(noted(r, train_on="none") for r in group.rollouts))


def noted(rollout: Rollout, **notes: float | str | Sequence[int]) -> Rollout:
    """Return a rollout with further notes for training beside those of its plan."""
    hint = {**rollout.metadata.get("hint", {}), **notes}
    return replace(rollout, metadata={**rollout.metadata, "hint": hint})


def replace_k(
    bare: RolloutGroup,
    hinted: Sequence[tuple[int, Rollout]],
    *,
    k: int = 1,
    success_above: float = 0.0,
) -> RolloutGroup:
    """Return the bare group with its first k failures replaced by the k weakest-hinted successes.

    A group with any success, or without any graded rollout, is given back unchanged; so is one that
    no hint solved. A replacement keeps its own prompt tokens, so that it is trained as rolled; the
    group's metadata say which draw was replaced from which level.

    Args:
        bare: the group without help.
        hinted: level and rollout, in any order; equal levels keep their order.
        k: most replacements, at least 1.
        success_above: a larger reward is a success.

    Raises:
        ConfigError: k below 1.
    """
    if k < 1:
        raise ConfigError(f"k is {k}: replace at least one rollout")
    failed = [i for i, r in enumerate(bare.rollouts) if r.reward is not None]
    if not failed or any(r > success_above for r in bare.rewards_G):
        return bare
    solved = sorted(
        ((level, r) for level, r in hinted if r.reward is not None and r.reward > success_above),
        key=lambda pair: pair[0],
    )
    rollouts = list(bare.rollouts)
    replaced: dict[str, int] = {}
    for i, (level, rollout) in list(zip(failed, solved, strict=False))[:k]:
        index = rollouts[i].sample_index
        rollouts[i] = replace(rollout, sample_index=index)
        replaced[str(index)] = level
    if not replaced:
        return bare
    metadata = {**bare.metadata, "hint": MIXED, "replaced_from_level": replaced}
    return replace(bare, rollouts=tuple(rollouts), metadata=metadata)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Advantages of two sets of rollouts of one task."""

    bare_G: tuple[float, ...]
    hinted_G: tuple[float, ...]


def side_by_side(bare: RolloutGroup, hinted: RolloutGroup, *, ratio: float = 1.0) -> SideBySide:
    """Return advantages where each set has its own baseline and the easier set counts for less.

    Approximation of ADHint's cross-weighting (its formula is not public): with mean reward b of the
    bare set and h of the hinted one (never taken below b: help makes no task harder), a rollout's
    value is (r − mean) · (1 − mean) where positive and (r − mean) · mean where negative, with its
    own set's mean; all values are then scaled to a mean square of 1. A bare success thus never
    ranks below a hinted one. `ratio` 0 means that the hint was empty: plain GRPO over both sets.

    Args:
        bare: rollouts without help, rewards in [0, 1].
        hinted: rollouts with help, rewards in [0, 1].
        ratio: share of the reference that was given, in [0, 1].

    Raises:
        ConfigError: different tasks, a set without graded rollouts, or a reward outside [0, 1].
    """
    _one_task((bare, hinted))
    bare_G, hinted_G = bare.rewards_G, hinted.rewards_G
    if not bare_G or not hinted_G or not all(0 <= r <= 1 for r in (*bare_G, *hinted_G)):
        raise ConfigError(
            f"task {bare.task.task_id!r}: {len(bare_G)} bare and {len(hinted_G)} hinted rewards; "
            "each set needs one or more, all in [0, 1]"
        )
    if ratio == 0:
        pooled = advantages_G((*bare_G, *hinted_G))
        return SideBySide(pooled[: len(bare_G)], pooled[len(bare_G) :])
    mean_bare = math.fsum(bare_G) / len(bare_G)
    mean_hinted = max(mean_bare, math.fsum(hinted_G) / len(hinted_G))
    values = [
        *(_weighed(r, mean_bare) for r in bare_G),
        *(_weighed(r, mean_hinted) for r in hinted_G),
    ]
    size = math.sqrt(math.fsum(v * v for v in values) / len(values))
    scaled = tuple(v / size if size > 0 else 0.0 for v in values)
    return SideBySide(scaled[: len(bare_G)], scaled[len(bare_G) :])


def _weighed(reward: float, mean: float) -> float:
    centred = reward - mean
    return centred * (1 - mean) if centred > 0 else centred * mean


def _one_task(groups: Sequence[RolloutGroup]) -> None:
    ids = sorted({g.task.task_id for g in groups})
    if len(ids) != 1:
        raise ConfigError(f"the groups to merge are of tasks {ids}; give groups of one task")
