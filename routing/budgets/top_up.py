"""Rules that add rollouts to a step's groups as their rewards come in.

A few draws of every task, then further ones into the same groups, asked again until a rule adds
nothing or the budget is spent. Of the shape `tfgrpo.protocols.GrowingAllocator`, for training and
for learning alike, and pure: equal arguments, equal counts. Does not know who runs the rollouts.

Sources: named at each class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.routing.budgets.posterior_gain import GRID, PosteriorGain, check_budget, uniform
from tfgrpo.routing.budgets.practice import Practice
from tfgrpo.routing.budgets.published import half_width_drops
from tfgrpo.routing.estimator.value_model import Estimates
from tfgrpo.routing.records import outcomes_of_groups

__all__ = ["DarsTopUp", "GainTopUp", "XrpoTopUp"]

Array = NDArray[np.float64]


def _counts(
    tasks: Sequence[Task], groups: Sequence[RolloutGroup], success_at: float | None
) -> tuple[Array, Array]:
    """Successes and graded rollouts of each task in this step."""
    seen = {o.prompt_id: o for o in outcomes_of_groups(groups, success_at=success_at)}
    found = [seen.get(t.task_id) for t in tasks]
    k = [0.0 if o is None else o.successes for o in found]
    return np.array(k, dtype=float), np.array([0.0 if o is None else o.trials for o in found])


def _first(n_tasks: int, each: int, budget: int) -> list[int]:
    """`each` a task, or the budget dealt evenly where it does not cover that."""
    check_budget(budget)
    return [each] * n_tasks if each * n_tasks <= budget else uniform(n_tasks, budget)


def _grown(sizes: Sequence[int], wanted: Sequence[int], budget: int) -> list[int]:
    """Sizes with what is wanted, scaled down to what is left, largest remainders first."""
    left, total = budget - sum(sizes), sum(wanted)
    if total <= left:
        return [s + w for s, w in zip(sizes, wanted, strict=True)]
    exact = np.array(wanted, dtype=float) * left / total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")[: left - int(counts.sum())]
    counts[order] += 1
    return [s + int(c) for s, c in zip(sizes, counts, strict=True)]


@dataclass(frozen=True, slots=True)
class GainTopUp:
    """More rollouts where a group that is not mixed yet is likeliest to become so, then where they
    narrow the mean most.

    After V_0 (arXiv 2602.03584; the rule is our reading): `base` draws a task, the rest by the
    posterior of each task's success rate, which has seen the history, the predictions of `predict`
    and this step's draws.
    """

    base: int = 2
    step: int = 2
    """Most further draws of a group between two looks."""
    cap: int = 64
    spends_all: bool = True
    """What mixed groups leave over goes where it lowers the variance of a group's mean most; False
    leaves it."""
    predict: Callable[[Sequence[Task]], Estimates] | None = None
    rule: PosteriorGain = field(default_factory=lambda: PosteriorGain(max_seen=8.0))

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return `base` a task."""
        return _first(len(tasks), self.base, budget)

    def grow(
        self,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        groups: Sequence[RolloutGroup],
        sizes: Sequence[int],
        budget: int,
    ) -> list[int]:
        """Return the sizes with further rollouts of some groups."""
        left, plan = budget - sum(sizes), self._plan
        if left < 1 or not tasks:
            return list(sizes)
        weights = plan.posterior(tasks, history)
        k, n = _counts(tasks, groups, self.rule.success_at)
        room = np.maximum(self.cap - np.array(sizes), 0)
        added = self._turning(weights, k, n, ((k == 0) | (k == n), room), left)
        if not any(added) and self.spends_all:
            open_n = np.where(room > 0, np.maximum(n, 1.0), np.inf)
            added = np.minimum(plan.spread(weights, k, open_n, left), room).tolist()
        return _grown(sizes, added, budget)

    def predictions(self, tasks: Sequence[Task], history: Sequence[RolloutGroup]) -> list[float]:
        """Return the expected success rate of each task before this step's draws."""
        return [float(p) for p in self._plan.posterior(tasks, history) @ GRID]

    @property
    def _plan(self) -> Practice:
        return Practice(size=2, probe=1, predict=self.predict, rule=self.rule)

    def _turning(
        self,
        weights: Array,
        k: Array,
        n: Array,
        may: tuple[NDArray[np.bool_], NDArray[np.int64]],
        left: int,
    ) -> list[int]:
        """Greedy on the chance that a group turns mixed within its further draws; `may` says which
        groups are open, and how much room each has."""
        seen = weights * GRID ** k[:, None] * (1 - GRID) ** (n - k)[:, None]
        seen /= np.maximum(seen.sum(axis=1, keepdims=True), 1e-300)
        same = np.where((k == n)[:, None], GRID, 1 - GRID)
        most = min(self.step, left)
        # chance that the next draw turns it, given that those before did not
        gains = np.stack([(seen * same**j * (1 - same)).sum(axis=1) for j in range(most)], axis=1)
        fits = may[0][:, None] & (may[1][:, None] > np.arange(most)[None, :])
        gains = np.where(fits, gains, 0.0)
        order = np.argsort(-gains, axis=None, kind="stable")[:left]
        useful = [int(i) // most for i in order if gains.flat[i] > 0]
        return [int(c) for c in np.bincount(useful, minlength=len(k))]


@dataclass(frozen=True, slots=True)
class DarsTopUp:
    """More rollouts of hard tasks until their summed |advantage| matches a task at one half
    (approximation).

    A group of N rollouts at rate a has Σ|A| = 2N√(a(1−a)) with the population deviation. `equal`
    raises a group below one half to that of `base` rollouts at one half, `hard` to 2(1 − a) times
    it. Each look adds the fewest draws that could reach the target; never-solved groups reach the
    cap. Unlike `published.Dars` the rates are this step's own. Source: DARS, abstract; both
    schedules recalled.
    """

    base: int = 4
    cap: int = 32
    schedule: Literal["equal", "hard"] = "equal"
    success_at: float | None = None

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return `base` a task."""
        return _first(len(tasks), self.base, budget)

    def grow(
        self,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        groups: Sequence[RolloutGroup],
        sizes: Sequence[int],
        budget: int,
    ) -> list[int]:
        """Return the sizes with further rollouts of hard groups."""
        k, n = _counts(tasks, groups, self.success_at)
        wanted = [
            min(self._missing(int(a), int(b)), max(self.cap - size, 0))
            for a, b, size in zip(k, n, sizes, strict=True)
        ]
        return _grown(sizes, wanted, budget)

    def _missing(self, k: int, n: int) -> int:
        if not n or 2 * k >= n or n >= self.cap:
            return 0
        target = self.base * (1.0 if self.schedule == "equal" else 2 * (1 - k / n))
        for more in range(self.cap - n + 1):
            # the best case: every further draw succeeds, up to one half of the group
            won = min(k + more, (n + more) / 2)
            if 2 * math.sqrt(won * (n + more - won)) >= target - 1e-9:
                return more
        return self.cap - n


@dataclass(frozen=True, slots=True)
class XrpoTopUp:
    """Base draws, then by the expected drop of a mean's half-width and a bonus for few draws
    (approximation).

    h(n) = t·s/√n over this step's draws; groups of `settled_at` equal rewards get none. Source:
    XRPO, abstract and summary; the bonus form is our reading.
    """

    base: int = 2
    cap: int = 64
    confidence: float = 0.9
    bonus: float = 0.1
    settled_at: int = 8
    share: float = 0.5
    """Of what is left, dealt out between two looks."""
    success_at: float | None = None

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return `base` a task."""
        return _first(len(tasks), self.base, budget)

    def grow(
        self,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        groups: Sequence[RolloutGroup],
        sizes: Sequence[int],
        budget: int,
    ) -> list[int]:
        """Return the sizes with further rollouts of unsettled groups."""
        left = budget - sum(sizes)
        k, n = _counts(tasks, groups, self.success_at)
        settled = (n >= self.settled_at) & ((k == 0) | (k == n))
        room = np.where(settled, 0, np.maximum(self.cap - np.array(sizes), 0))
        now = min(left, max(len(tasks), math.ceil(self.share * left)))
        added = half_width_drops(k, n, room, now, confidence=self.confidence, bonus=self.bonus)
        return _grown(sizes, added, budget)
