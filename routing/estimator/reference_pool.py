"""What other models' outcomes say: difficulty, latent axes, and what to expect of a new model.

For every reference model a ridge regression from the prompt vector to its success rate is fitted on
folds of the prompts. A prompt that the pool was fitted on gets the score of the fold that left it
out; any other prompt gets the mean of the same fold models. (One full fit for the new prompts ruins
calibration.) Difficulty is the mean score, the axes are principal components of the deviations.

Priors come from treating each reference model as if it were new, with covariates from the others:
mean and spread of (intercept, slope), spread of the axis weights, and how much of a model's noise
is shared with the reference models on the same prompt. That shared part is subtracted from a new
model's labels where the pool knows the prompt (a control variate): the mean is untouched, the noise
shrinks.
Does not know the new model, layers above the covariates, or prices.
Sources: cross-fitted covariates and 2PL prior as in `docs/routing.md`; control variates are
classic; their use for onboarding a model is own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.routing.estimator.laplace import fit_weights, logit, sigmoid
from tfgrpo.routing.records import OutcomeTable

__all__ = ["Covariates", "Priors", "ReferencePool"]

Array = NDArray[np.float64]

N_AXES = 4
_PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0)
_PRIOR_ROWS = 2000
"""Rows used for the priors; more change nothing but the time."""


@dataclass(frozen=True, slots=True)
class Covariates:
    """What the pool says about some prompts, in order."""

    base: Array
    """Log odds of the mean reference score (0 without a pool)."""
    axes: Array
    """Shape (prompts, axes): deviations of the reference scores along their principal axes."""
    shared: Array
    """Mean of (observed − predicted) success over the reference models; 0 where not observed."""
    profile: Array
    """Shape (prompts, 1 + axes): base and axes in units of their spread in the pool."""

    def take(self, index: NDArray[np.intp]) -> Covariates:
        """Return some rows."""
        return Covariates(
            self.base[index], self.axes[index], self.shared[index], self.profile[index]
        )


@dataclass(frozen=True, slots=True)
class Priors:
    """What to expect of a model before its first outcome."""

    level: tuple[float, float]
    """Beta parameters of its success rate over all prompts."""
    weights: Array
    """Mean of (intercept, slope on `base`)."""
    covariance: Array
    """Covariance of (intercept, slope)."""
    axis_variance: float
    """Variance of the weight of each latent axis."""
    shared_slope: float
    """Expected residual of the model per unit of `Covariates.shared`."""
    dispersion: float
    """Share of residual variance left after the shared part is subtracted, in (0, 1]."""


_DEFAULT = Priors((1.0, 1.0), np.array([0.0, 1.0]), np.diag([2.25, 0.25]), 1.0, 0.0, 1.0)


@dataclass(frozen=True)
class ReferencePool:
    """Fold models and cross-fitted scores of the reference models, and the priors they imply."""

    embedder_id: str
    model_names: tuple[str, ...]
    families: tuple[str, ...]
    keys: tuple[str, ...]
    """Prompts that the pool was fitted on."""
    vectors: Array
    """Their unit vectors, shape (prompts, width); also the map of known ground."""
    scores: Array
    """Cross-fitted scores, shape (prompts, models)."""
    residuals: Array
    """Observed success rate − score, shape (prompts, models); NaN where unknown."""
    coefficients: Array
    """Mean of the fold models, shape (width, models)."""
    intercepts: Array
    """Shape (models,)."""
    penalty: float
    priors: Priors = _DEFAULT
    axes: Array = None  # type: ignore[assignment]  # filled by `_with_axes`
    """Shape (models, axes)."""
    centre: Array = None  # type: ignore[assignment]
    spread: Array = None  # type: ignore[assignment]
    """Standard deviation of base and axes over the pool."""
    shared_trend: Array = None  # type: ignore[assignment]
    """Regression of the shared residual on (1, base, axes) over the pool."""

    @classmethod
    def empty(cls, embedder_id: str, width: int) -> Self:
        """Return a pool without reference models: every covariate is 0, priors are wide."""
        pool = cls(
            embedder_id, (), (), (), np.zeros((0, width)), np.zeros((0, 0)), np.zeros((0, 0)),
            np.zeros((width, 0)), np.zeros(0), 0.0,
        )  # fmt: skip
        return pool._with_axes()

    @classmethod
    def fit(
        cls,
        table: OutcomeTable,
        vectors: NDArray[Any],
        *,
        embedder_id: str,
        folds: int = 5,
        seed: int = 0,
    ) -> Self:
        """Fit the pool on a table's cells; missing cells are left out of that model's regression.

        Raises:
            ConfigError: fewer than two prompts a fold, or a model with too few cells.
        """
        if len(table.keys) < 2 * folds or not table.models:
            raise ConfigError(
                f"a reference pool needs at least {2 * folds} prompts and one model; the table has "
                f"{len(table.keys)} and {len(table.models)}: add outcomes or use "
                f"ReferencePool.empty"
            )
        X = np.asarray(vectors, dtype=np.float64)
        rates, known = table.rates, table.trials > 0
        thin = [m.name for m, n in zip(table.models, known.sum(0), strict=True) if n < 2 * folds]
        if thin:
            raise ConfigError(
                f"reference models {thin} have fewer than {2 * folds} outcomes: leave them out of "
                f"the "
                "pool and give their outcomes as context instead"
            )
        fold = _folds(table.keys, folds, seed)
        fits = _cross_fit(X, rates, known, fold, _PENALTIES)
        errors = [float(np.nanmean(np.where(known, rates - f[0], np.nan) ** 2)) for f in fits]
        best = int(np.argmin(errors))
        scores, coefficients, intercepts = fits[best]
        pool = cls(
            embedder_id=embedder_id,
            model_names=table.model_names,
            families=tuple(m.group for m in table.models),
            keys=table.keys,
            vectors=X,
            scores=scores,
            residuals=np.where(known, rates - scores, np.nan),
            coefficients=coefficients,
            intercepts=intercepts,
            penalty=_PENALTIES[best],
        )
        return pool.of_models(range(len(table.models)))

    @property
    def size(self) -> int:
        """Number of reference models."""
        return len(self.model_names)

    def of_models(self, columns: Sequence[int]) -> Self:
        """Return the pool of some of its models, priors and axes made anew; no refitting."""
        index = np.asarray(list(columns), dtype=np.intp)
        pool = self._columns(index)
        return replace(pool, priors=_priors(pool)) if pool.size else pool

    def without(self, *, families: Sequence[str] = (), names: Sequence[str] = ()) -> Self:
        """Return the pool without some families or models: what a new model may know."""
        return self.of_models(
            [
                j
                for j in range(self.size)
                if self.families[j] not in families and self.model_names[j] not in names
            ]
        )

    def _columns(self, index: NDArray[np.intp]) -> Self:
        pool = replace(
            self,
            model_names=tuple(self.model_names[j] for j in index),
            families=tuple(self.families[j] for j in index),
            scores=self.scores[:, index],
            residuals=self.residuals[:, index],
            coefficients=self.coefficients[:, index],
            intercepts=self.intercepts[index],
            priors=_DEFAULT,
        )
        return pool._with_axes()

    def _with_axes(self) -> Self:
        if self.size == 0:
            zero = np.zeros((0, 0))
            return replace(
                self, axes=zero, centre=np.zeros(0), spread=np.ones(1), shared_trend=np.zeros(2)
            )
        deviation = self.scores - self.scores.mean(axis=1, keepdims=True)
        centre = deviation.mean(axis=0)
        deviation = deviation - centre
        n_axes = min(N_AXES, max(self.size - 1, 0))
        _, vectors = np.linalg.eigh(deviation.T @ deviation)
        axes = vectors[:, ::-1][:, :n_axes]
        axes = axes * np.where(axes[np.abs(axes).argmax(axis=0), np.arange(n_axes)] < 0, -1.0, 1.0)
        pool = replace(self, axes=axes, centre=centre)
        base, along = pool._project(self.scores)
        spread = np.concatenate([[base.std()], along.std(axis=0)])
        # The control variate must be orthogonal to the features, or it would bias their weights.
        features = _features(base, along)
        gram = features.T @ features + 1e-6 * np.eye(features.shape[1])
        trend = np.linalg.solve(gram, features.T @ _shared(pool.residuals))
        return replace(
            pool, spread=np.maximum(spread, 1e-6), shared_trend=np.asarray(trend, dtype=np.float64)
        )

    def _project(self, scores: Array) -> tuple[Array, Array]:
        mean = scores.mean(axis=1)
        base = logit(np.clip(mean, 0.02, 0.98))
        return base, (scores - mean[:, None] - self.centre) @ self.axes

    def scores_of(self, vectors: NDArray[Any], keys: Sequence[str] = ()) -> tuple[Array, Array]:
        """Return scores (prompts, models), cross-fitted for known keys, and the shared residual."""
        X = np.asarray(vectors, dtype=np.float64)
        scores = X @ self.coefficients + self.intercepts
        shared = np.zeros(len(X))
        line = self._lines() if keys else {}
        known = [(i, line[k]) for i, k in enumerate(keys) if k in line]
        if known:
            at, pool_at = (np.array(v, dtype=np.intp) for v in zip(*known, strict=True))
            scores[at] = self.scores[pool_at]
            base, along = self._project(self.scores[pool_at])
            features = _features(base, along)
            shared[at] = _shared(self.residuals[pool_at]) - features @ self.shared_trend
        return scores, shared

    def covariates(self, vectors: NDArray[Any], keys: Sequence[str] = ()) -> Covariates:
        """Return covariates; `keys` lets the pool recognise prompts it was fitted on."""
        n = len(vectors)
        if self.size == 0:
            return Covariates(np.zeros(n), np.zeros((n, 0)), np.zeros(n), np.zeros((n, 1)))
        scores, shared = self.scores_of(vectors, keys)
        base, along = self._project(scores)
        return Covariates(base, along, shared, self._profile(base, along))

    def _profile(self, base: Array, along: Array) -> Array:
        return np.column_stack([base, along]) / self.spread

    def own_covariates(self) -> Covariates:
        """Return the covariates of the pool's own prompts (cross-fitted)."""
        base, along = self._project(self.scores)
        shared = _shared(self.residuals) - _features(base, along) @ self.shared_trend
        return Covariates(base, along, shared, self._profile(base, along))

    def _lines(self) -> Mapping[str, int]:
        cached = self.__dict__.get("_line_cache")
        if cached is None:
            cached = {key: i for i, key in enumerate(self.keys)}
            object.__setattr__(self, "_line_cache", cached)
        return cached


