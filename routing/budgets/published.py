"""Published rules for how many rollouts each task gets, as readings of abstracts: approximations.

Of the shape `tfgrpo.protocols.Allocator` and pure, like those in `allocate`: equal arguments, equal
counts, in the order of the tasks, summing to at most the budget. They know counts only.
Does not know predictions, posteriors or who runs the rollouts. Sources: named at each class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.routing.budgets.posterior_gain import Array, check_budget, seen_counts, uniform
from tfgrpo.routing.records import outcomes_of_groups
from tfgrpo.runtime.canonical import derive_seed

__all__ = ["Dars", "PromptGdro", "RolloutGdro", "Sgpo", "Vade", "Xrpo"]


@dataclass(frozen=True, slots=True)
class Sgpo:
    """Group size about 1/p after profiling; solved tasks dropped, easy ones first (approximation).

    Tasks without history get `floor`. Source: sGPO, abstract; the caps and the kept share of
    unsolved tasks are design choices.
    """

    floor: int = 2
    cap: int = 16
    drop_at: float = 1.0
    """Success rate from which a task is trivial."""
    keep_unsolved: float = 0.5
    """Share of the never-solved tasks that stay, chosen by a hash of their id."""
    success_at: float | None = None

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return the counts; the budget is spent from high to low success rate."""
        check_budget(budget)
        k, n = seen_counts(tasks, history, self.success_at, 1.0)
        wanted = [self._wanted(t, a, b) for t, a, b in zip(tasks, k, n, strict=True)]
        rate = np.where(n > 0, k / np.maximum(n, 1e-9), 0.5)
        counts, left = [0] * len(tasks), budget
        for i in np.argsort(-rate, kind="stable"):
            counts[i] = min(wanted[i], left)
            left -= counts[i]
        return counts

    def _wanted(self, task: Task, k: float, n: float) -> int:
        if n == 0:
            return self.floor
        if k / n >= self.drop_at:
            return 0
        if k == 0:
            kept = derive_seed("sgpo", task.task_id) < self.keep_unsolved * 2**31
            return self.cap if kept else 0
        return int(np.clip(math.ceil(n / k), self.floor, self.cap))


