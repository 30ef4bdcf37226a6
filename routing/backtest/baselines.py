"""Rival predictors for a new model, each tuned on the same labels it is given.

Context only: mean, mean a data set, k-means clusters (Avengers), β-kNN, kernel smoother, ridge with
leave-one-out penalty. With the reference models' scores as well: 2PL and matrix factorisation with
fold-in. Tuning is by leave-one-out (or the fold-in's posterior form) on the N labels, never on
test.
Does not know the value model. Sources: `docs/routing.md` lists each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfgrpo.routing.estimator.laplace import fit_weights, logit
from tfgrpo.routing.estimator.own_layers import NEIGHBOURS, weighted_rates
from tfgrpo.routing.estimator.reference_pool import Covariates, ReferencePool
from tfgrpo.routing.estimator.ridge import fit_ridge

Array = NDArray[np.float64]

__all__ = ["RIVALS", "Trial"]


@dataclass(frozen=True)
class Trial:
    """What a rival sees: N labelled prompts of a model, unlabelled queries, the pool."""

    vectors: Array
    """Unit vectors of the labelled prompts, shape (N, width)."""
    rates: Array
    """Success rate a labelled prompt."""
    queries: Array
    """Unit vectors of the prompts to predict."""
    datasets: NDArray[np.str_]
    query_datasets: NDArray[np.str_]
    pool: ReferencePool
    context: Covariates
    asked: Covariates
    context_scores: Array
    """The reference models' scores of the labelled prompts (cross-fitted), shape (N, models)."""
    asked_scores: Array
    clusters: NDArray[np.intp]
    """k-means cluster of each labelled prompt (centres from unlabelled reference prompts)."""
    query_clusters: NDArray[np.intp]

    @property
    def level(self) -> float:
        """Smoothed mean of the labels."""
        return float((self.rates.sum() + 1.0) / (len(self.rates) + 2.0))


def _loss(p: Array, rates: Array) -> float:
    return float(np.mean((p - rates) ** 2))


def context_mean(t: Trial) -> Array:
    """Prompt-blind: the smoothed mean."""
    return np.full(len(t.queries), t.level)


def _by_group(t: Trial, context: NDArray[np.generic], asked: NDArray[np.generic]) -> Array:
    """Mean a group with Beta shrinkage to the level; strength by leave-one-out."""
    names, code = np.unique(np.concatenate([context, asked]), return_inverse=True)
    mine, theirs = code[: len(context)], code[len(context) :]
    count = np.bincount(mine, minlength=len(names)).astype(float)
    total = np.bincount(mine, weights=t.rates, minlength=len(names))
    strengths = (1.0, 3.0, 10.0, 30.0)
    losses = [
        _loss((total[mine] - t.rates + s * t.level) / (count[mine] - 1 + s), t.rates)
        for s in strengths
    ]
    s = strengths[int(np.argmin(losses))]
    return np.asarray((total[theirs] + s * t.level) / (count[theirs] + s))


def domain_mean(t: Trial) -> Array:
    """Mean a data set or category."""
    return _by_group(t, t.datasets, t.query_datasets)


def k_means(t: Trial) -> Array:
    """Mean a cluster of prompts, as Avengers routes."""
    return _by_group(t, t.clusters, t.query_clusters)


def _neighbours(
    a: Array, b: Array, k: int, *, same: bool = False
) -> tuple[NDArray[np.intp], Array]:
    cosines = a @ b.T
    if same:
        np.fill_diagonal(cosines, -np.inf)
    k = min(k, b.shape[0] - (1 if same else 0))
    index = np.argpartition(-cosines, max(k - 1, 0), axis=1)[:, :k]
    return index, np.take_along_axis(cosines, index, axis=1)


def beta_knn(t: Trial, k: int = 20) -> Array:
    """k nearest success counts with Beta shrinkage; strength by leave-one-out."""
    left, _ = _neighbours(t.vectors, t.vectors, k, same=True)
    strengths = (2.0, 5.0, 10.0, 20.0, 50.0, 200.0)
    losses = [
        _loss((t.rates[left].sum(1) + s * t.level) / (left.shape[1] + s), t.rates)
        for s in strengths
    ]
    s = strengths[int(np.argmin(losses))]
    near, _ = _neighbours(t.queries, t.vectors, k)
    return np.asarray((t.rates[near].sum(1) + s * t.level) / (near.shape[1] + s))


def beta_knn_50(t: Trial) -> Array:
    """β-kNN with k = 50."""
    return beta_knn(t, 50)


def plain_knn(t: Trial) -> Array:
    """The unshrunk mean of the ten nearest labels."""
    near, _ = _neighbours(t.queries, t.vectors, 10)
    return np.asarray(t.rates[near].mean(axis=1))