def _folds(keys: Sequence[str], folds: int, seed: int) -> NDArray[np.intp]:
    """Deal prompts to folds: even sizes, fixed by the keys and the seed, not by their order."""
    order = sorted(range(len(keys)), key=lambda i: keys[i])
    fold = np.empty(len(keys), dtype=np.intp)
    fold[np.random.default_rng(seed).permutation(order)] = np.arange(len(keys)) % folds
    return fold


def _cross_fit(
    X: Array,
    rates: Array,
    known: NDArray[np.bool_],
    fold: NDArray[np.intp],
    penalties: Sequence[float],
) -> list[tuple[Array, Array, Array]]:
    """Return, a penalty, cross-fitted scores and the mean fold model (coefficients, intercepts)."""
    shape = X.shape[1], rates.shape[1]
    found = [(np.zeros_like(rates), np.zeros(shape), np.zeros(shape[1])) for _ in penalties]
    n_folds = int(fold.max()) + 1
    patterns, which = np.unique(known, axis=1, return_inverse=True)
    for f in range(n_folds):
        held = X[fold == f]
        for p in range(patterns.shape[1]):
            columns = np.flatnonzero(which.ravel() == p)
            rows = (fold != f) & patterns[:, p]
            a, y = X[rows], rates[np.ix_(rows, columns)]
            centre, level = a.mean(axis=0), y.mean(axis=0)
            a = a - centre
            gram, target = a.T @ a, a.T @ (y - level)
            for penalty, (scores, coefficients, intercepts) in zip(penalties, found, strict=True):
                w = np.linalg.solve(gram + penalty * np.eye(len(gram)), target)
                scores[np.ix_(fold == f, columns)] = (held - centre) @ w + level
                coefficients[:, columns] += w / n_folds
                intercepts[columns] += (level - centre @ w) / n_folds
    return found


