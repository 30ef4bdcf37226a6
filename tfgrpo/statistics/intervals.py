"""Intervals of means and of paired differences, a task being the unit of evidence.

Draws of one task are not independent, so every interval resamples tasks and never draws. Scores
go in as `{task_id: [reward, ...]}`; only rewards of graded rollouts belong there. Everything is a
pure function of its arguments and `seed`.

Does not know groups, libraries, files or what a reward means. Sources: BCa bootstrap (Efron and
Tibshirani, "An Introduction to the Bootstrap", chapter 14) with quantiles widened from the normal
to Student's t (Hesterberg, "What Teachers Should Know about the Bootstrap", section 4), crossed
random effects with Satterthwaite's degrees of freedom. Taking the wider of the two bounds and the
guard for arms that never differ are our own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Scores = Mapping[str, Sequence[float]]
"""Rewards of graded rollouts by task id; a task without rewards is left out of every figure."""


def level_words(level: float) -> str:
    """Return a level for people; one close to 1 is not rounded to it.

    >>> level_words(0.95), level_words(0.9962)
    ('95%', '99.62%')
    """
    return f"{100 * level:.4g}%"


_CHUNK = 2_000_000
"""Resampled values held at once."""


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

    @property
    def excludes_zero(self) -> bool:
        """True when the whole range lies on one side of zero."""
        return self.low > 0 or self.high < 0

    def within(self, reward_range: tuple[float, float], *, of_difference: bool = False) -> Interval:
        """Return the interval cut to what a mean of such rewards, or a difference of two, can be.

        The truth lies there for certain, so no coverage is lost.

        >>> Interval(0.9, 0.7, 1.1, 0.95, 9).within((0.0, 1.0)).high
        1.0
        """
        least, most = reward_range
        if of_difference:
            least, most = least - most, most - least
        return replace(self, low=max(self.low, least), high=min(self.high, most))

    def to_dict(self) -> dict[str, float | int]:
        """Return the JSON form."""
        return {
            "estimate": self.estimate,
            "low": self.low,
            "high": self.high,
            "level": self.level,
            "n_tasks": self.n_tasks,
        }

    def __str__(self) -> str:
        return f"{self.estimate:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def paired_difference(
    base: Scores, other: Scores, *, level: float = 0.95, n_boot: int = 4000, seed: int = 0
) -> Interval:
    """Return how much better `other` is than `base`, a task being the unit.

    Per task the difference of the two means, then their mean over the tasks present in both;
    the range is a bootstrap over tasks (`bounds_of_mean`).

    Raises:
        ValueError: no task has rewards in both, or `level` is not in (0, 1).
    """
    check_level(level)
    differences, width = _differences(base, other)
    tail = (1 - level) / 2
    low, high = bounds_of_mean(differences, width, (tail, 1 - tail), n_boot, seed)
    return Interval(float(differences.mean()), low, high, level, len(differences))


def lower_bound(
    base: Scores, other: Scores, *, level: float = 0.90, n_boot: int = 4000, seed: int = 0
) -> float:
    """Return the one-sided lower bound of the paired difference: it lies below the truth in a
    share `level` of repetitions.

    Raises:
        ValueError: no task has rewards in both, or `level` is not in (0, 1).
    """
    check_level(level)
    differences, width = _differences(base, other)
    return bounds_of_mean(differences, width, (1 - level, level), n_boot, seed)[0]


def mean_interval(
    scores: Scores, *, level: float = 0.95, n_boot: int = 4000, seed: int = 0
) -> Interval:
    """Return the mean over tasks of the mean reward a task (pass@1 for rewards 0 and 1, mean@k
    where each task has k draws), with a bootstrap over tasks.

    Raises:
        ValueError: no task has rewards, or `level` is not in (0, 1).
    """
    import numpy as np

    check_level(level)
    means = _task_means(scores)
    if not means:
        raise ValueError("no task has a reward: there is nothing to average")
    values = np.array([means[task] for task in sorted(means)])  # in any order the same interval
    return interval_of_mean(values, reward_width_of(scores), level, n_boot, seed)


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
    import numpy as np
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
    import numpy as np
    from scipy.special import stdtrit

    check_level(level)
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
        width = reward_width_of(*(scores for pair in pairs for scores in pair))
        return interval_of_mean(by_task, width, level, 1, 0)
    satterthwaite = max(1.0, total**2 / float((squares**2 / freedom).sum()))
    half = float(stdtrit(satterthwaite, (1 + level) / 2)) * math.sqrt(total / table.size)
    return Interval(grand, grand - half, grand + half, level, n_tasks)


_MANY = 20_000
"""Tasks from which the mean of any bounded reward is normal to three digits: resampling them some
thousand times would take minutes and say the same."""


def bounds_of_mean(
    values: Floats, width: float, tails: tuple[float, float], n_boot: int, seed: int
) -> tuple[float, float]:
    """Return the bounds of the mean of one value a task, at two tail probabilities.

    The wider of Student's t and the t-widened BCa bootstrap on each side: t fails on skewed
    differences (a few tasks that flip), BCa alone is too narrow for few or lumpy tasks. Where all
    values are equal there is no variance to go by; then the share of tasks that could differ by
    the whole reward `width` without having been met, 1 - tail**(1/n), is the bound.
    """
    import numpy as np
    from scipy.special import ndtr, ndtri, stdtrit

    n, centre = len(values), float(values.mean())
    if n < 2 or float(values.std()) <= 1e-12 * width:
        rare = width * (1 - tails[0] ** (1 / n))
        return centre - rare, centre + rare
    t_low, t_high = (float(stdtrit(n - 1, tail)) for tail in tails)
    error = float(values.std(ddof=1)) / math.sqrt(n)
    if n > _MANY:
        return centre + t_low * error, centre + t_high * error
    boot = _bootstrap_means(values, n_boot, seed)
    tied = np.abs(boot - centre) <= 1e-12 * width
    below = float(((boot < centre) & ~tied).mean() + tied.mean() / 2)
    bias = float(ndtri(min(max(below, 0.5 / n_boot), 1 - 0.5 / n_boot)))
    gaps = values - centre
    skew = float((gaps**3).sum() / (6 * (gaps**2).sum() ** 1.5))

    def shifted(t: float) -> float:
        z = bias + t * math.sqrt(n / (n - 1))
        bend = 1 - skew * z
        return float(ndtr(bias + z / bend)) if bend > 0 else float(z > 0)

    low, high = np.quantile(boot, [shifted(t_low), shifted(t_high)])
    return min(float(low), centre + t_low * error), max(float(high), centre + t_high * error)


_BY_COUNTS = 1000
"""Values from which a resample is drawn as how often each distinct value comes, which has the same
distribution and takes a hundredth of the time."""


def _bootstrap_means(values: Floats, n_boot: int, seed: int) -> Floats:
    """Means of `n_boot` resamples of the values."""
    import numpy as np

    rng, n = np.random.default_rng(seed), len(values)
    if n >= _BY_COUNTS:
        distinct, first, counts = np.unique(values, return_index=True, return_counts=True)
        if 10 * len(distinct) <= n:
            order = np.argsort(first)  # then the arms swapped draw the same
            drawn = rng.multinomial(n, counts[order] / n, size=n_boot)
            means: Floats = drawn @ distinct[order] / n
            return means
    rows = max(1, _CHUNK // n)
    parts = [
        values[rng.integers(n, size=(min(rows, n_boot - start), n))].mean(axis=1)
        for start in range(0, n_boot, rows)
    ]
    return np.concatenate(parts)


def interval_of_mean(
    values: Floats, width: float, level: float, n_boot: int, seed: int
) -> Interval:
    """Return the interval of the mean of one value a task; `width` is the range of rewards."""
    tail = (1 - level) / 2
    low, high = bounds_of_mean(values, width, (tail, 1 - tail), n_boot, seed)
    return Interval(float(values.mean()), low, high, level, len(values))


def check_level(level: float) -> None:
    """Raise `ValueError` for a level that is not a probability."""
    if not 0 < level < 1:
        raise ValueError(f"level {level!r} is not a probability between 0 and 1, such as 0.95")


def check_finite(scores: Scores) -> None:
    """Raise `ValueError` for a reward that is no finite number, naming its task."""
    for task, rewards in scores.items():
        for reward in rewards:
            if not math.isfinite(reward):
                raise ValueError(
                    f"task {task!r} has reward {reward!r}: only finite rewards can be averaged; "
                    "leave out what has no reward"
                )


def _task_means(scores: Scores) -> dict[str, float]:
    check_finite(scores)
    return {t: math.fsum(r) / len(r) for t, r in scores.items() if len(r)}


def reward_width_of(*arms: Scores) -> float:
    """Return the largest minus the smallest reward seen; 1 where all are equal."""
    rewards = [x for scores in arms for r in scores.values() for x in r]
    width = max(rewards) - min(rewards)
    return float(width) if width > 0 else 1.0


def _differences(base: Scores, other: Scores) -> tuple[Floats, float]:
    """Per-task differences in sorted order of tasks, and the width of the rewards seen."""
    import numpy as np

    means, others = _task_means(base), _task_means(other)
    shared = sorted(means.keys() & others.keys())
    if not shared:
        raise ValueError(
            f"no task has rewards in both arms ({len(means)} tasks in base, {len(others)} in "
            "other): a paired difference needs the same tasks in both"
        )
    width = reward_width_of({t: base[t] for t in shared}, {t: other[t] for t in shared})
    return np.array([others[t] - means[t] for t in shared]), width
