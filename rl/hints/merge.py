"""Groups under several plans made into one group, and what of a forced prefix is trained on.

Three ways: the one accepted group (`single_context`), failures replaced by hinted successes
(`replace_k`), and two sets side by side with advantages of their own (`side_by_side`). Pure
functions over groups; does not know schedulers or tokens' texts.

Sources: SAGE (one context), Scaf-GRPO (replacement), ADHint (side by side, approximation),
StepHint (no negative gradient on a prefix).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfgrpo.advantage import advantages_G
from tfgrpo.errors import ConfigError
from tfgrpo.rl.hints.plan import TrainOn
from tfgrpo.rollout import Rollout, RolloutGroup


def single_context(groups: Sequence[RolloutGroup], *, success_above: float = 0.0) -> RolloutGroup:
    """Return the first group with a success, else the last; it is given back unchanged.

    Args:
        groups: the groups of one task, weakest help first.
        success_above: a larger reward is a success.

    Raises:
        ConfigError: no groups, or groups of several tasks.
    """
    _one_task(groups)
    return next((g for g in groups if any(r > success_above for r in g.rewards_G)), groups[-1])


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
    metadata = {**bare.metadata, "replaced_from_level": replaced}
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


def loss_mask_T(
    train_on: TrainOn, n_prefix: int, n_generated: int, advantage: float
) -> tuple[float, ...]:
    """Return 1 for each token of a response that carries a loss: T = n_prefix + n_generated.

    A forced prefix is never pushed down: with a negative advantage it carries none.

    >>> loss_mask_T("generated_and_prefix_if_positive", 2, 1, -0.5)
    (0.0, 0.0, 1.0)
    """
    is_prefix_trained = train_on == "generated_and_prefix_if_positive" and advantage >= 0
    generated = 0.0 if train_on == "none" else 1.0
    return (float(is_prefix_trained),) * n_prefix + (generated,) * n_generated


def _one_task(groups: Sequence[RolloutGroup]) -> None:
    ids = sorted({g.task.task_id for g in groups})
    if len(ids) != 1:
        raise ConfigError(f"the groups to merge are of tasks {ids}; give groups of one task")
