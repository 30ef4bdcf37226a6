"""What an answer will cost: output tokens a (prompt, model) as a log-normal, times the prices.

Log length is a ridge regression on the prompt vector and the log length of the prompt, penalty by
closed-form leave-one-out; the spread is the leave-one-out residual's. Where rows carry dollars but
no prices are known, log dollars take the place of log tokens. Unknown stays unknown.
Does not know success. Source: own; per-query cost prediction is CARROT's point (arXiv 2502.03261).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tfgrpo.routing.estimator.embedders import Floats
from tfgrpo.routing.records import ModelInfo, SuccessCount

__all__ = ["CHARS_PER_TOKEN", "CostModel", "Costs"]

Array = NDArray[np.float64]

CHARS_PER_TOKEN = 4.0
"""Rule of thumb for English prompts where no token count is known."""

_LEAST_ROWS = 8
_PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, slots=True)
class Costs:
    """Dollars of one answer a prompt; NaN where it cannot be known."""

    expected_usd: Array
    high_usd: Array
    """The 95th percentile."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts the cost of one model's answers."""

    info: ModelInfo
    in_dollars: bool
    """True when the regression is on dollars themselves, False when it is on output tokens."""
    coefficients: Array | None
    """None where nothing is known of lengths or dollars."""
    centre: Array
    level: float
    spread: float
    """Standard deviation of the log."""

    @classmethod
    def fit(cls, info: ModelInfo, outcomes: Sequence[SuccessCount], vectors: Floats) -> Self:
        """Fit on a model's outcomes; `vectors` are those of their prompts, in order."""
        in_dollars = info.output_usd_per_mtok is None
        values = [o.cost_usd if in_dollars else o.output_tokens for o in outcomes]
        rows = [i for i, v in enumerate(values) if v is not None and v > 0]
        width = vectors.shape[1] + 1 if vectors.ndim == 2 else 1
        if not rows:
            return cls(info, in_dollars, None, np.zeros(width), 0.0, 0.0)
        y = np.log([float(values[i] or 1.0) for i in rows])
        X = _features([outcomes[i].prompt for i in rows], vectors[rows])
        centre, level = X.mean(axis=0), float(y.mean())
        if len(rows) < _LEAST_ROWS:
            spread = float(y.std()) if len(rows) > 1 else 1.0
            return cls(info, in_dollars, np.zeros(width), centre, level, max(spread, 0.3))
        coefficients, spread = _ridge(X - centre, y - level)
        return cls(info, in_dollars, coefficients, centre, level, spread)

    def predict(self, prompts: Sequence[str], vectors: Floats) -> Costs:
        """Return the cost of one answer to each prompt."""
        n = len(prompts)
        if self.coefficients is None:
            free = 0.0 in (self.info.output_usd_per_mtok,) and not self.info.input_usd_per_mtok
            known = np.zeros(n) if free else np.full(n, np.nan)
            return Costs(known, known)
        mean = self.level + (_features(prompts, vectors) - self.centre) @ self.coefficients
        expected = np.exp(mean + 0.5 * self.spread**2)
        high = np.exp(mean + 1.645 * self.spread)
        if self.in_dollars:
            return Costs(expected, high)
        per_token = (self.info.output_usd_per_mtok or 0.0) / 1e6
        tokens_in = np.array([len(p) for p in prompts]) / CHARS_PER_TOKEN
        prompt_usd = tokens_in * (self.info.input_usd_per_mtok or 0.0) / 1e6
        return Costs(prompt_usd + expected * per_token, prompt_usd + high * per_token)


def _features(prompts: Sequence[str], vectors: Floats) -> Array:
    length = np.array([math.log1p(len(p)) for p in prompts])
    return np.column_stack([length, vectors.astype(np.float64)])


def _ridge(X: Array, y: Array) -> tuple[Array, float]:
    values, basis = np.linalg.eigh(X @ X.T)
    along = basis.T @ y
    best: tuple[float, float, Array] | None = None
    for penalty in _PENALTIES:
        shrink = values / (values + penalty)
        hat = np.einsum("ij,j,ij->i", basis, shrink, basis) + 1.0 / len(y)
        residual = (y - basis @ (shrink * along)) / np.maximum(1 - hat, 1e-3)
        error = float(np.mean(residual**2))
        if best is None or error < best[0]:
            best = error, penalty, basis @ (along / (values + penalty))
    assert best is not None
    return np.asarray(X.T @ best[2]), math.sqrt(best[0])