def kernel(t: Trial) -> Array:
    """Nadaraya–Watson smoother with shrinkage; bandwidth and strength by leave-one-out."""
    cosines = t.vectors @ t.vectors.T
    asked = t.queries @ t.vectors.T
    best: tuple[float, float, float] | None = None
    for width in (0.05, 0.1, 0.2):
        w = np.exp((cosines - 1) / width)
        np.fill_diagonal(w, 0.0)
        unit = np.exp((np.median(np.max(cosines - 2 * np.eye(len(cosines)), axis=1)) - 1) / width)
        for strength in (1.0, 5.0, 20.0, 100.0):
            s = strength * unit
            loss = _loss((w @ t.rates + s * t.level) / (w.sum(1) + s), t.rates)
            if best is None or loss < best[0]:
                best = loss, width, s
    assert best is not None
    w = np.exp((asked - 1) / best[1])
    return np.asarray((w @ t.rates + best[2] * t.level) / (w.sum(1) + best[2]))


def ridge(t: Trial) -> Array:
    """Ridge on the prompt vector, penalty by closed-form leave-one-out."""
    fit = fit_ridge(t.vectors, t.rates, (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0))
    return np.asarray(np.clip(fit.predict(t.queries), 0.01, 0.99))


def weighted_knn(t: Trial) -> Array:
    """50 nearest labels weighted by a power of the cosine; power and strength by leave-one-out."""
    left, cosines = _neighbours(t.vectors, t.vectors, NEIGHBOURS, same=True)
    best: tuple[float, float, float] | None = None
    for power in (1.0, 3.0, 8.0):
        for strength in (0.5, 2.0, 5.0, 15.0, 50.0):
            p = weighted_rates(cosines, t.rates[left], t.level, power, strength)
            loss = _loss(p, t.rates)
            if best is None or loss < best[0]:
                best = loss, power, strength
    assert best is not None
    near, cosines = _neighbours(t.queries, t.vectors, NEIGHBOURS)
    return weighted_rates(cosines, t.rates[near], t.level, best[1], best[2])


def two_parameter(t: Trial) -> Array:
    """2PL on frozen difficulty: MAP weights, prior from the reference models."""
    if not t.pool.size:
        return context_mean(t)
    priors, n = t.pool.priors, np.ones(len(t.rates))
    X = np.column_stack([np.ones(len(t.context.base)), t.context.base])
    fit = fit_weights(X, t.rates, n, priors.weights, priors.covariance)
    return fit.predict(np.column_stack([np.ones(len(t.asked.base)), t.asked.base])).probability


def factorisation(t: Trial) -> Array:
    """Matrix factorisation with fold-in.

    Prompt factors are the leading components of the reference models' log-odds scores; the new
    model's vector is fitted to its labels with a penalty picked by leave-one-out.
    """
    if t.pool.size < 2:
        return context_mean(t)
    own = logit(np.clip(t.pool.scores, 0.02, 0.98))
    centre = own.mean(axis=0)
    rank = min(8, t.pool.size)
    _, vectors = np.linalg.eigh((own - centre).T @ (own - centre))
    basis = vectors[:, ::-1][:, :rank]
    scale = ((own - centre) @ basis).std(axis=0) + 1e-6

    def factors(scores: Array) -> Array:
        z = (logit(np.clip(scores, 0.02, 0.98)) - centre) @ basis / scale
        return np.column_stack([np.ones(len(z)), z])

    X, Q = factors(t.context_scores), factors(t.asked_scores)
    n, start = np.ones(len(t.rates)), np.zeros(X.shape[1])
    start[0] = logit(np.array([t.level]))[0]
    best: tuple[float, Array] | None = None
    for spread in (0.03, 0.1, 0.3, 1.0, 3.0):
        prior = np.diag([1.0, *np.full(rank, spread)])
        fit = fit_weights(X, t.rates, n, start, prior)
        loss = _loss(fit.left_out.probability, t.rates)
        if best is None or loss < best[0]:
            best = loss, fit.predict(Q).probability
    assert best is not None
    return best[1]


RIVALS: Mapping[str, Callable[[Trial], Array]] = {
    "mean": context_mean,
    "domain": domain_mean,
    "k_means": k_means,
    "knn10": plain_knn,
    "beta_knn20": beta_knn,
    "beta_knn50": beta_knn_50,
    "weighted_knn50": weighted_knn,
    "kernel": kernel,
    "ridge": ridge,
    "2pl": two_parameter,
    "mf": factorisation,
}
"""Name to function of a trial; every one returns a probability a query."""
