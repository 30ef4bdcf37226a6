"""The table at the end: base, base + library, trained, trained + library on the same test tasks.

All intervals take a task as the unit; differences are paired by task. `retained` says which part
of the library's gain the trained model has without it: (trained − base) / (library − base). Its
interval is Fieller's, which is honest about a gain that may be zero: then no ratio is excluded and
there is no interval.

Does not know models or files. Source: Fieller (1954), "Some problems in interval estimation".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from tfgrpo.statistics import Interval, Scores, mean_interval, paired_difference
from tfgrpo.statistics.verdict import Verdict, judge_gain

ARMS = ("base", "base_library", "trained", "trained_library")
ARM_WORDS: Mapping[str, str] = {
    "base": "base",
    "base_library": "base + library",
    "trained": "trained",
    "trained_library": "trained + library",
}
PAIRS: Mapping[str, tuple[str, str]] = {
    "library_on_base": ("base", "base_library"),
    "training": ("base", "trained"),
    "training_over_library": ("base_library", "trained"),
    "library_on_trained": ("trained", "trained_library"),
    "both": ("base", "trained_library"),
}
"""Name of a difference to (what it is measured from, what is measured)."""


@dataclass(frozen=True, slots=True)
class Retained:
    """Which part of the library's gain is in the weights; above 1 where training gained more."""

    estimate: float | None
    """None where the library gained nothing, so that there is nothing to keep."""
    low: float | None
    """Bounds are None where the data exclude no ratio: the library's gain may be zero."""
    high: float | None
    level: float
    n_tasks: int

    def __str__(self) -> str:
        if self.estimate is None:
            return "not defined: the library gains nothing on these tasks"
        if self.low is None or self.high is None:
            return f"{self.estimate:.2f}, no interval: the library's gain may be zero"
        return f"{self.estimate:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "estimate": self.estimate,
            "low": self.low,
            "high": self.high,
            "level": self.level,
            "n_tasks": self.n_tasks,
        }


def retained(base: Scores, library: Scores, trained: Scores, *, level: float = 0.95) -> Retained:
    """Return (trained − base) / (library − base) with Fieller's interval over tasks.

    Raises:
        ValueError: no task has rewards in all three.
    """
    shared = sorted(t for t in base if base[t] and library.get(t) and trained.get(t))
    if not shared:
        raise ValueError("no task has rewards in all three arms")
    means = {t: math.fsum(base[t]) / len(base[t]) for t in shared}
    gain = np.array([math.fsum(library[t]) / len(library[t]) - means[t] for t in shared])
    kept = np.array([math.fsum(trained[t]) / len(trained[t]) - means[t] for t in shared])
    n = len(shared)
    if gain.mean() <= 0:
        return Retained(None, None, None, level, n)
    estimate = float(kept.mean() / gain.mean())
    if n < 2:
        return Retained(estimate, None, None, level, n)
    low, high = fieller(
        float(kept.mean()), float(gain.mean()), np.cov(kept, gain) / n, n - 1, level
    )
    return Retained(estimate, low, high, level, n)


def fieller(
    top: float, bottom: float, covariance: Any, degrees: int, level: float
) -> tuple[float | None, float | None]:
    """Return the bounds of a ratio of two means, None where the set of ratios is unbounded.

    The set holds every θ with (top − θ·bottom)² ≤ t²·Var(top − θ·bottom), a quadratic in θ that
    is an interval exactly where the bottom mean differs from zero at that level.

    Args:
        top: mean of the numerator.
        bottom: mean of the denominator.
        covariance: 2 × 2, of the two means.
        degrees: of freedom of the covariance.
        level: two-sided, in (0, 1).
    """
    t2 = float(stdtrit(degrees, (1 + level) / 2)) ** 2
    a = bottom**2 - t2 * float(covariance[1][1])
    b = top * bottom - t2 * float(covariance[0][1])
    c = top**2 - t2 * float(covariance[0][0])
    if a <= 0:
        return None, None
    root = math.sqrt(max(0.0, b * b - a * c))
    return (b - root) / a, (b + root) / a


@dataclass(frozen=True, slots=True)
class Table:
    """The arms with their intervals, the paired differences between them, and what was kept."""

    arms: Mapping[str, Interval]
    differences: Mapping[str, Interval]
    retained: Retained | None
    """None without a library."""
    verdict: Verdict
    """Whether the trained model beats the base, both without the library."""
    draws: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "arms": {name: interval.to_dict() for name, interval in self.arms.items()},
            "differences": {name: d.to_dict() for name, d in self.differences.items()},
            "retained": None if self.retained is None else self.retained.to_dict(),
            "verdict": self.verdict.to_dict(),
            "draws": self.draws,
        }

    def lines(self) -> list[str]:
        """Return the table for a terminal."""
        rows = [f"{'test tasks':<20}{'score':>8}   95 % interval"]
        for name, interval in self.arms.items():
            span = f"{interval.low:.3f} to {interval.high:.3f}"
            rows.append(f"{ARM_WORDS[name]:<20}{interval.estimate:>8.3f}   {span}")
        rows.append("")
        for name, gain in self.differences.items():
            rows.append(f"{_pair_words(name):<40}{gain}")
        if self.retained is not None:
            rows.append(f"{'kept of the gain of the library':<40}{self.retained}")
        rows.append(self.verdict.text)
        return rows

    def markdown(self) -> str:
        """Return the table as Markdown."""
        n = next(iter(self.arms.values())).n_tasks
        rows = [
            f"Test split: {n} tasks, {self.draws} draws a task and arm. Intervals are at 95 % and "
            "take a task as the unit; differences are paired by task.",
            "",
            "| arm | score | 95 % interval |",
            "|---|---|---|",
        ]
        rows += [
            f"| {ARM_WORDS[name]} | {i.estimate:.3f} | {i.low:.3f} to {i.high:.3f} |"
            for name, i in self.arms.items()
        ]
        rows += ["", "| difference | estimate | 95 % interval |", "|---|---|---|"]
        rows += [
            f"| {_pair_words(name)} | {d.estimate:+.3f} | {d.low:+.3f} to {d.high:+.3f} |"
            for name, d in self.differences.items()
        ]
        if self.retained is not None:
            rows += ["", f"Kept of the library's gain without the library: {self.retained}."]
        return "\n".join([*rows, "", self.verdict.text]) + "\n"


def _pair_words(name: str) -> str:
    base, other = PAIRS[name]
    return f"{ARM_WORDS[other]} − {ARM_WORDS[base]}"


def make_table(scores: Mapping[str, Scores], *, seed: int = 0) -> Table:
    """Return the table of two arms (`base`, `trained`) or all four.

    Raises:
        ValueError: an arm has no rewards, or a pair has no task in common.
    """
    arms = {name: mean_interval(scores[name], seed=seed) for name in ARMS if name in scores}
    differences = {
        name: paired_difference(scores[a], scores[b], seed=seed)
        for name, (a, b) in PAIRS.items()
        if a in scores and b in scores
    }
    kept = None
    if "base_library" in scores:
        kept = retained(scores["base"], scores["base_library"], scores["trained"])
    draws = max(len(r) for s in scores.values() for r in s.values())
    verdict = judge_gain(scores["base"], scores["trained"], seed=seed)
    return Table(arms, differences, kept, verdict, draws)
