"""The layers of the value model, one class each: log odds of one model's success.

    Level   Beta-binomial on the counts
    Linear  weights on the reference covariates
    Local   a Gaussian process, near in meaning and in reference profile
    Net     the small network's correction of the closed form

Each is fitted to the evidence of one model when it is made, and answers twice: `left_out` for the
context rows, each from the other rows, and `predict` for new prompts.
Does not know the other layers' weight in the blend, texts or embedders.
Sources: 2PL and control variates are classic; their use here and the kernel are own, see
`docs/routing.md`; `laplace` and `network` name theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tfgrpo.routing.estimator.laplace import Gaussian, fit_process, fit_weights, logit
from tfgrpo.routing.estimator.network import load_network, tokens
from tfgrpo.routing.estimator.reference_pool import Covariates, ReferencePool
from tfgrpo.runtime.embedders import Floats, NeighbourIndex

__all__ = [
    "Evidence",
    "Expert",
    "Level",
    "Linear",
    "Local",
    "LocalPrior",
    "NearResidual",
    "Net",
    "NetworkContext",
    "NetworkInputs",
    "Query",
]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an expert is fitted to: one model's outcomes on the context rows, and the pool."""

    pool: ReferencePool
    vectors: Array
    """Shape (rows, width)."""
    counts: Array
    """Successes a row."""
    trials: Array
    covariates: Covariates
    """What the pool says about the rows."""
    local_rows: int
    """Most rows that the process and the network read; of more, they read a random part."""

    def read_rows(self) -> NDArray[np.int64]:
        """Numbers of the rows that the process and the network read, ascending."""
        rows = np.arange(len(self.counts))
        if len(rows) <= self.local_rows:
            return rows
        return np.sort(np.random.default_rng(0).permutation(rows)[: self.local_rows])


@dataclass(frozen=True, slots=True)
class Query:
    """Prompts that an expert is asked about."""

    vectors: Array
    """Shape (prompts, width)."""
    covariates: Covariates


class Expert(Protocol):
    """One layer, fitted to one model's outcomes."""

    @property
    def left_out(self) -> Gaussian:
        """Log odds of each context row, from the other rows."""
        ...

    def predict(self, query: Query) -> Gaussian:
        """Log odds of new prompts."""
        ...


class Level:
    """Beta-binomial: the same answer for every prompt."""

    def __init__(self, seen: Evidence) -> None:
        a, b = seen.pool.priors.level
        self.a = a + float(seen.counts.sum())
        self.b = b + float((seen.trials - seen.counts).sum())
        self._everywhere = _beta_logits(np.array([self.a]), np.array([self.b]))
        self.left_out = _beta_logits(self.a - seen.counts, self.b - (seen.trials - seen.counts))

    def predict(self, query: Query) -> Gaussian:
        """See `Expert`."""
        n, one = len(query.vectors), self._everywhere
        return _BetaLogits(
            np.full(n, one.mean[0]), np.full(n, one.variance[0]), np.full(n, one.probability[0])
        )


@dataclass(frozen=True, slots=True)
class _BetaLogits(Gaussian):
    exact: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def probability(self) -> Array:
        return self.exact


def _beta_logits(a: Array, b: Array) -> Gaussian:
    """Log odds of a Beta variable: digamma and trigamma moments; the mean of p stays exact."""
    from scipy.special import digamma, polygamma

    a, b = np.maximum(a, 1e-3), np.maximum(b, 1e-3)
    return _BetaLogits(digamma(a) - digamma(b), polygamma(1, a) + polygamma(1, b), a / (a + b))


def _quasi(seen: Evidence) -> tuple[Array, Array]:
    """Counts and trials after subtracting the noise shared with the reference models."""
    priors, c = seen.pool.priors, seen.covariates
    known = c.shared != 0.0
    phi = np.where(known, priors.dispersion, 1.0)
    counts = seen.counts - seen.trials * priors.shared_slope * c.shared
    return counts / phi, seen.trials / phi


class Linear:
    """Log odds linear in the reference covariates."""

    def __init__(self, seen: Evidence, *, with_axes: bool) -> None:
        self._with_axes = with_axes
        priors = seen.pool.priors
        X = self._features(seen.covariates)
        extra = X.shape[1] - 2
        mean = np.concatenate([priors.weights, np.zeros(extra)])
        covariance = np.diag(np.full(len(mean), priors.axis_variance))
        covariance[:2, :2] = priors.covariance
        self.posterior = fit_weights(X, *_quasi(seen), mean, covariance)
        self.left_out: Gaussian = self.posterior.left_out

    def _features(self, c: Covariates) -> Array:
        columns = [np.ones(len(c.base)), c.base]
        return np.column_stack([*columns, c.axes] if self._with_axes else columns)

    def predict(self, query: Query) -> Gaussian:
        """See `Expert`."""
        return self.posterior.predict(self._features(query.covariates))


