"""Noise floor, smallest detectable effect and the error that a gate may spend at each look.

What a run can and cannot show, told before it spends and measured again from its own draws.

Does not know tasks' texts, money or the gate's decisions. Source: normal theory for power;
Bonferroni spending; the worst case of unequal effects is our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfgrpo.statistics.intervals import Scores, check_finite, check_level


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """What a repetition of the same measurement moves by, with nothing changed."""

    width: float
    """A difference below this is what an A/A repetition shows in a share `level` of cases."""
    level: float
    n_tasks: int
    """Tasks with at least two draws: only they can tell."""
    draws: float
    """Draws a task in each arm of the comparison that `width` is for."""


def noise_floor(
    scores: Scores,
    *,
    draws: float | None = None,
    level: float = 0.95,
    n_splits: int = 2000,
    seed: int = 0,
) -> NoiseFloor:
    """Return the A/A noise of a measurement, from its own repeated draws.

    Each task's draws are split at random into two halves that differ by chance alone; the
    quantile of their mean difference over tasks is the floor, scaled to `draws` a task and arm
    (default: the mean number of draws that the tasks have).

    Raises:
        ValueError: no task has two draws.
    """
    import numpy as np

    check_level(level)
    check_finite(scores)
    repeated = [np.asarray(r, dtype=float) for r in scores.values() if len(r) >= 2]
    if not repeated:
        raise ValueError("no task has two graded draws: an A/A comparison needs repeated draws")
    wanted = draws or float(np.mean([len(r) for r in repeated]))
    rng = np.random.default_rng(seed)
    total = np.zeros(n_splits)
    for rewards in repeated:
        shuffled = rng.permuted(np.tile(rewards, (n_splits, 1)), axis=1)
        half = len(rewards) // 2
        gap = shuffled[:, :half].mean(axis=1) - shuffled[:, half:].mean(axis=1)
        # Splits of a and b draws vary like 1/a + 1/b; the comparison like 2/draws.
        total += gap * math.sqrt((2 / wanted) / (1 / half + 1 / (len(rewards) - half)))
    width = float(np.quantile(np.abs(total) / len(repeated), level))
    return NoiseFloor(width, level, len(repeated), wanted)


def min_detectable(
    n_tasks: int,
    draws: int,
    *,
    pilot: Scores | None = None,
    effect_sd: float | None = None,
    level: float = 0.95,
    power: float = 0.80,
    reward_width: float = 1.0,
) -> float:
    """Return the smallest true difference that a paired comparison finds with chance `power`.

    Args:
        n_tasks: tasks that both arms attempt.
        draws: rollouts a task and arm.
        pilot: earlier rewards; tasks with two or more draws give the variance within a task.
            Without any, the worst case of two-valued rewards is taken.
        effect_sd: how unequally tasks profit (standard deviation of the true differences).
            None is the worst case: the whole gain sits in the tasks that flip from the lowest to
            the highest reward.
        level: two-sided level of the interval.
        power: chance that the interval excludes zero.
        reward_width: largest minus smallest possible reward.

    Approximation: normal theory with Student's quantile, solved for the difference.

    Raises:
        ValueError: fewer than two tasks, no draws, or `level` or `power` outside (0, 1).
    """
    from scipy.special import ndtri, stdtrit

    check_level(level)
    check_level(power)
    if n_tasks < 2 or draws < 1:
        raise ValueError(f"n_tasks={n_tasks}, draws={draws}: at least 2 tasks and 1 draw needed")
    within = _within_variance(pilot) if pilot else None
    if within is None:
        within = reward_width**2 / 4
    reach = (float(stdtrit(n_tasks - 1, (1 + level) / 2)) + float(ndtri(power))) ** 2 / n_tasks
    if effect_sd is not None:
        return math.sqrt(reach * (2 * within / draws + effect_sd**2))
    # delta**2 = reach * (2 within / draws + delta (width - delta)): the positive root.
    a, b, c = 1 + reach, -reach * reward_width, -reach * 2 * within / draws
    return (-b + math.sqrt(b * b - 4 * a * c)) / (2 * a)


def gate_level(look: int, looks: int | None, level: float = 0.90) -> float:
    """Return the one-sided level of the gate's test at `look` (1-based), so that the chance of
    any wrong acceptance in a whole run stays within 1 - `level`.

    The allowed error is spent in equal parts over `looks` planned looks (Bonferroni: valid
    whatever the tests share). With `looks` None the number is open and look i gets the part
    1 / (i (i + 1)), which never sums past 1.

    >>> round(gate_level(1, 5, 0.90), 3), round(gate_level(2, None, 0.90), 4)
    (0.98, 0.9833)

    Raises:
        ValueError: `look` is not in 1..looks, or `level` is not in (0, 1).
    """
    check_level(level)
    if look < 1 or (looks is not None and look > looks):
        raise ValueError(f"look {look} of {looks}: looks are counted from 1 to the planned number")
    part = 1 / looks if looks is not None else 1 / (look * (look + 1))
    return 1 - (1 - level) * part


def choice_level(looks: int) -> float:
    """Return the two-sided level of the interval that the best version must pass in the end.

    The scores that chose among `looks` comparisons also judge the winner, so the allowed error of
    5 % is shared out over them.

    >>> choice_level(1), choice_level(5)
    (0.95, 0.99)
    """
    return 1 - 0.05 / max(1, looks)


def tasks_needed(
    difference: float,
    draws: int,
    *,
    pilot: Scores | None = None,
    level: float = 0.95,
    reward_width: float = 1.0,
    most: int = 100_000,
) -> int | None:
    """Return how many tasks find a true difference with 80 % power; None where `most` do not.

    The inverse of `min_detectable`, which falls with the number of tasks.
    """
    low, high = 2, most
    if difference <= 0:
        return None
    while low < high:
        middle = (low + high) // 2
        found = min_detectable(middle, draws, pilot=pilot, level=level, reward_width=reward_width)
        low, high = (low, middle) if found <= difference else (middle + 1, high)
    return low if low < most else None


def _within_variance(scores: Scores) -> float | None:
    """Pooled variance of the draws inside a task, or None where no task has two."""
    import numpy as np

    repeated = [np.asarray(r, dtype=float) for r in scores.values() if len(r) >= 2]
    if not repeated:
        return None
    squares = math.fsum(float(((r - r.mean()) ** 2).sum()) for r in repeated)
    return squares / sum(len(r) - 1 for r in repeated)
