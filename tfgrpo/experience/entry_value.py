"""What each experience is worth, measured: randomised inclusion, or leave-one-out on demand.

Rollouts that run anyway are given random parts of the library (`inclusion_plan`); the rewards then
tell each entry's effect without a rollout spent on it. An entry counts only where chance decided
whether it was shown, so a lesson learnt from hard tasks is not praised for their regression to
the mean.

Approximation: effects are taken as additive. The regression uses inclusion minus its probability
as regressor (centred on the known randomisation, after Robinson, "Root-N-Consistent
Semiparametric Regression"), random task effects (Swamy and Arora) and errors clustered by task.

Does not know libraries, the gate or how rollouts are made.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfgrpo.rollout import RolloutGroup
from tfgrpo.statistics import Interval, Scores, paired_difference, permutation_p

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = [
    "EntryValue",
    "Observation",
    "expected_power",
    "inclusion_plan",
    "leave_one_out",
    "observations_of",
    "value_entries",
]


@dataclass(frozen=True, slots=True)
class Observation:
    """One reward, and which entries the policy was shown out of those that chance decided on."""

    task_id: str
    reward: float
    included: frozenset[str]
    offered: frozenset[str]
    """Entries that were randomised; an entry that was always or never shown is not among them."""
    keep: float
    """Chance in (0, 1) with which each offered entry was included."""


@dataclass(frozen=True, slots=True)
class EntryValue:
    """The measured effect of one entry on the mean reward."""

    experience_id: str
    effect: Interval
    """Change of the mean reward by showing the entry; `n_tasks` counts the tasks that tell."""
    n_with: int
    """Rollouts that were shown it."""
    n_without: int
    """Rollouts that were not, by chance."""
    p_value: float
    """Two-sided, after Holm's correction for the number of entries judged together."""

    @property
    def is_harmful(self) -> bool:
        """True when the whole interval lies below zero: evict first."""
        return self.effect.high < 0


def inclusion_plan(
    experience_ids: Sequence[str], n: int, *, keep: float = 0.8, seed: int = 0
) -> list[frozenset[str]]:
    """Return which entries each of n draws is shown: each entry is left out equally often.

    Every entry is left out of round(n * (1 - keep)) draws, spread by `seed` independently of the
    other entries; so its inclusion chance is `keep` up to rounding.

    Raises:
        ValueError: `keep` is not in (0, 1).
    """
    if not 0 < keep < 1:
        raise ValueError(f"keep={keep!r}: an inclusion chance must lie strictly between 0 and 1")
    rng = random.Random(seed)
    left_out = [set[str]() for _ in range(n)]
    exact = n * (1 - keep)
    for experience_id in experience_ids:
        count = int(exact) + (rng.random() < exact - int(exact))
        for draw in rng.sample(range(n), count):
            left_out[draw].add(experience_id)
    everything = frozenset(experience_ids)
    return [everything - out for out in left_out]


def observations_of(groups: Iterable[RolloutGroup]) -> list[Observation]:
    """Return the observations of groups whose inclusion was randomised.

    Such a group has `offered` (a list of experience ids) and `keep` in its metadata; what was
    included is read from the sources of its context's parts. Other groups are passed over.
    """
    found = []
    for group in groups:
        offered = group.metadata.get("offered")
        if not offered:
            continue
        included = frozenset(p.source for p in group.context.parts) & frozenset(offered)
        keep = float(group.metadata.get("keep", 0.5))
        found += [
            Observation(group.task.task_id, reward, included, frozenset(offered), keep)
            for reward in group.rewards_G
        ]
    return found


def value_entries(observations: Sequence[Observation], *, level: float = 0.95) -> list[EntryValue]:
    """Return the value of every entry that was both shown and withheld, best lower bound first.

    Entries that chance never withheld (or never showed) are not in the list: nothing is known of
    them. Fewer than three tasks tell nothing either.
    """
    import numpy as np
    from scipy.special import stdtr, stdtrit

    entries = sorted({e for o in observations for e in o.offered})
    tasks = sorted({o.task_id for o in observations})
    shown = {e: sum(e in o.included for o in observations if e in o.offered) for e in entries}
    asked = {e: sum(e in o.offered for o in observations) for e in entries}
    entries = [e for e in entries if 0 < shown[e] < asked[e]]
    if len(tasks) < 3 or not entries or len(observations) <= len(entries) + 2:
        return []
    rewards = np.array([o.reward for o in observations])
    number = {task: i for i, task in enumerate(tasks)}
    rows = np.array([number[o.task_id] for o in observations])
    design = np.array([[_centred(o, e) for e in entries] for o in observations])
    design = np.column_stack([np.ones(len(rewards)), design])
    effects, errors = _clustered_fit(design, rewards, rows)
    freedom = len(tasks) - 1
    reach = float(stdtrit(freedom, (1 + level) / 2))
    ratios = np.abs(effects[1:]) / np.maximum(errors[1:], 1e-300)
    p_values = _holm([2 * float(stdtr(freedom, -r)) for r in ratios])
    values = [
        EntryValue(
            entry,
            Interval(float(b), float(b - reach * s), float(b + reach * s), level, len(tasks)),
            shown[entry],
            asked[entry] - shown[entry],
            p,
        )
        for entry, b, s, p in zip(entries, effects[1:], errors[1:], p_values, strict=True)
    ]
    return sorted(values, key=lambda v: (-v.effect.low, v.experience_id))