LOCAL_VARIANCE = 1.0
LOCAL_LENGTH = 0.7
"""Length scale in cosine: the kernel falls to 1/e where the cosine is 0.7 below 1."""
PROFILE_LENGTH = 2.0
"""Length scale in pool spreads of difficulty and axes."""


def closed_of(pool: ReferencePool) -> Literal["level", "difficulty", "axes"]:
    """Return the richest linear layer that a pool allows: what the network corrects."""
    if not pool.size:
        return "level"
    return "axes" if pool.axes.size else "difficulty"


class LocalPrior:
    """Prior of the log odds as a Gaussian process: weights, axes and nearness in one kernel."""

    def __init__(self, pool: ReferencePool, ground: Array) -> None:
        self._priors = pool.priors
        ground = pool.vectors if len(pool.vectors) else ground
        self.centre: Array = ground.mean(axis=0) if len(ground) else np.zeros(ground.shape[1])

    def centred(self, vectors: Array, covariates: Covariates) -> Query:
        """Return a query with vectors that are centred on the ground and of length 1."""
        moved = vectors - self.centre
        unit = moved / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-9)
        return Query(unit, covariates)

    def mean(self, q: Query) -> Array:
        """Prior mean."""
        w = self._priors.weights
        return np.asarray(w[0] + w[1] * q.covariates.base)

    @staticmethod
    def _linear(q: Query) -> Array:
        return np.column_stack([np.ones(len(q.covariates.base)), q.covariates.base])

    def kernel(self, a: Query, b: Query) -> Array:
        """Prior covariance, shape (a, b)."""
        linear = self._linear(a) @ self._priors.covariance @ self._linear(b).T
        axes = self._priors.axis_variance * a.covariates.axes @ b.covariates.axes.T
        near = (np.minimum(a.vectors @ b.vectors.T, 1.0) - 1.0) / LOCAL_LENGTH
        pa, pb = a.covariates.profile, b.covariates.profile
        far = np.sum(pa**2, 1)[:, None] + np.sum(pb**2, 1) - 2 * pa @ pb.T
        local = LOCAL_VARIANCE * np.exp(near - np.maximum(far, 0.0) / (2 * PROFILE_LENGTH**2))
        return np.asarray(linear + axes + local)

    def variance(self, q: Query) -> Array:
        """Diagonal of the prior covariance."""
        x = self._linear(q)
        linear = np.einsum("ij,jk,ik->i", x, self._priors.covariance, x)
        axes = self._priors.axis_variance * np.sum(q.covariates.axes**2, axis=1)
        return np.asarray(linear + axes + LOCAL_VARIANCE)


class Local:
    """The axes' log odds plus a Gaussian process, near in meaning and in reference profile."""

    def __init__(self, seen: Evidence) -> None:
        rows = seen.read_rows()
        self._prior = LocalPrior(seen.pool, seen.vectors)
        whole = self._prior.centred(seen.vectors, seen.covariates)
        self._context = Query(whole.vectors[rows], whole.covariates.take(rows))
        counts, trials = _quasi(seen)
        kernel = self._prior.kernel(self._context, self._context)
        mean = self._prior.mean(self._context)
        self.posterior = fit_process(kernel, mean, counts[rows], trials[rows])
        self.left_out: Gaussian = self.posterior.left_out
        self.beyond: NearResidual | None = None
        if len(rows) < len(seen.counts):
            out = self._process(whole)
            f, v = out.mean.copy(), out.variance.copy()
            f[rows], v[rows] = self.left_out.mean, self.left_out.variance
            rate = seen.counts / seen.trials
            self.beyond = NearResidual(whole.vectors, rate - Gaussian(f, v).probability)
            self.left_out = self.beyond.correct(Gaussian(f, v), whole.vectors, hide_self=True)

    def _process(self, q: Query) -> Gaussian:
        """The process at new prompts, in blocks: a kernel of all of them would not fit."""
        parts = []
        for start in range(0, max(len(q.vectors), 1), _BLOCK):
            at = np.arange(start, min(start + _BLOCK, len(q.vectors)))
            part = Query(q.vectors[at], q.covariates.take(at))
            cross = self._prior.kernel(part, self._context)
            parts.append(
                self.posterior.predict(self._prior.mean(part), cross, self._prior.variance(part))
            )
        return Gaussian(
            np.concatenate([p.mean for p in parts]), np.concatenate([p.variance for p in parts])
        )

    def predict(self, query: Query) -> Gaussian:
        """See `Expert`."""
        q = self._prior.centred(query.vectors, query.covariates)
        found = self._process(q)
        return found if self.beyond is None else self.beyond.correct(found, q.vectors)


