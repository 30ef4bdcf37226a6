"""ADHint-style hints: the harder a task was without help, the longer the forced prefix.

Approximation throughout: the paper's formulas are not public. Ours: a linear ratio, an exponential
consistency weight, and the cross-weighted advantages of `merge.side_by_side`. Pure functions; does
not know how a prefix is forced or where entropies come from.

Source: ADHint (arXiv 2512.13095), abstract and summaries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfgrpo.errors import ConfigError
from tfgrpo.rl.hints.plan import HintPlan, cut_before_leak
from tfgrpo.rl.hints.texts import share_of
from tfgrpo.rollout import RolloutGroup, Task


def difficulty(group: RolloutGroup) -> float | None:
    """Return 1 − mean reward of the rollouts without help; None where none was graded.

    Raises:
        ConfigError: a mean outside [0, 1].
    """
    mean = group.mean_reward
    if mean is None:
        return None
    if not 0 <= mean <= 1:
        raise ConfigError(f"mean reward {mean} is outside [0, 1]; difficulty is 1 minus it")
    return 1 - mean


def hint_ratio(
    difficulty: float, *, w_min: float = 0.0, w_max: float = 0.5, noise: float = 0.0
) -> float:
    """Return the share of the reference to give, in [0, 1], rising with difficulty.

    Approximation: linear, w_min + (w_max − w_min) · difficulty + noise.

    Args:
        difficulty: in [0, 1].
        w_min: share at difficulty 0.
        w_max: share at difficulty 1, at least `w_min`.
        noise: a draw that the caller adds; the result is clipped to [0, 1].

    Raises:
        ConfigError: an argument out of its range.

    >>> hint_ratio(0.0), hint_ratio(0.5), hint_ratio(1.0)
    (0.0, 0.25, 0.5)
    """
    if not (0 <= difficulty <= 1 and 0 <= w_min <= w_max <= 1):
        raise ConfigError(
            f"difficulty {difficulty}, w_min {w_min}, w_max {w_max}: all must be in [0, 1] and "
            "w_min at most w_max"
        )
    return min(1.0, max(0.0, w_min + (w_max - w_min) * difficulty + noise))


def prefix_plan(task: Task, solution: str, ratio: float, *, n: int) -> HintPlan:
    """Return the plan of n rollouts that continue the first `ratio` of a reference solution.

    The prefix ends before the answer; with `ratio` 0 the plan is the bare task.
    """
    cut = share_of(solution, ratio)
    safe = cut_before_leak(solution, task)
    prefix = cut if len(cut) <= len(safe) else safe
    if not prefix:
        return HintPlan(n=n)
    return HintPlan(
        response_prefix=prefix,
        n=n,
        level=1,
        source="reference",
        train_on="generated_and_prefix_if_positive",
        condition="original",
    )


def consistency_weights_T(prefix_entropy_T: Sequence[float], continuation: float) -> list[float]:
    """Return a weight in (0, 1] for each forced token: 1 where its entropy is the policy's own.

    Approximation: exp(−|H_t − H| / H) with H the mean entropy of the rollout's own continuation.

    Args:
        prefix_entropy_T: the policy's entropy at each forced token, nats.
        continuation: mean entropy of the tokens that the policy wrote, nats, above 0.

    Raises:
        ConfigError: `continuation` is not above 0.

    >>> [round(w, 3) for w in consistency_weights_T([1.0, 2.0], 1.0)]
    [1.0, 0.368]
    """
    if continuation <= 0:
        raise ConfigError(f"mean entropy of the continuation is {continuation}; it must be above 0")
    return [math.exp(-abs(h - continuation) / continuation) for h in prefix_entropy_T]
