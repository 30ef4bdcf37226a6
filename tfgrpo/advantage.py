"""Numeric group advantages: how much better each rollout did than its siblings.

Everything is a pure function of one group's rewards, so a group is never cut out of a flat list
and the order of rollouts changes nothing. Rollouts without a reward take no part: they are
neither averaged in nor given an advantage.

Does not know tokens, tasks or tensors. Sources: GRPO (Shao et al., 2024), Dr. GRPO (Liu et al.,
2025: mean only), RLOO (Ahmadian et al., 2024); ranks are classical (Wilcoxon scores).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import RolloutGroup

__all__ = [
    "AdvantageKind",
    "advantages_G",
    "group_advantages",
    "is_informative",
    "select_informative",
    "spread",
]

AdvantageKind = Literal["grpo", "grpo_population", "mean", "rloo", "rank"]
"""`grpo`: (r − mean) / sample standard deviation; `grpo_population`: the same with the population
deviation; `mean`: r − mean (Dr. GRPO); `rloo`: r − mean of the others; `rank`: average rank,
centred and scaled to [−1, 1]."""

TOLERANCE = 1e-9
"""Rewards closer than this are equal: their difference is rounding, not signal."""


def spread(rewards_G: Sequence[float]) -> float:
    """Return largest minus smallest reward; 0 for fewer than two.

    >>> spread([0.25, 1.0, 0.5])
    0.75
    """
    return max(rewards_G) - min(rewards_G) if len(rewards_G) > 1 else 0.0


def is_informative(rewards_G: Sequence[float], tolerance: float = TOLERANCE) -> bool:
    """Return whether the rewards differ by more than `tolerance`.

    >>> is_informative([0.5, 0.5]), is_informative([1.0]), is_informative([0.0, 1.0])
    (False, False, True)
    """
    return spread(rewards_G) > tolerance


def advantages_G(
    rewards_G: Sequence[float],
    kind: AdvantageKind = "grpo",
    *,
    epsilon: float = 0.0,
    tolerance: float = TOLERANCE,
) -> tuple[float, ...]:
    """Return one advantage a reward, in the order of `rewards_G`.

    A group without spread (equal rewards, or a single one) gives exactly 0 for each. Sums are
    rounded once, so a permutation of the rewards permutes the advantages and changes no digit.

    Args:
        rewards_G: rewards of one group's graded rollouts, finite.
        kind: see `AdvantageKind`.
        epsilon: added to the standard deviation; 0 is the plain formula, others use 1e-6 to 1e-4.
        tolerance: spread up to which rewards count as equal.

    Raises:
        ConfigError: an unknown kind, or a reward that is not finite.

    >>> [round(a, 4) for a in advantages_G([1.0, 0.0, 1.0, 0.0])]
    [0.866, -0.866, 0.866, -0.866]
    >>> advantages_G([1.0, 0.0, 1.0, 0.0], "grpo_population")
    (1.0, -1.0, 1.0, -1.0)
    >>> advantages_G([0.0, 0.0, 0.0, 0.0]), advantages_G([0.7])
    ((0.0, 0.0, 0.0, 0.0), (0.0,))
    """
    if kind not in get_args(AdvantageKind):
        allowed = ", ".join(get_args(AdvantageKind))
        raise ConfigError(f"advantage kind is {kind!r}; allowed are {allowed}")
    for reward in rewards_G:
        if not math.isfinite(reward):
            raise ConfigError(f"reward {reward!r} is not a finite number")
    size = len(rewards_G)
    if not is_informative(rewards_G, tolerance):
        return (0.0,) * size
    if kind == "rank":
        return _ranks_G(rewards_G)
    mean = math.fsum(rewards_G) / size
    centred_G = [r - mean for r in rewards_G]
    if kind == "mean":
        return tuple(centred_G)
    if kind == "rloo":  # r − (sum − r)/(G − 1) = (r − mean) · G/(G − 1)
        return tuple(c * size / (size - 1) for c in centred_G)
    degrees = size - 1 if kind == "grpo" else size
    # Scaled by the spread first: the squares of tiny or huge rewards would leave the float range.
    scale = spread(rewards_G)
    deviation = scale * math.sqrt(math.fsum((c / scale) ** 2 for c in centred_G) / degrees)
    return tuple(c / (deviation + epsilon) for c in centred_G)


def _ranks_G(rewards_G: Sequence[float]) -> tuple[float, ...]:
    size = len(rewards_G)
    below_G = [sum(other < r for other in rewards_G) for r in rewards_G]
    equal_G = [sum(other == r for other in rewards_G) for r in rewards_G]
    # Average 0-based rank of a tie is `below + (equal − 1)/2`; the middle is (size − 1)/2.
    return tuple(
        (2 * below + equal - size) / (size - 1)
        for below, equal in zip(below_G, equal_G, strict=True)
    )


def group_advantages(
    group: RolloutGroup, kind: AdvantageKind = "grpo", *, epsilon: float = 0.0
) -> Mapping[str, float]:
    """Return rollout id to advantage for the graded rollouts of a group; the rest are absent."""
    values_G = advantages_G(group.rewards_G, kind, epsilon=epsilon)
    return {r.rollout_id: a for r, a in zip(group.graded, values_G, strict=True)}


def select_informative(
    groups: Iterable[RolloutGroup], tolerance: float = TOLERANCE
) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """Return (groups with signal, groups without), in order, so that both can be counted."""
    kept: list[RolloutGroup] = []
    dropped: list[RolloutGroup] = []
    for group in groups:
        (kept if is_informative(group.rewards_G, tolerance) else dropped).append(group)
    return kept, dropped