_BLOCK = 1024
NEAR = 20
_NEAR_STRENGTHS = (20.0, 60.0, 200.0, math.inf)
"""Neighbours that say nothing, set against the near ones; picked by leave-one-out."""


class NearResidual:
    """What a process on part of a large context leaves: shrunk mean residual of all near rows."""

    def __init__(self, vectors: Array, residuals: Array) -> None:
        self._index = NeighbourIndex(vectors.astype(np.float32))
        self.residuals = residuals
        total = self._near(vectors, hide_self=True)
        errors = [np.mean((residuals - total / (NEAR + s)) ** 2) for s in _NEAR_STRENGTHS]
        self.strength = _NEAR_STRENGTHS[int(np.argmin(errors))]

    def _near(self, vectors: Array, *, hide_self: bool) -> Array:
        """Sum of the residuals of the nearest rows."""
        wide = vectors.astype(np.float32)
        near = np.vstack(
            [self._index.search(wide[i : i + _BLOCK], NEAR + int(hide_self))[0]
             for i in range(0, max(len(wide), 1), _BLOCK)]
        )  # fmt: skip
        left = self.residuals[near]
        if hide_self:
            left = np.where(near == np.arange(len(near))[:, None], 0.0, left)
        return np.asarray(left.sum(axis=1))

    def correct(self, f: Gaussian, vectors: Array, *, hide_self: bool = False) -> Gaussian:
        """Return log odds whose probability is moved by the shrunk residual."""
        if math.isinf(self.strength):
            return f
        change = self._near(vectors, hide_self=hide_self) / (NEAR + self.strength)
        spread = np.sqrt(1.0 + np.pi / 8.0 * f.variance)
        moved = logit(np.clip(f.probability + change, 0.01, 0.99)) * spread
        return Gaussian(moved, f.variance)


@dataclass(frozen=True, slots=True)
class NetworkInputs:
    """What the network is given for some queries of a model."""

    context: Floats
    queries: Floats
    cosines: Floats
    skip: Gaussian
    """The closed form's log odds of the queries, which the network corrects."""


class NetworkContext:
    """The closed form below the network, and the context as tokens."""

    def __init__(self, seen: Evidence, closed_form: Expert) -> None:
        self._prior = LocalPrior(seen.pool, seen.vectors)
        self._skip = closed_form
        n, rows = len(seen.counts), seen.read_rows()
        left = self._skip.left_out
        self.n, self.rows = n, rows
        self.left_out = Gaussian(left.mean[rows], left.variance[rows])
        c = seen.covariates.take(rows)
        self.queries = tokens(self.left_out.mean, self.left_out.variance, c.profile, n)
        rate = seen.counts[rows] / seen.trials[rows]
        wrong = rate - self.left_out.probability
        labels = np.column_stack([2 * wrong, np.log1p(seen.trials[rows]) / 3])
        self.context = np.column_stack([self.queries, labels]).astype(np.float32)
        self.vectors = self._prior.centred(seen.vectors[rows], c).vectors.astype(np.float32)

    def ask(self, query: Query) -> NetworkInputs:
        """Return what the network is given for new prompts."""
        skip = self._skip.predict(query)
        unit = self._prior.centred(query.vectors, query.covariates).vectors.astype(np.float32)
        asked = tokens(skip.mean, skip.variance, query.covariates.profile, self.n)
        return NetworkInputs(self.context, asked, unit @ self.vectors.T, skip)


class Net:
    """The network's correction of the closed form."""

    def __init__(self, seen: Evidence, closed_form: Expert) -> None:
        self._network = load_network()
        self.context = c = NetworkContext(seen, closed_form)
        self._states = self._network.encode(c.context)
        change = self._network.correct(
            c.queries, self._states, c.vectors @ c.vectors.T, hide_self=True
        )
        whole = closed_form.left_out
        mean = whole.mean.copy()
        mean[c.rows] += change
        self.left_out: Gaussian = Gaussian(mean, whole.variance)

    def predict(self, query: Query) -> Gaussian:
        """See `Expert`."""
        inputs = self.context.ask(query)
        change = self._network.correct(inputs.queries, self._states, inputs.cosines)
        return Gaussian(inputs.skip.mean + change, inputs.skip.variance)
