"""Tests that stay valid however often they are looked at: betting on the sign of an effect.

A wealth starts at 1 and bets a share of itself on each unit's estimate of the effect. Where the
hypothesis holds it is a non-negative supermartingale, so it ever reaches 1/alpha with probability
at most alpha (Ville 1939), whatever was looked at and whenever one stopped. Bets depend on the past
alone. Every number may be an array: one entry a simulated run.

Does not know arms, routes or feedback. Source: Waudby-Smith & Ramdas 2024, "Estimating means of
bounded random variables by betting" (JRSS-B 86:1); the off-policy form after Waudby-Smith et al.
2024, "Anytime-valid off-policy inference for contextual bandits"; drift after Shin, Ramdas and
Rinaldo 2024, "E-detectors". The size of the bets is our reading of their approximate Kelly bets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "DriftAlarm",
    "EffectInterval",
    "EffectTest",
    "Unit",
    "Wealth",
    "effect_of",
    "effect_interval",
    "looks_level",
]

_MOST_BET = 0.75
"""Largest loss of one bet as a share of the wealth."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of a live test whose outcome is known."""

    is_candidate: bool
    share: float
    """Probability with which it was given the candidate, in (0, 1)."""
    outcome: float
    """In [0, 1]."""
    prediction: float = 0.5
    """Of the outcome, made before the call, in [0, 1]; a good one makes the test shorter."""


def effect_of(unit: Unit) -> tuple[float, float]:
    """Return an unbiased estimate of the effect at one unit, and the bound of its size.

    >>> effect_of(Unit(True, 0.25, 1.0, 0.5))
    (2.0, 4.0)
    """
    p = unit.share
    rest = unit.outcome - unit.prediction
    estimate = rest / p if unit.is_candidate else -rest / (1.0 - p)
    return estimate, 1.0 / min(p, 1.0 - p)


class Wealth:
    """What has been won by betting that a bounded variable's mean is above 0."""

    __slots__ = ("_n", "_squares", "_total", "log")

    def __init__(self) -> None:
        self._n = 0
        self._total: Any = 0.0
        self._squares: Any = 0.0
        self.log: Any = 0.0
        """Natural logarithm of the wealth."""

    def bet(self, x: Any, bound: Any) -> None:
        """Bet on one value, |x| <= bound."""
        m = self._total / (self._n + 1)
        v = (self._squares + 1.0) / (self._n + 1) - m * m
        share = np.clip(m / (v + m * m), 0.0, _MOST_BET / bound)
        self.log = self.log + np.log1p(share * x)
        self._n += 1
        self._total = self._total + x
        self._squares = self._squares + x * x


class EffectTest:
    """Is the candidate better, and is it harmful; valid at every look.

    Args:
        min_difference: the effect must be shown to be above it.
        max_harm: the candidate is harmful where the effect is shown to be below minus this.

    >>> test = EffectTest()
    >>> for i in range(400):
    ...     test.observe(2.0 * (i % 2 == 0) * 0.5, 2.0)
    >>> bool(test.gain > 20 > test.harm)
    True
    """

    def __init__(self, *, min_difference: float = 0.0, max_harm: float = 0.05) -> None:
        self._least, self._most_harm = min_difference, max_harm
        self._up, self._down = Wealth(), Wealth()
        self.n = 0
        """Units observed."""

    def observe(self, estimate: Any, bound: Any) -> None:
        """Take one unit's estimate of the effect and the bound of its size."""
        self._up.bet(estimate - self._least, bound + abs(self._least))
        self._down.bet(-(estimate + self._most_harm), bound + self._most_harm)
        self.n += 1

    @property
    def log_gain(self) -> Any:
        """Logarithm of the evidence for a gain."""
        return self._up.log

    @property
    def log_harm(self) -> Any:
        """Logarithm of the evidence for harm."""
        return self._down.log

    @property
    def gain(self) -> Any:
        """Evidence that the effect is above `min_difference`; decisive from 1/alpha."""
        return np.exp(np.minimum(self._up.log, 700.0))

    @property
    def harm(self) -> Any:
        """Evidence that the effect is below minus `max_harm`; decisive from 1/alpha."""
        return np.exp(np.minimum(self._down.log, 700.0))


@dataclass(frozen=True, slots=True)
class EffectInterval:
    """Where the effect lies, at every look at once."""

    low: float
    high: float
    mean: float
    """Of the estimates; unbiased, and no part of the guarantee."""
    n: int


def effect_interval(
    estimates: Iterable[tuple[float, float]], *, level: float = 0.05, points: int = 201
) -> EffectInterval:
    """Return all effects on a grid over [-1, 1] that no wealth has ever refuted.

    Args:
        estimates: (estimate, bound) of each unit, in order of assignment.
        level: chance that the true effect ever leaves the interval.
        points: of the grid.

    >>> effect_interval([]).low, effect_interval([]).high
    (-1.0, 1.0)
    """
    grid = np.linspace(-1.0, 1.0, points)
    above, below = Wealth(), Wealth()
    is_open = np.ones(points, dtype=bool)
    limit = math.log(2.0 / level)
    total, n = 0.0, 0
    for estimate, bound in estimates:
        above.bet(estimate - grid, bound + np.abs(grid))
        below.bet(grid - estimate, bound + np.abs(grid))
        is_open &= (above.log < limit) & (below.log < limit)
        total += estimate
        n += 1
    kept = grid[is_open]
    mean = total / n if n else 0.0
    if not kept.size:  # refuted everywhere: the grid is too coarse for so much evidence
        return EffectInterval(mean, mean, mean, n)
    step = 2.0 / (points - 1)
    low = -1.0 if is_open[0] else float(kept[0]) - step
    high = 1.0 if is_open[-1] else float(kept[-1]) + step
    return EffectInterval(low, high, mean, n)


def looks_level(level: float, number: int) -> float:
    """Return the level of the `number`-th candidate, so that all of them spend `level` together.

    >>> round(sum(looks_level(0.05, k) for k in range(1, 10_000)), 4)
    0.05
    """
    return level / (number * (number + 1))


class DriftAlarm:
    """Has the mean fallen below a floor: an e-detector, restarted at every unit.

    The mean run length to a false alarm is at least the threshold while the mean is at or above the
    floor.

    Args:
        floor: the mean that outcomes should keep, in (0, 1).
    """

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._n = 0
        self._total: Any = 0.0
        self._squares: Any = 0.0
        self.evidence: Any = 0.0

    def observe(self, outcome: Any) -> None:
        """Take one outcome in [0, 1]."""
        x = self._floor - outcome
        m = self._total / (self._n + 1)
        v = (self._squares + 0.25) / (self._n + 1) - m * m
        most = _MOST_BET / max(1.0 - self._floor, 1e-6)
        share = np.clip(m / (v + m * m), 0.0, most)
        self.evidence = (self.evidence + 1.0) * (1.0 + share * x)
        self._n += 1
        self._total = self._total + x
        self._squares = self._squares + x * x
