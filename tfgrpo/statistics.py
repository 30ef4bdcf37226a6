"""Paired comparisons clustered by task, pass@k, noise floors and what a run could detect.

The unit of evidence is the task: draws of one task are not independent, so every interval
resamples tasks and never draws. Scores go in as `{task_id: [reward, ...]}`; only rewards of
graded rollouts belong there. Everything is a pure function of its arguments and `seed`.

Does not know groups, libraries, files or what a reward means. Sources: studentised bootstrap
(Efron and Tibshirani, "An Introduction to the Bootstrap", chapter 12), unbiased pass@k (Chen et
al., "Evaluating Large Language Models Trained on Code"), crossed random effects with
Satterthwaite's degrees of freedom; the guard for rare changes and the spending rule are our own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

__all__ = [
    "Interval",
    "NoiseFloor",
    "Scores",
    "gate_level",
    "lower_bound",
    "max_at_k",
    "mean_interval",
    "min_detectable",
    "noise_floor",
    "paired_difference",
    "pass_at_k",
    "pass_at_k_interval",
    "permutation_p",
    "seeds_difference",
]

Scores = Mapping[str, Sequence[float]]
"""Rewards of graded rollouts by task id; a task without rewards is left out of every figure."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the range that covers the truth in a share `level` of repetitions."""

    estimate: float
    low: float
    high: float
    level: float
    """Two-sided coverage, in (0, 1)."""
    n_tasks: int
    """How many tasks it rests on."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "estimate": self.estimate,
            "low": self.low,
            "high": self.high,
            "level": self.level,
            "n_tasks": self.n_tasks,
        }

    @property
    def excludes_zero(self) -> bool:
        """True when the whole range lies on one side of zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.estimate:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


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


def paired_difference(
    base: Scores, other: Scores, *, level: float = 0.95, n_boot: int = 4000, seed: int = 0
) -> Interval:
    """Return how much better `other` is than `base`, a task being the unit.

    Per task the difference of the two means, then their mean over the tasks present in both;
    the range is a studentised bootstrap over tasks.

    Raises:
        ValueError: no task has rewards in both, or `level` is not in (0, 1).
    """
    _check_level(level)
    differences, width = _differences(base, other)
    tail = (1 - level) / 2
    low, high = _bounds(differences, width, (tail, 1 - tail), n_boot, seed)
    return Interval(float(differences.mean()), low, high, level, len(differences))


def lower_bound(
    base: Scores, other: Scores, *, level: float = 0.90, n_boot: int = 4000, seed: int = 0
) -> float:
    """Return the one-sided lower bound of the paired difference: it lies below the truth in a
    share `level` of repetitions.

    Raises:
        ValueError: no task has rewards in both, or `level` is not in (0, 1).
    """
    _check_level(level)
    differences, width = _differences(base, other)
    return _bounds(differences, width, (1 - level, level), n_boot, seed)[0]


def mean_interval(
    scores: Scores, *, level: float = 0.95, n_boot: int = 4000, seed: int = 0
) -> Interval:
    """Return the mean over tasks of the mean reward a task (pass@1 for rewards 0 and 1, mean@k
    where each task has k draws), with a bootstrap over tasks.

    Raises:
        ValueError: no task has rewards, or `level` is not in (0, 1).
    """
    _check_level(level)
    means = _task_means(scores)
    if not means:
        raise ValueError("no task has a reward: there is nothing to average")
    values = np.array(list(means.values()))
    return _interval(values, _reward_width(scores), level, n_boot, seed)


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
    _check_level(level)
    enough = {task: rewards for task, rewards in scores.items() if len(rewards) >= k}
    if not enough:
        most = max((len(r) for r in scores.values()), default=0)
        raise ValueError(f"no task has {k} graded draws (the most is {most}); ask for a smaller k")
    values = np.array([max_at_k(rewards, k) for rewards in enough.values()])
    return _interval(values, _reward_width(enough), level, n_boot, seed)


