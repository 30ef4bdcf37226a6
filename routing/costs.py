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
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tfgrpo.routing.estimator.ridge import fit_ridge
from tfgrpo.routing.records import ModelInfo, SuccessCount
from tfgrpo.runtime.embedders import Floats

__all__ = ["CHARS_PER_TOKEN", "CostBank", "CostModel", "Costs"]

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
        width = vectors.shape[1] if vectors.ndim == 2 else 0
        return cls.of_arrays(
            info,
            np.array([len(o.prompt) for o in outcomes]),
            np.array([np.nan if o.output_tokens is None else o.output_tokens for o in outcomes]),
            np.array([np.nan if o.cost_usd is None else o.cost_usd for o in outcomes]),
            vectors.reshape(len(outcomes), width),
        )

    @classmethod
    def of_arrays(
        cls, info: ModelInfo, lengths: Array, tokens: Array, dollars: Array, vectors: Floats
    ) -> Self:
        """Fit on output tokens and dollars a prompt, NaN where unknown, and prompt lengths."""
        in_dollars = info.output_usd_per_mtok is None
        values = dollars if in_dollars else tokens
        rows = np.flatnonzero(np.nan_to_num(values) > 0)
        width = vectors.shape[1] + 1
        if not len(rows):
            return cls(info, in_dollars, None, np.zeros(width), 0.0, 0.0)
        y = np.log(values[rows])
        X = _features(lengths[rows], vectors[rows])
        centre, level = X.mean(axis=0), float(y.mean())
        if len(rows) < _LEAST_ROWS:
            spread = float(y.std()) if len(rows) > 1 else 1.0
            return cls(info, in_dollars, np.zeros(width), centre, level, max(spread, 0.3))
        fit = fit_ridge(X, y, _PENALTIES)
        return cls(info, in_dollars, fit.slope, centre, level, math.sqrt(fit.loss))

    @property
    def is_free(self) -> bool:
        """True when both prices are known to be 0."""
        return self.info.output_usd_per_mtok == 0.0 and not self.info.input_usd_per_mtok

    def predict(self, prompts: Sequence[str], vectors: Floats) -> Costs:
        """Return the cost of one answer to each prompt."""
        n = len(prompts)
        if self.coefficients is None:
            known = np.zeros(n) if self.is_free else np.full(n, np.nan)
            return Costs(known, known)
        mean = (
            self.level
            + (_features(np.array([len(p) for p in prompts]), vectors) - self.centre)
            @ self.coefficients
        )
        expected = np.exp(mean + 0.5 * self.spread**2)
        high = np.exp(mean + 1.645 * self.spread)
        if self.in_dollars:
            return Costs(expected, high)
        per_token = (self.info.output_usd_per_mtok or 0.0) / 1e6
        tokens_in = np.array([len(p) for p in prompts]) / CHARS_PER_TOKEN
        prompt_usd = tokens_in * (self.info.input_usd_per_mtok or 0.0) / 1e6
        return Costs(prompt_usd + expected * per_token, prompt_usd + high * per_token)


def _features(lengths: NDArray[Any], vectors: Floats) -> Array:
    return np.column_stack([np.log1p(lengths), vectors.astype(np.float64)])


class CostBank:
    """The cost models of several models, asked at once."""

    def __init__(self, models: Sequence[CostModel]) -> None:
        """Stack cost models; their order is kept."""
        width = max((len(m.centre) for m in models), default=1)
        none = np.zeros(width)
        slopes = [none if m.coefficients is None else m.coefficients for m in models]
        self._slopes = np.array(slopes, dtype=np.float32)
        self._levels = np.array(
            [m.level - float(m.centre @ s) for m, s in zip(models, slopes, strict=True)]
        )
        self._spread = np.array([m.spread for m in models])
        self._known = np.array([m.coefficients is not None for m in models])
        self._in_dollars = np.array([m.in_dollars for m in models])
        self._prices = np.array([_prices(m.info) for m in models]).reshape(-1, 2) / 1e6
        self._free = np.array([m.is_free for m in models])

    def ask(self, length: int, vector: Floats) -> Costs:
        """Return each model's cost for one prompt of `length` characters."""
        mean = self._slopes @ np.concatenate([[math.log1p(length)], vector]).astype(np.float32)
        mean = mean + self._levels
        read = length / CHARS_PER_TOKEN * self._prices[:, 0] * ~self._in_dollars
        per = np.where(self._in_dollars, 1.0, self._prices[:, 1])
        missing = np.where(self._free, 0.0, np.nan)
        expected, high = (
            np.where(self._known, read + per * np.exp(mean + extra), missing)
            for extra in (0.5 * self._spread**2, 1.645 * self._spread)
        )
        return Costs(expected, high)


def _prices(info: ModelInfo) -> tuple[float, float]:
    return info.input_usd_per_mtok or 0.0, info.output_usd_per_mtok or 0.0