@dataclass(frozen=True, slots=True)
class Vade:
    """Thompson-sample each task's rate and give groups to those nearest one half (approximation).

    Older groups of a task decay by `decay`, and tasks that were not drawn of late decay further by
    `idle_decay` a group of the others, so that stale belief widens. Source: VADE, abstract; score
    p(1 − p) and both decays are our reading.
    """

    group_size: int = 8
    prior: tuple[float, float] = (1.0, 1.0)
    decay: float = 0.7
    idle_decay: float = 0.98
    success_at: float | None = None
    seed: int = 0

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return `group_size` for the best budget // group_size tasks, 0 for the others."""
        check_budget(budget)
        k, n = seen_counts(tasks, history, self.success_at, self.decay)
        newest = {g.task.task_id: i for i, g in enumerate(history)}
        rounds = max(len(tasks), 1)
        idle = np.array(
            [(len(history) - 1 - newest.get(t.task_id, 0)) / rounds for t in tasks], dtype=float
        )
        k, n = (
            k * self.idle_decay ** np.maximum(idle, 0),
            n * self.idle_decay ** np.maximum(idle, 0),
        )
        rng = np.random.default_rng(derive_seed("vade", self.seed, len(history)))
        p = rng.beta(self.prior[0] + k, self.prior[1] + n - k) if len(tasks) else np.zeros(0)
        chosen = np.argsort(-(p * (1 - p)), kind="stable")[: budget // self.group_size]
        counts = [0] * len(tasks)
        for i in chosen:
            counts[int(i)] = self.group_size
        return counts


@dataclass(frozen=True, slots=True)
class Xrpo:
    """Base rollouts, then the largest expected drop of a mean's interval plus an exploration bonus
    (approximation).

    h(n) = t·s/√n with s from the seen outcomes (one pseudo-success and -failure for tasks with
    fewer than two). Zero-variance tasks seen often get none. Source: XRPO, abstract and summary;
    the bonus form is our reading.
    """

    base: int = 2
    cap: int = 64
    confidence: float = 0.9
    bonus: float = 0.1
    settled_at: int = 8
    """Rollouts from which a task with equal outcomes gets nothing more."""
    success_at: float | None = None

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return the counts."""
        check_budget(budget)
        k, n = seen_counts(tasks, history, self.success_at, 1.0)
        settled = (n >= self.settled_at) & ((k == 0) | (k == n))
        base = [0 if s else self.base for s in settled]
        if sum(base) > budget:
            return uniform(len(tasks), budget) if not settled.any() else _cut(base, budget)
        more = half_width_drops(
            k, n + base, np.where(settled, 0, self.cap - np.array(base)), budget - sum(base),
            confidence=self.confidence, bonus=self.bonus, graded=n,
        )  # fmt: skip
        return [a + b for a, b in zip(base, more, strict=True)]


def half_width_drops(
    k: Array,
    n: Array,
    room: NDArray[np.int64],
    budget: int,
    *,
    confidence: float,
    bonus: float,
    graded: Array | None = None,
) -> list[int]:
    """Return rollouts dealt one by one where a mean's half-width t·s/√n drops most.

    Args:
        k: successes of each task.
        n: rollouts, those without an outcome yet among them.
        room: most further rollouts of each.
        budget: rollouts in all; fewer are dealt where there is no room.
        confidence: of the interval.
        bonus: added over the number of rollouts.
        graded: rollouts with an outcome; all of them by default.
    """
    from scipy.stats import t as student

    told = n if graded is None else graded
    p = np.where(told >= 2, k / np.maximum(told, 1), (k + 1) / (told + 2))
    s = np.sqrt(np.maximum(p * (1 - p), 0.0))
    counts = np.zeros(len(k), dtype=np.int64)
    top = int(n.max(initial=0)) + budget + 4
    quantile = student.ppf(0.5 + confidence / 2, np.maximum(np.arange(top) - 1, 1))
    for _ in range(budget):
        m = np.maximum((n + counts).astype(int), 2)
        drop = s * (quantile[m] / np.sqrt(m) - quantile[m + 1] / np.sqrt(m + 1))
        value = np.where(counts >= room, -np.inf, drop + bonus / m)
        best = int(np.argmax(value)) if len(value) else -1
        if best < 0 or not np.isfinite(value[best]):
            break
        counts[best] += 1
    return [int(c) for c in counts]


def _cut(counts: Sequence[int], budget: int) -> list[int]:
    """Take counts in order until the budget is spent."""
    out = []
    for c in counts:
        out.append(min(c, budget))
        budget -= out[-1]
    return out


@dataclass(frozen=True, slots=True)
class Dars:
    """Larger groups for hard tasks, until their summed |advantage| matches a task at one half
    (approximation).

    Every task gets `base` rollouts. A group of N rollouts at rate a has Σ|A| = 2N√(a(1−a)) with the
    population deviation; `equal` raises tasks below one half to a group of `base` at one half,
    `hard` to 2(1 − a) times it. Easy and new tasks get nothing extra, never-solved ones the cap.
    Source: DARS, abstract; both schedules recalled, rates are those of the history.
    """

    base: int = 4
    cap: int = 32
    schedule: Literal["equal", "hard"] = "equal"
    success_at: float | None = None

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return group sizes; extras are scaled down to the budget, and where it does not cover
        `base` each, it is split evenly."""
        check_budget(budget)
        left = budget - self.base * len(tasks)
        if left < 0:
            return uniform(len(tasks), budget)
        k, n = seen_counts(tasks, history, self.success_at, 1.0)
        extra = np.array([self._extra(a, b) for a, b in zip(k, n, strict=True)], dtype=float)
        if extra.sum() > left:
            extra = np.floor(extra * left / extra.sum())
        return [self.base + int(e) for e in extra]

    def _extra(self, k: float, n: float) -> int:
        if n == 0 or k / n >= 0.5:
            return 0
        a = k / n
        target = self.base if self.schedule == "equal" else self.base * 2 * (1 - a)
        needed = math.inf if a == 0 else target / (2 * math.sqrt(a * (1 - a)))
        return max(math.ceil(min(needed, self.cap) - self.base - 1e-9), 0)


@dataclass(frozen=True, slots=True)
class RolloutGdro:
    """Rollouts in proportion to √(p(1 − p)) of a task's bin of success rates (approximation).

    Source: Rollout-GDRO, abstract; bins replace the online shadow price by its fixed point.
    """

    bins: int = 5
    floor: int = 2
    success_at: float | None = None

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return counts that sum to the budget, or uniform where it does not cover the floor."""
        check_budget(budget)
        if budget < self.floor * len(tasks) or not tasks:
            return uniform(len(tasks), budget)
        k, n = seen_counts(tasks, history, self.success_at, 1.0)
        rate = (k + 0.5) / (n + 1.0)
        bin_of = np.minimum((rate * self.bins).astype(int), self.bins - 1)
        mean = np.array([rate[bin_of == b].mean() for b in bin_of])
        share = np.sqrt(mean * (1 - mean))
        exact = (budget - self.floor * len(tasks)) * share / share.sum()
        counts = np.floor(exact).astype(np.int64)
        rest = budget - self.floor * len(tasks) - int(counts.sum())
        counts[np.argsort(-(exact - counts), kind="stable")[:rest]] += 1
        return [int(c) + self.floor for c in counts]


@dataclass(frozen=True, slots=True)
class PromptGdro:
    """Groups for tasks whose bin of success rates is drawn by a weight that grows with its loss
    (approximation).

    The history is gone through in rounds of `round_groups`: each group falls into the bin of its
    task's rate so far, a bin's loss is a running mean of 1 − rate divided by what its start at 0
    leaves out, and after every round w_b ← w_b exp(η · loss_b) for all bins that were ever seen, so
    that a bin gains nothing by being drawn often. Bins are drawn by weight, tasks evenly inside.
    Source: Prompt-GDRO, abstract; the debiasing and the constants are our reading.
    """

    group_size: int = 8
    bins: int = 5
    eta: float = 0.1
    decay: float = 0.9
    round_groups: int = 16
    success_at: float | None = None
    seed: int = 0

    def weights(self, history: Sequence[RolloutGroup]) -> tuple[Array, dict[str, float]]:
        """Return the weight of each bin, summing to 1, and each task's rate so far."""
        log_w, ema, mass = np.zeros(self.bins), np.zeros(self.bins), np.zeros(self.bins)
        counts: dict[str, tuple[float, float]] = {}
        for number, outcome in enumerate(outcomes_of_groups(history, success_at=self.success_at)):
            k, n = counts.get(outcome.prompt_id, (0.0, 0.0))
            b = self._bin(k, n)
            loss = 1 - outcome.successes / max(1, outcome.trials)
            ema[b] = self.decay * ema[b] + (1 - self.decay) * loss
            mass[b] = self.decay * mass[b] + (1 - self.decay)
            counts[outcome.prompt_id] = (k + outcome.successes, n + outcome.trials)
            if (number + 1) % self.round_groups == 0:
                log_w += np.where(mass > 0, self.eta * ema / np.maximum(mass, 1e-12), 0.0)
        w = np.exp(log_w - log_w.max())
        return np.asarray(w / w.sum()), {t: (k + 0.5) / (n + 1.0) for t, (k, n) in counts.items()}

    def _bin(self, k: float, n: float) -> int:
        return min(int((k + 0.5) / (n + 1.0) * self.bins), self.bins - 1)

    def __call__(
        self, tasks: Sequence[Task], history: Sequence[RolloutGroup], budget: int
    ) -> list[int]:
        """Return `group_size` for budget // group_size tasks, 0 for the others."""
        check_budget(budget)
        weight_B, rates = self.weights(history)
        bin_of = [min(int(rates.get(t.task_id, 0.5) * self.bins), self.bins - 1) for t in tasks]
        rng = np.random.default_rng(derive_seed("prompt_gdro", self.seed, len(history)))
        left = {b: [i for i, x in enumerate(bin_of) if x == b] for b in range(self.bins)}
        counts = [0] * len(tasks)
        for _ in range(min(budget // self.group_size, len(tasks))):
            open_bins = [b for b, members in left.items() if members]
            share = weight_B[open_bins] / weight_B[open_bins].sum()
            members = left[open_bins[int(rng.choice(len(open_bins), p=share))]]
            counts[members.pop(int(rng.integers(len(members))))] = self.group_size
        return counts
