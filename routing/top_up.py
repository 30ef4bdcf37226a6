"""Which groups of a step get more rollouts once their first rewards are known.

Rules of the shape `tfgrpo.protocols.TopUp`, for training and for practice alike: a few draws of
every task, then further ones into the same groups, asked again until a rule adds nothing or the
budget is spent. Pure: equal arguments, equal counts. Does not know who runs the rollouts.

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
from tfgrpo.routing.allocation import GRID, PosteriorGain, check_budget, uniform
from tfgrpo.routing.allocation_published import half_width_drops
from tfgrpo.routing.estimator.value_model import Estimates
from tfgrpo.routing.practice import Practice

__all__ = ["DarsTopUp", "GainTopUp", "ProbeTopUp", "XrpoTopUp"]

Array = NDArray[np.float64]
Predict = Callable[[Sequence[Task]], Estimates]


def _counts(rewards: Sequence[Sequence[float]], success_at: float) -> tuple[Array, Array]:
    """Successes and trials of each group."""
    k = [sum(r >= success_at for r in group) for group in rewards]
    return np.array(k, dtype=float), np.array([len(g) for g in rewards], dtype=float)


def _first(n_tasks: int, each: int, budget: int) -> list[int]:
    """`each` a task, or the budget dealt evenly where it does not cover that."""
    check_budget(budget)
    return [each] * n_tasks if each * n_tasks <= budget else uniform(n_tasks, budget)


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
    success_at: float = 0.5
    """Smallest reward that is a success."""
    spends_all: bool = True
    """What mixed groups leave over goes where it lowers the variance of a group's mean most; False
    leaves it."""
    predict: Predict | None = None
    rule: PosteriorGain = field(default_factory=lambda: PosteriorGain(max_seen=8.0))

    def first(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return `base` a task."""
        return _first(len(tasks), self.base, budget)

    def more(
        self,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        rewards: Sequence[Sequence[float]],
        left: int,
    ) -> list[int]:
        """Return further rollouts of each group."""
        plan = Practice(size=2, probe=1, predict=self.predict, rule=self.rule)
        weights = plan.posterior(tasks, history)
        k, n = _counts(rewards, self.success_at)
        is_open = ((k == 0) | (k == n)) & (n < self.cap)
        added = self._turning(weights, k, n, is_open, left)
        if any(added) or not self.spends_all or not len(tasks):
            return added
        room = np.where(n < self.cap, n, np.inf)
        return plan.spread(weights, k, np.maximum(room, 1.0), left)

    def predictions(self, tasks: Sequence[Task], history: Sequence[RolloutGroup]) -> list[float]:
        """Return the expected success rate of each task before this step's draws."""
        plan = Practice(size=2, probe=1, predict=self.predict, rule=self.rule)
        return [float(p) for p in plan.posterior(tasks, history) @ GRID]

    def _turning(
        self, weights: Array, k: Array, n: Array, is_open: NDArray[np.bool_], left: int
    ) -> list[int]:
        """Greedy on the chance that a group turns mixed within its further draws."""
        seen = weights * GRID ** k[:, None] * (1 - GRID) ** (n - k)[:, None]
        seen /= np.maximum(seen.sum(axis=1, keepdims=True), 1e-300)
        same = np.where((k == n)[:, None], GRID, 1 - GRID)
        most = min(self.step, left)
        # chance that the next draw turns it, given that those before did not
        gains = np.stack([(seen * same**j * (1 - same)).sum(axis=1) for j in range(most)], axis=1)
        room = (self.cap - n)[:, None] > np.arange(most)[None, :]
        gains = np.where(is_open[:, None] & room, gains, 0.0)
        order = np.argsort(-gains, axis=None, kind="stable")[:left]
        useful = [int(i) for i in order if gains.flat[i] > 0]
        return [int(c) for c in np.bincount([i // most for i in useful], minlength=len(k))]


@dataclass(frozen=True, slots=True)
class ProbeTopUp:
    """A probe of every task; hopeless groups stop there, the others are finished to a fixed size.

    `Practice.judge` decides. What stopped groups leave over is for new tasks. Source: own.
    """

    size: int = 8
    probe: int = 3
    hope: float = 1.0
    success_at: float = 0.5
    predict: Predict | None = None
    rule: PosteriorGain = field(default_factory=lambda: PosteriorGain(max_seen=8.0))

    def first(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return the probe of each task."""
        return _first(len(tasks), self.probe, budget)

    def more(
        self,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        rewards: Sequence[Sequence[float]],
        left: int,
    ) -> list[int]:
        """Return what finishes the groups that are finished."""
        plan = Practice(self.size, self.probe, self.hope, predict=self.predict, rule=self.rule)
        k, n = _counts(rewards, self.success_at)
        wanted = plan.judge(plan.posterior(tasks, history), k, n).rollouts
        return _within(wanted, left)


@dataclass(frozen=True, slots=True)
class DarsTopUp:
    """More rollouts of hard tasks until their summed |advantage| matches a task at one half
    (approximation).

    A group of N rollouts at rate a has Σ|A| = 2N√(a(1−a)) with the population deviation. `equal`
    raises a group below one half to that of `base` rollouts at one half, `hard` to 2(1 − a) times
    it. Each look adds the fewest draws that could reach the target; never-solved groups reach the
    cap. Source: DARS, abstract; both schedules recalled.
    """

    base: int = 4
    cap: int = 32
    schedule: Literal["equal", "hard"] = "equal"
    success_at: float = 0.5

    def first(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return `base` a task."""
        return _first(len(tasks), self.base, budget)

    def more(
        self,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        rewards: Sequence[Sequence[float]],
        left: int,
    ) -> list[int]:
        """Return further rollouts of each group."""
        k, n = _counts(rewards, self.success_at)
        return _within([self._missing(int(a), int(b)) for a, b in zip(k, n, strict=True)], left)

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
    success_at: float = 0.5

    def first(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return `base` a task."""
        return _first(len(tasks), self.base, budget)

    def more(
        self,
        tasks: Sequence[Task],
        history: Sequence[RolloutGroup],
        rewards: Sequence[Sequence[float]],
        left: int,
    ) -> list[int]:
        """Return further rollouts of each group."""
        k, n = _counts(rewards, self.success_at)
        settled = (n >= self.settled_at) & ((k == 0) | (k == n))
        now = min(left, max(len(tasks), math.ceil(self.share * left)))
        return half_width_drops(
            k, n, np.where(settled, 0, np.maximum(self.cap - n, 0)), now,
            confidence=self.confidence, bonus=self.bonus,
        )  # fmt: skip


def _within(wanted: Sequence[int], left: int) -> list[int]:
    """Scale down to what is left, largest remainders first."""
    total = sum(wanted)
    if total <= left:
        return list(wanted)
    exact = np.array(wanted, dtype=float) * left / total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")[: left - int(counts.sum())]
    counts[order] += 1
    return [int(c) for c in counts]