def _features(base: Array, along: Array) -> Array:
    return np.column_stack([np.ones(len(base)), base, along])


def _shared(residuals: Array) -> Array:
    """Mean residual a prompt over the reference models, scaled by the share that is known."""
    known = np.isfinite(residuals)
    count = known.sum(axis=1)
    total = np.where(known, residuals, 0.0).sum(axis=1)
    return np.asarray(total / max(residuals.shape[1], 1) * (count > 0))


def _priors(pool: ReferencePool) -> Priors:
    """Treat each reference model as new, with covariates of the others (same model left out)."""
    rates = np.clip(pool.scores + pool.residuals, 0.0, 1.0)
    level = _beta_of(np.nanmean(rates, axis=0))
    if pool.size < 2:
        return replace(_DEFAULT, level=level)
    rows = np.arange(len(pool.keys))
    if len(rows) > _PRIOR_ROWS:
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:_PRIOR_ROWS])
    sub = replace(pool, keys=tuple(pool.keys[i] for i in rows), vectors=pool.vectors[rows],
                  scores=pool.scores[rows], residuals=pool.residuals[rows])  # fmt: skip
    weights: list[Array] = []
    along: list[float] = []
    crossed = [0.0, 0.0, 0.0]
    for j in range(pool.size):
        known = np.isfinite(sub.residuals[:, j])
        others = sub._columns(np.array([i for i in range(pool.size) if i != j]))
        c, y = others.own_covariates(), rates[rows, j]
        X = np.column_stack([np.ones(known.sum()), c.base[known], c.axes[known]])
        wide = np.diag([4.0, 4.0, *np.full(c.axes.shape[1], 4.0)])
        start = np.array([0.0, 1.0, *np.zeros(c.axes.shape[1])])
        n = np.ones(len(X))
        weights.append(fit_weights(X[:, :2], y[known], n, start[:2], wide[:2, :2]).mean)
        along.extend(fit_weights(X, y[known], n, start, wide).mean[2:])
        e, u = y[known] - sigmoid(X[:, :2] @ weights[-1]), c.shared[known]
        for i, value in enumerate((e @ u, u @ u, e @ e)):
            crossed[i] += float(value)
    W = np.array(weights)
    # One pseudo-model at the default and three at its spread keep small pools honest.
    mean = (W.sum(axis=0) + np.array([0.0, 1.0])) / (len(W) + 1)
    centred = W - mean
    covariance = (centred.T @ centred + 3 * np.diag([1.0, 0.25])) / (len(W) + 3)
    axis_variance = float(np.sum(np.square(along)) + 3.0) / (len(along) + 3)
    slope = crossed[0] / crossed[1] if crossed[1] > 1e-9 else 0.0
    explained = slope * crossed[0] / max(crossed[2], 1e-9)
    dispersion = float(np.clip(1.0 - explained, 0.3, 1.0))
    return Priors(level, mean, covariance, axis_variance, float(slope), dispersion)


def _beta_of(means: Array) -> tuple[float, float]:
    """Beta parameters by moments of the models' success rates, at most 20 trials strong."""
    mean = float(np.clip(means.mean(), 0.02, 0.98))
    variance = float(np.var(means)) if len(means) > 1 else 0.05
    strength = np.clip(mean * (1 - mean) / max(variance, 1e-4) - 1, 1.0, 20.0)
    return mean * float(strength), (1 - mean) * float(strength)
