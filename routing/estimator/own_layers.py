"""Layers that read nothing but the model's own labels: a ridge regression and near labels.

    Ridge   a line through the prompt vectors, penalty by closed-form leave-one-out
    Near    the 50 nearest labels, weighted by similarity, shrunk to the level

They see what the reference models do not share with this one, and say little below about a hundred
labels; the blend finds out. Does not know the pool or the other layers.
Sources: ridge regression with leave-one-out (Allen 1974); similarity-weighted k-NN, the rival of
"simple kNN beats complex routers" (arXiv 2505.12601).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.routing.estimator.laplace import Gaussian, logit
from tfgrpo.routing.estimator.layers import Evidence, Query
from tfgrpo.routing.estimator.ridge import fit_ridge

__all__ = ["NEIGHBOURS", "Near", "Ridge", "weighted_rates"]

Array = NDArray[np.float64]

_PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
NEIGHBOURS = 50
_POWERS = (1.0, 3.0, 8.0)
_STRENGTHS = (0.5, 2.0, 5.0, 15.0, 50.0)
_BLOCK = 1024


class Ridge:
    """A ridge regression of the success rate on the prompt vector."""

    def __init__(self, seen: Evidence) -> None:
        counts, trials = seen.counts, seen.trials
        fit = fit_ridge(seen.vectors, counts / trials, _PENALTIES)
        self.slope, self.intercept = fit.slope, fit.intercept
        middle = (counts.sum() + 1) / (trials.sum() + 2)
        self.variance = float(fit.freedom / (trials.sum() * middle * (1 - middle)))
        self.left_out = self._odds(fit.left_out)

    def _odds(self, p: Array) -> Gaussian:
        return Gaussian(logit(np.clip(p, 0.02, 0.98)), np.full(len(p), self.variance))

    def predict(self, query: Query) -> Gaussian:
        """See `Expert`."""
        return self._odds(query.vectors @ self.slope + self.intercept)


def weighted_rates(
    cosines: NDArray[Any], rates: Array, level: float, power: float, strength: float
) -> Array:
    """Return the shrunk mean of near labels: cosines and rates of shape (prompts, near)."""
    weights = np.maximum(cosines, 0.0) ** power
    return np.asarray(
        ((weights * rates).sum(axis=1) + strength * level) / (weights.sum(axis=1) + strength)
    )


class Near:
    """The nearest labels, weighted by a power of the cosine; power and shrinkage by leaving out."""

    def __init__(self, seen: Evidence) -> None:
        counts, trials = seen.counts, seen.trials
        self._vectors = seen.vectors.astype(np.float32)
        self._rates = counts / trials
        self.level = float((counts.sum() + 1.0) / (trials.sum() + 2.0))
        cosines, near = self._search(self._vectors, hide_self=True)
        rates = self._rates[near]
        best: tuple[float, Array] | None = None
        for power in _POWERS:
            for strength in _STRENGTHS:
                p = weighted_rates(cosines, rates, self.level, power, strength)
                loss = float(np.average((p - self._rates) ** 2, weights=trials))
                if best is None or loss < best[0]:
                    best = loss, p
                    self.power, self.strength = power, strength
        assert best is not None
        middle = self.level * (1 - self.level)
        self.variance = 1.0 / (middle * (min(NEIGHBOURS, len(near)) / 2 + self.strength))
        self.left_out = self._odds(best[1])

    def _odds(self, p: Array) -> Gaussian:
        return Gaussian(logit(np.clip(p, 0.02, 0.98)), np.full(len(p), self.variance))

    def _search(
        self, queries: NDArray[np.float32], *, hide_self: bool = False
    ) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
        """Cosines and rows of the nearest labels, in blocks of queries."""
        k = min(NEIGHBOURS, len(self._vectors) - int(hide_self))
        found: list[tuple[Any, Any]] = []
        for start in range(0, len(queries), _BLOCK):
            cosines = queries[start : start + _BLOCK] @ self._vectors.T
            if hide_self:
                at = np.arange(len(cosines))
                cosines[at, start + at] = -np.inf
            near = np.argpartition(-cosines, max(k - 1, 0), axis=1)[:, :k]
            found.append((np.take_along_axis(cosines, near, axis=1), near))
        if not found:
            return np.zeros((0, k), np.float32), np.zeros((0, k), np.intp)
        return np.vstack([f[0] for f in found]), np.vstack([f[1] for f in found])

    def predict(self, query: Query) -> Gaussian:
        """See `Expert`."""
        cosines, near = self._search(query.vectors.astype(np.float32))
        p = weighted_rates(cosines, self._rates[near], self.level, self.power, self.strength)
        return self._odds(p)