def expected_power(
    effect: float,
    n_rollouts: int,
    n_entries: int,
    *,
    n_tasks: int,
    keep: float = 0.5,
    reward_sd: float = 0.5,
    level: float = 0.95,
) -> float:
    """Return the chance that an entry of true `effect` is found among `n_entries`.

    `reward_sd` is the standard deviation of a reward within its task (0.5 is the most that
    rewards 0 and 1 can have). Approximation: noncentral t with tasks - 1 degrees of freedom and
    Bonferroni's bound for the first step of Holm's; rollouts of a task are taken as independent
    given the task.

    Raises:
        ValueError: fewer than three tasks, or `keep` not in (0, 1).
    """
    from scipy.special import nctdtr, stdtrit

    if n_tasks < 3 or not 0 < keep < 1:
        raise ValueError(f"n_tasks={n_tasks}, keep={keep!r}: 3 tasks and a chance in (0, 1) needed")
    shift = abs(effect) * math.sqrt(n_rollouts * keep * (1 - keep)) / reward_sd
    limit = float(stdtrit(n_tasks - 1, 1 - (1 - level) / 2 / n_entries))
    return 1 - float(nctdtr(n_tasks - 1, shift, limit))


async def leave_one_out(
    experience_ids: Sequence[str],
    evaluate: Callable[[Sequence[str]], Awaitable[Scores]],
    *,
    level: float = 0.95,
    seed: int = 0,
) -> list[EntryValue]:
    """Measure each entry by evaluating the library with and without it, best first.

    `evaluate` gets the ids to show and returns rewards by task, on the same tasks every time; it
    is awaited len(experience_ids) + 1 times, one after another.
    """
    everything = await evaluate(list(experience_ids))
    measured: list[tuple[str, Interval, int, int]] = []
    p_values = []
    for left_out in experience_ids:
        without = await evaluate([e for e in experience_ids if e != left_out])
        effect = paired_difference(without, everything, level=level, seed=seed)
        p_values.append(permutation_p(without, everything, seed=seed))
        shared = without.keys() & everything.keys()
        n_with, n_without = (sum(len(a[t]) for t in shared) for a in (everything, without))
        measured.append((left_out, effect, n_with, n_without))
    values = [
        EntryValue(entry, effect, n_with, n_without, p)
        for (entry, effect, n_with, n_without), p in zip(measured, _holm(p_values), strict=True)
    ]
    return sorted(values, key=lambda v: (-v.effect.low, v.experience_id))


def _centred(observation: Observation, entry: str) -> float:
    if entry not in observation.offered:
        return 0.0
    return float(entry in observation.included) - observation.keep


def _clustered_fit(
    design: Floats, rewards: Floats, rows: NDArray[np.int_]
) -> tuple[Floats, Floats]:
    """Random-effects least squares; coefficients and their errors clustered by task."""
    import numpy as np

    n_tasks = int(rows.max()) + 1
    sizes = np.bincount(rows, minlength=n_tasks).astype(float)
    first = np.linalg.lstsq(design, rewards, rcond=None)[0]
    share = _task_share(rewards - design @ first, rows, sizes)
    between = share[rows]
    x = design - between[:, None] * _means_by_task(design, rows, sizes)[rows]
    y = rewards - between * _means_by_task(rewards[:, None], rows, sizes)[rows, 0]
    inverse = np.linalg.pinv(x.T @ x)
    coefficients = inverse @ (x.T @ y)
    residuals = y - x @ coefficients
    scores = np.zeros((n_tasks, x.shape[1]))
    np.add.at(scores, rows, x * residuals[:, None])
    n, k = x.shape
    correction = n_tasks / (n_tasks - 1) * (n - 1) / (n - k)
    covariance = correction * inverse @ (scores.T @ scores) @ inverse
    return coefficients, np.sqrt(np.maximum(np.diag(covariance), 0.0))


def _task_share(residuals: Floats, rows: NDArray[np.int_], sizes: Floats) -> Floats:
    """How much of a task's mean to take off its rows: 0 for no task effect, 1 for nothing else."""
    import numpy as np

    if len(rows) == len(sizes):
        return np.zeros(len(sizes))  # one row a task: a task effect cannot be told from noise
    means = _means_by_task(residuals[:, None], rows, sizes)[:, 0]
    inside = float(((residuals - means[rows]) ** 2).sum()) / (len(rows) - len(sizes))
    typical = 1 / float((1 / sizes).mean())
    task_variance = max(0.0, float(means.var(ddof=1)) - inside / typical)
    if task_variance == 0.0:
        return np.zeros(len(sizes))
    return np.asarray(1 - np.sqrt(inside / (inside + sizes * task_variance)))


def _means_by_task(values: Floats, rows: NDArray[np.int_], sizes: Floats) -> Floats:
    import numpy as np

    sums = np.zeros((len(sizes), values.shape[1]))
    np.add.at(sums, rows, values)
    return sums / sizes[:, None]


def _holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted
