"""How many rollouts each task gets: rules of the shape `tfgrpo.protocols.Allocator`.

`PosteriorGain` spends where a mixed group becomes likelier, integrated over a posterior of the
success rate: point estimates lose to uniform at realistic noise. Its guard falls back to uniform
unless the lower bound of the gain is positive.

All rules are pure: equal arguments, equal counts, in the order of the tasks, summing to at most the
budget. History is groups that are done; only graded rollouts count.
Does not know who runs the rollouts, or the published rules (`published`).
Does not know stages within a step (`practice`).
Sources: V_0 (arXiv 2602.03584; the gain rule is our reading).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.routing.estimator.value_model import Estimates, ModelState
from tfgrpo.routing.records import outcomes_of_groups

__all__ = [
    "GRID",
    "PosteriorGain",
    "PredictionError",
    "Uniform",
    "mixed_share",
    "uniform",
]

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

GRID = np.concatenate([[0.002], np.linspace(0.02, 0.98, 49), [0.998]])
"""Success rates on which posteriors live."""


def mixed_share(p: Array, n: Counts | int) -> Array:
    """Return 1 − pⁿ − (1−p)ⁿ: the chance that n rollouts hold a success and a failure."""
    return np.maximum(1.0 - np.power(p, n) - np.power(1.0 - p, n), 0.0)


def uniform(n_tasks: int, budget: int) -> list[int]:
    """Return the budget dealt evenly; the first tasks get the remainder."""
    check_budget(budget)
    if not n_tasks:
        return []
    each, rest = divmod(budget, n_tasks)
    return [each + (i < rest) for i in range(n_tasks)]


def check_budget(budget: int) -> None:
    """Refuse a budget that is not a whole number of rollouts from 0 up.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, np.integer)) or budget < 0:
        raise ConfigError(f"budget {budget!r}: allowed is a whole number of rollouts from 0 up")


def seen_counts(
    tasks: Sequence[Task], history: Sequence[RolloutGroup], success_at: float | None, decay: float
) -> tuple[Array, Array]:
    """Return successes and trials a task; a group `a` groups older than the task's newest counts
    decay**a."""
    by_task: dict[str, list[tuple[float, float]]] = {}
    for o in outcomes_of_groups(history, success_at=success_at):
        by_task.setdefault(o.prompt_id, []).append((o.successes, o.trials))
    k, n = np.zeros(len(tasks)), np.zeros(len(tasks))
    for i, task in enumerate(tasks):
        for age, (successes, trials) in enumerate(reversed(by_task.get(task.task_id, []))):
            k[i] += successes * decay**age
            n[i] += trials * decay**age
    return k, n


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every task gets the same."""

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return the counts."""
        return uniform(len(tasks), budget)


def pool_weights(k: Array, n: Array, rounds: int = 30) -> Array:
    """Return the distribution of success rates over `GRID` behind counts k of n.

    Expectation maximisation of the mixing weights from a flat start, stopped early, with one
    pseudo-task spread evenly; no counts give the flat start.
    """
    weights = np.full(len(GRID), 1.0 / len(GRID))
    known = n > 0
    if not known.any():
        return weights
    like = _binomial(k[known], n[known])
    for _ in range(rounds):
        share = like * weights
        share /= share.sum(axis=1, keepdims=True)
        weights = (share.sum(axis=0) + 1.0 / len(GRID)) / (known.sum() + 1.0)
    return weights


def _binomial(k: Array, n: Array) -> Array:
    log = k[:, None] * np.log(GRID) + (n - k)[:, None] * np.log1p(-GRID)
    return np.asarray(np.exp(log - log.max(axis=1, keepdims=True)))


@dataclass(frozen=True, slots=True)
class PredictionError:
    """How a predictor's mean answers to the true rate p: normal around intercept + slope·p.

    A regression shrinks, so the slope is below 1; treating a prediction as p plus noise would be
    overconfident.
    """

    intercept: float = 0.0
    slope: float = 1.0
    sd: float = 0.2

    @classmethod
    def of_state(cls, state: ModelState) -> PredictionError:
        """Measure on the context: leave-one-out predictions against counts.

        The binomial noise of the counts is taken out of their variance. A context of fewer than 16
        prompts, or without any spread of rates, gives an error that says nothing (slope 0).
        """
        predicted, n = state.left_out(), state.trials
        if len(n) < 16:
            return cls(0.5, 0.0, 1.0)
        rate = state.counts / n
        smooth = (state.counts + 0.5) / (n + 1)
        noise = float(np.mean(smooth * (1 - smooth) / n))
        spread = float(np.var(rate)) - noise
        if spread < 1e-3:
            return cls(float(predicted.mean()), 0.0, 1.0)
        slope = float(np.mean((predicted - predicted.mean()) * (rate - rate.mean()))) / spread
        slope = float(np.clip(slope, 0.0, 1.0))
        left = float(np.var(predicted)) - slope**2 * spread
        intercept = float(predicted.mean() - slope * rate.mean())
        return cls(intercept, slope, max(math.sqrt(max(left, 0.0)), 0.03))


@dataclass(frozen=True, slots=True)
class PosteriorGain:
    """Spend on the marginal gain in expected mixed groups, under a posterior of the success rate.

    posterior(p) ∝ pool(p) · prediction(p) · binomial(outcomes of the task)

    `pool` is the distribution of rates behind the history. `predict` gives an estimate a task (a
    model's state, say); its likelihood is a Student t in p with the measured `error` or, where that
    is None, in log odds with the estimate's own spread. Greedy is optimal here: the gain is
    concave in the number of rollouts.
    """

    predict: Callable[[Sequence[Task]], Estimates] | None = None
    error: PredictionError | None = None
    floor: int = 2
    cap: int = 64
    success_at: float | None = None
    decay: float = 0.7
    """Weight of a task's older group relative to the next newer one."""
    max_seen: float = 2.0
    """Past rollouts of a task count as at most this many: the policy has moved since. Counts taken
    at their word lose up to 6 % against uniform on recorded checkpoints."""
    guard: bool = True
    confidence: float = 0.95
    """Of the lower bound of the gain that the guard asks to be positive."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.cap:
            raise ConfigError(f"floor {self.floor} and cap {self.cap}: allowed is 0 ≤ floor ≤ cap")

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return the counts."""
        check_budget(budget)
        if not tasks:
            return []
        k, n = self.faded(*seen_counts(tasks, history, self.success_at, self.decay))
        asked = {t.task_id for t in tasks}
        others = [g for g in history if g.task.task_id not in asked] or list(history)
        rows = outcomes_of_groups(others, success_at=self.success_at)
        pool = pool_weights(
            np.array([o.successes for o in rows]), np.array([o.trials for o in rows])
        )
        estimates = None if self.predict is None else self.predict(tasks)
        return self.from_posterior(self.posterior(pool, k, n, estimates), budget)

    def faded(self, k: Array, n: Array) -> tuple[Array, Array]:
        """Return past counts scaled down to `max_seen` trials."""
        scale = np.minimum(1.0, self.max_seen / np.maximum(n, 1e-9))
        return k * scale, n * scale

    def posterior(self, pool: Array, k: Array, n: Array, estimates: Estimates | None) -> Array:
        """Return weights over the grid of rates, shape (tasks, grid), rows summing to 1."""
        weights = pool * _binomial(k, n)
        if estimates is not None:
            if self.error is not None:
                expected = self.error.intercept + self.error.slope * GRID
                gap = (estimates.mean[:, None] - expected) / self.error.sd
            else:
                f = np.log(GRID) - np.log1p(-GRID)
                sd = np.sqrt(estimates.logits.variance)[:, None]
                gap = (f - estimates.logits.mean[:, None]) / np.maximum(sd, 0.1)
            # Student's t, 4 degrees of freedom: an error that is not quite normal must not cost.
            weights = weights * (1 + gap**2 / 4) ** -2.5
        return np.asarray(weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300))

    def from_posterior(self, weights: Array, budget: int) -> list[int]:
        """Return the counts for posteriors of shape (tasks, grid)."""
        n_tasks = len(weights)
        even = np.array(uniform(n_tasks, budget), dtype=np.int64)
        if budget < n_tasks * max(self.floor, 2) or budget >= n_tasks * self.cap:
            return [int(min(c, self.cap)) for c in even]
        counts = self._greedy(weights, budget)
        if self.guard and self._lower_gain(weights, counts, even) <= 0:
            counts = even
        return [int(c) for c in counts]

    def _greedy(self, weights: Array, budget: int) -> Counts:
        sizes = np.arange(self.floor, self.cap + 1)
        useful = weights @ np.stack([mixed_share(GRID, int(s)) for s in sizes], axis=1)
        gains = np.diff(useful, axis=1)
        if self.floor < 1:
            # From 0 to 1 rollouts nothing is gained: value the first two as one step of half each.
            gains[:, 0] = gains[:, 1] = gains[:, 1] / 2
        spare = budget - self.floor * len(weights)
        order = np.argsort(-gains, axis=None, kind="stable")[:spare]
        extra = np.bincount(order // gains.shape[1], minlength=len(weights))
        return np.asarray(self.floor + extra, dtype=np.int64)

    def _lower_gain(self, weights: Array, counts: Counts, even: Counts) -> float:
        """Lower bound of the mean gain over uniform, over draws of the rates."""
        rng = np.random.default_rng(self.seed)
        steps = np.cumsum(weights, axis=1)
        draws = rng.random((400, len(weights)))
        index = (draws[:, :, None] > steps[None]).sum(axis=2).clip(max=len(GRID) - 1)
        p = GRID[index]
        gain = (mixed_share(p, counts[None]) - mixed_share(p, even[None])).mean(axis=1)
        return float(np.quantile(gain, 1 - self.confidence))


def state_predictor(
    predict: Callable[[Sequence[str]], Estimates],
) -> Callable[[Sequence[Task]], Estimates]:
    """Return a `PosteriorGain.predict` from a model state's `predict` on texts."""
    return lambda tasks: predict([t.text for t in tasks])
