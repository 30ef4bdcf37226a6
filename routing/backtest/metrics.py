"""Measures of a predictor and of a router, each with its prompt-blind or mixing companion.

An area is taken within one model (or one policy and checkpoint) and averaged; an area pooled over
models rewards knowing which model is good and is refused. Costs are swept over a hull, padded to
the dearest model and divided by the cost range.
Does not know how predictions were made. Sources: `docs/routing.md`; AIQ after RouterBench (arXiv
2403.12031) with the range as normaliser, APGR and CPT after RouteLLM (arXiv 2406.18665).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError

Array = NDArray[np.float64]


def brier(p: Array, rate: Array) -> float:
    """Return the mean squared distance of p from the success rate."""
    return float(np.mean((p - rate) ** 2))


def log_loss(p: Array, rate: Array) -> float:
    """Return the mean log loss a trial, in nats; p is cut to [1e-6, 1 − 1e-6]."""
    p = np.clip(p, 1e-6, 1 - 1e-6)
    return float(-np.mean(rate * np.log(p) + (1 - rate) * np.log1p(-p)))


def area(p: Array, rate: Array) -> float:
    """Return the area under the ROC curve of rate > 0.5, ties half; NaN with one class only."""
    from scipy.stats import rankdata

    positive = rate > 0.5
    n_pos = int(positive.sum())
    n_neg = len(positive) - n_pos
    if not n_pos or not n_neg:
        return float("nan")
    ranks = rankdata(p)
    return float((ranks[positive].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg))


def grouped_area(
    p: Array, rate: Array, groups: Sequence[Hashable], *, models: Sequence[Hashable]
) -> float:
    """Return the row-weighted mean area within groups; groups with one class are left out.

    `models` names each row's model (policy and checkpoint).

    Raises:
        ConfigError: a group holds two models: such an area can be earned without the prompt.
    """
    members: dict[Hashable, list[int]] = {}
    owner: dict[Hashable, Hashable] = {}
    for i, (group, model) in enumerate(zip(groups, models, strict=True)):
        if owner.setdefault(group, model) != model:
            raise ConfigError(
                f"group {group!r} mixes models {owner[group]!r} and {model!r}: an area pooled over "
                "models rewards knowing which model is good; group by (policy, checkpoint)"
            )
        members.setdefault(group, []).append(i)
    areas, sizes = [], []
    for index in members.values():
        value = area(p[index], rate[index])
        if np.isfinite(value):
            areas.append(value)
            sizes.append(len(index))
    return float(np.average(areas, weights=sizes)) if areas else float("nan")


def ece(p: Array, rate: Array, bins: int = 15) -> float:
    """Return the expected calibration error over bins of equal mass."""
    order = np.argsort(p, kind="stable")
    parts = np.array_split(order, min(bins, len(p)))
    gaps = [abs(float(p[i].mean() - rate[i].mean())) * len(i) for i in parts if len(i)]
    return sum(gaps) / len(p)


def pair_accuracy(better: Array, worse: Array) -> float:
    """Return the share of pairs ranked rightly, ties half: one prompt at two checkpoints."""
    return float(np.mean((better > worse) + 0.5 * (better == worse)))


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Points of (mean cost, mean quality) of a router as its trade-off knob turns."""

    cost: Array
    quality: Array

    def area(self, low: float, high: float) -> float:
        """Return AIQ: mean height of the non-decreasing hull between two costs.

        The hull starts at the cheapest point's quality and stays level after the best point.
        """
        hull_cost, hull_quality = hull(self.cost, self.quality)
        if not high > low:
            return float(hull_quality.max())
        grid = np.unique(
            np.concatenate([[low, high], hull_cost[(hull_cost > low) & (hull_cost < high)]])
        )
        heights = np.interp(grid, hull_cost, hull_quality)
        return float(np.trapezoid(heights, grid) / (high - low))


def hull(cost: Array, quality: Array) -> tuple[Array, Array]:
    """Return the upper, non-decreasing convex hull of points, by cost."""
    best = -np.inf
    points: list[tuple[float, float]] = []
    for i in np.lexsort((-quality, cost)):
        x, y = float(cost[i]), float(quality[i])
        if y <= best:
            continue
        best = y
        while len(points) > 1:
            (x0, y0), (x1, y1) = points[-2], points[-1]
            if (y1 - y0) * (x - x0) > (y - y0) * (x1 - x0):
                break
            points.pop()
        points.append((x, y))
    array = np.array(points)
    return array[:, 0], array[:, 1]


def sweep(value: Array, cost: Array, quality: Array, true_cost: Array, knobs: Array) -> CostCurve:
    """Return the curve of argmax(value − λ·cost) over λ in `knobs`.

    All arrays have shape (prompts, models): predicted value and cost, then what really happens.
    """
    line = np.arange(len(value))
    picks = [np.argmax(value - knob * cost, axis=1) for knob in knobs]
    return CostCurve(
        np.array([true_cost[line, pick].mean() for pick in picks]),
        np.array([quality[line, pick].mean() for pick in picks]),
    )


def recovered_gap(share: Array, quality: Array, weak: float, strong: float) -> tuple[float, float]:
    """Return (APGR, share of strong calls at half the gap) of a two-model router.

    `share` is the share of strong calls, `quality` what it reaches; random mixing gives 0.5.
    """
    order = np.argsort(share)
    x = np.concatenate([[0.0], share[order], [1.0]])
    gap = (np.concatenate([[weak], quality[order], [strong]]) - weak) / (strong - weak)
    area_of = float(np.trapezoid(gap, x))
    over = np.flatnonzero(gap >= 0.5)
    if not len(over) or over[0] == 0:
        return area_of, 0.0 if len(over) else float("nan")
    i = int(over[0])
    step = (0.5 - gap[i - 1]) / (gap[i] - gap[i - 1])
    return area_of, float(x[i - 1] + step * (x[i] - x[i - 1]))


def bootstrap_gap(
    base: Array, other: Array, *, draws: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """Return mean, low and high (95 %) of other − base, drawing models and prompts with return.

    Both have shape (models, prompts): a loss a cell; NaN is unknown.
    """
    rng = np.random.default_rng(seed)
    gap = other - base
    known = np.isfinite(gap).astype(np.float64)
    filled = np.where(known > 0, gap, 0.0)
    values = np.empty(draws)
    for i in range(draws):
        m = np.bincount(rng.integers(len(gap), size=len(gap)), minlength=len(gap)).astype(float)
        q = np.bincount(rng.integers(gap.shape[1], size=gap.shape[1]), minlength=gap.shape[1])
        values[i] = (m @ filled @ q) / max(float(m @ known @ q), 1.0)
    low, high = np.quantile(values, [0.025, 0.975])
    return float(filled.sum() / max(known.sum(), 1.0)), float(low), float(high)