def permutation_p(
    base: Scores,
    other: Scores,
    *,
    alternative: Literal["two-sided", "greater", "less"] = "two-sided",
    n_permutations: int = 9999,
    seed: int = 0,
) -> float:
    """Return the p-value of "the arms are exchangeable within each task".

    Swaps the arms of whole tasks; exact where 2**tasks does not pass `n_permutations`. `greater`
    asks whether `other` is better.

    Raises:
        ValueError: no task has rewards in both.
    """
    from scipy.stats import permutation_test

    differences, _ = _differences(base, other)
    if not differences.any():
        return 1.0
    result = permutation_test(
        (differences, np.zeros_like(differences)),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=n_permutations,
        alternative=alternative,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def seeds_difference(pairs: Sequence[tuple[Scores, Scores]], *, level: float = 0.95) -> Interval:
    """Combine several learning seeds, each a (base, other) pair on the same held-out tasks.

    Seeds and tasks are crossed random effects, so the range says what a further learning run on
    further tasks would give, not only what these libraries do. With one seed the variance of
    learning is unknown: use `paired_difference` and say so.

    Raises:
        ValueError: fewer than two pairs, or fewer than two tasks with rewards in all of them.
    """
    _check_level(level)
    if len(pairs) < 2:
        raise ValueError(
            f"{len(pairs)} learning seed(s): at least 2 are needed to see their spread"
        )
    means = [(_task_means(base), _task_means(other)) for base, other in pairs]
    tasks = sorted(set.intersection(*(set(b) & set(o) for b, o in means)))
    if len(tasks) < 2:
        raise ValueError(f"{len(tasks)} task(s) have rewards under every seed: at least 2 needed")
    table = np.array([[o[t] - b[t] for t in tasks] for b, o in means])  # (seeds, tasks)
    n_seeds, n_tasks = table.shape
    grand = float(table.mean())
    by_seed, by_task = table.mean(axis=1), table.mean(axis=0)
    rest = table - by_seed[:, None] - by_task[None, :] + grand
    squares = np.array(
        [
            n_tasks * ((by_seed - grand) ** 2).sum() / (n_seeds - 1),
            n_seeds * ((by_task - grand) ** 2).sum() / (n_tasks - 1),
            (rest**2).sum() / ((n_seeds - 1) * (n_tasks - 1)),
        ]
    )
    # E[MS_seed + MS_task - MS_rest] / cells is the variance of the grand mean.
    freedom = np.array([n_seeds - 1, n_tasks - 1, (n_seeds - 1) * (n_tasks - 1)])
    total = max(float(squares[0] + squares[1] - squares[2]), float(squares[:2].max()))
    if total <= 0:
        return Interval(grand, grand, grand, level, n_tasks)
    satterthwaite = max(1.0, total**2 / float((squares**2 / freedom).sum()))
    half = float(stdtrit(satterthwaite, (1 + level) / 2)) * math.sqrt(total / table.size)
    return Interval(grand, grand - half, grand + half, level, n_tasks)


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
    _check_level(level)
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
    _check_level(level)
    _check_level(power)
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
    _check_level(level)
    if look < 1 or (looks is not None and look > looks):
        raise ValueError(f"look {look} of {looks}: looks are counted from 1 to the planned number")
    part = 1 / looks if looks is not None else 1 / (look * (look + 1))
    return 1 - (1 - level) * part


# ------------------------------------------------------------------------------- inside


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level {level!r} is not a probability between 0 and 1, such as 0.95")


def _task_means(scores: Scores) -> dict[str, float]:
    return {t: math.fsum(r) / len(r) for t, r in scores.items() if len(r)}


def _reward_width(*arms: Scores) -> float:
    rewards = [x for scores in arms for r in scores.values() for x in r]
    width = max(rewards) - min(rewards)
    return float(width) if width > 0 else 1.0


def _differences(base: Scores, other: Scores) -> tuple[Floats, float]:
    """Per-task differences in sorted order of tasks, and the width of the rewards seen."""
    means, others = _task_means(base), _task_means(other)
    shared = sorted(means.keys() & others.keys())
    if not shared:
        raise ValueError(
            f"no task has rewards in both arms ({len(means)} tasks in base, {len(others)} in "
            "other): a paired difference needs the same tasks in both"
        )
    width = _reward_width({t: base[t] for t in shared}, {t: other[t] for t in shared})
    return np.array([others[t] - means[t] for t in shared]), width


def _interval(values: Floats, width: float, level: float, n_boot: int, seed: int) -> Interval:
    tail = (1 - level) / 2
    low, high = _bounds(values, width, (tail, 1 - tail), n_boot, seed)
    return Interval(float(values.mean()), low, high, level, len(values))


def _bounds(
    values: Floats, width: float, tails: tuple[float, float], n_boot: int, seed: int
) -> tuple[float, float]:
    """Studentised bootstrap bounds of the mean at the two tail probabilities."""
    n, centre = len(values), float(values.mean())
    rare = width * (1 - tails[0] ** (1 / n))
    if n < 2 or values.std() <= 1e-12 * width:
        return centre - rare, centre + rare
    picks = np.random.default_rng(seed).integers(n, size=(n_boot, n))
    drawn = values[picks]
    spread = drawn.std(axis=1, ddof=1)
    error = float(values.std(ddof=1)) / math.sqrt(n)
    usable = spread > 1e-12 * width
    scaled = (drawn.mean(axis=1)[usable] - centre) / (spread[usable] / math.sqrt(n))
    upper, lower = np.quantile(scaled, [tails[1], tails[0]])
    return centre - float(upper) * error, centre - float(lower) * error


def _within_variance(scores: Scores) -> float | None:
    """Pooled variance of the draws inside a task, or None where no task has two."""
    repeated = [np.asarray(r, dtype=float) for r in scores.values() if len(r) >= 2]
    if not repeated:
        return None
    squares = math.fsum(float(((r - r.mean()) ** 2).sum()) for r in repeated)
    return squares / sum(len(r) - 1 for r in repeated)
