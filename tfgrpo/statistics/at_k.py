"""Unbiased pass@k and max@k, with intervals over tasks.

Does not know what a reward means: for rewards 0 and 1 max@k is pass@k, for others only max@k is
the right name. Source: the estimator of Chen et al., "Evaluating Large Language Models Trained on
Code"; max@k is the same argument on order statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfgrpo.statistics.intervals import (
    Interval,
    Scores,
    check_finite,
    check_level,
    interval_of_mean,
    reward_width_of,
)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased chance that at least one of k draws is right, from c right of n.

    >>> pass_at_k(4, 1, 2)
    0.5

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n (k draws cannot be judged from fewer).
    """
    if not 0 <= c <= n:
        raise ValueError(f"c={c} right draws of n={n}: c must lie in 0..n")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} from n={n} draws: k must lie in 1..n; draw more or ask less")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def max_at_k(rewards: Sequence[float], k: int) -> float:
    """Return the unbiased expected best reward of k draws out of the given ones.

    Equal to `pass_at_k` for rewards 0 and 1; for other rewards this name, not pass@k, is right.

    >>> max_at_k([0.0, 0.5, 1.0], 2)
    0.8333333333333333

    Raises:
        ValueError: not 1 <= k <= the number of rewards.
    """
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"max@{k} from n={n} draws: k must lie in 1..n; draw more or ask less")
    total = math.comb(n, k)
    ranked = sorted(rewards)
    return math.fsum(math.comb(i, k - 1) / total * ranked[i] for i in range(k - 1, n))


def pass_at_k_interval(
    scores: Scores, k: int, *, level: float = 0.95, n_boot: int = 4000, seed: int = 0
) -> Interval:
    """Return max@k (pass@k for rewards 0 and 1) over the tasks that have at least k draws.

    Raises:
        ValueError: no task has k draws, or `level` is not in (0, 1).
    """
    import numpy as np

    check_level(level)
    check_finite(scores)
    enough = {task: rewards for task, rewards in scores.items() if len(rewards) >= k}
    if not enough:
        most = max((len(r) for r in scores.values()), default=0)
        raise ValueError(f"no task has {k} graded draws (the most is {most}); ask for a smaller k")
    values = np.array([max_at_k(rewards, k) for rewards in enough.values()])
    return interval_of_mean(values, reward_width_of(enough), level, n_boot, seed)
