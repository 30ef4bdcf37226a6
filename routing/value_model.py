"""P(success | prompt, model) of any model from its outcomes, as four layers blended by evidence.

    level       Beta-binomial on the counts
    difficulty  two weights on the reference difficulty (2PL), and on its latent axes (`axes`)
    local       a Gaussian process on what the axes leave, near in meaning and in reference profile
    network     a small prior-fitted network, corrections to the log odds of `axes`

Each layer predicts every context row from the other rows (leave-one-out); the blend is the mixture
that explains those best, with a prior on the mixture so that 16 rows cannot swing it. A layer that
is wrong here gets no weight here. No parameter is trained: a new outcome is a new row.
Does not know prices, policies of routing or files.
Sources: in-context value estimation (V_0, arXiv 2602.03584); everything after the idea is own, see
`docs/routing.md` for what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.routing.laplace import Gaussian, fit_process, fit_weights, logit, sigmoid
from tfgrpo.routing.network import load_network, tokens
from tfgrpo.routing.records import Outcome
from tfgrpo.routing.reference import Covariates, ReferencePool
from tfgrpo.routing.vectors import Embedder, NeighbourIndex

__all__ = ["Coverage", "Estimates", "Layer", "LAYERS", "ModelState", "ValueModel"]

Array = NDArray[np.float64]
FloatRows = NDArray[np.float32]
Layer = Literal["level", "difficulty", "axes", "local", "network"]
LAYERS: tuple[Layer, ...] = get_args(Layer)
Coverage = Literal["covered", "far", "thin", "empty"]
"""`far`: unlike everything seen; `thin`: fewer than `MIN_TRIALS` trials or one class only;
`empty`: no outcome of this model at all."""

MIN_TRIALS = 8.0

_BLEND_PRIOR: Mapping[Layer, float] = {
    "level": 0.05, "difficulty": 1.0, "axes": 1.0, "local": 1.5, "network": 1.5,
}  # fmt: skip
"""Pseudo-observations a layer in the mixture."""

_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
_NODE_WEIGHTS = _NODE_WEIGHTS / _NODE_WEIGHTS.sum()


@dataclass(frozen=True, slots=True)
class Estimates:
    """Answers for some prompts, in order."""

    mean: Array
    """Expected success probability."""
    low: Array
    """Lower end of the interval of the success probability."""
    high: Array
    """Upper end."""
    level: float
    """Probability mass of the interval, such as 0.9."""
    effective_n: Array
    """Trials that would make a Beta posterior as narrow as this one."""
    coverage: tuple[Coverage, ...]
    weights: Mapping[Layer, float]
    """The mixture over layers, the same for every prompt."""
    logits: Gaussian
    """Moment-matched log odds: the posterior that allocators and Thompson draws use."""

    def __len__(self) -> int:
        return len(self.mean)

    def draw(self, rng: np.random.Generator) -> Array:
        """Return one success probability a prompt from the posterior."""
        noise = rng.standard_normal(len(self.mean))
        return sigmoid(self.logits.mean + np.sqrt(self.logits.variance) * noise)


class ValueModel:
    """A reference pool, an embedder and the layers in use: makes the state of any model."""

    def __init__(
        self,
        embedder: Embedder,
        pool: ReferencePool | None = None,
        *,
        layers: Sequence[Layer] = LAYERS,
        local_rows: int = 1024,
    ) -> None:
        unknown = [name for name in layers if name not in LAYERS]
        if unknown or not layers:
            raise ConfigError(
                f"layers {list(layers)!r}: unknown {unknown}; choose one or more of "
                f"{', '.join(LAYERS)}"
            )
        if pool is not None and pool.embedder_id != embedder.embedder_id:
            raise ConfigError(
                f"the pool was fitted on vectors of {pool.embedder_id!r}, the embedder is "
                f"{embedder.embedder_id!r}: use the same one, or fit the pool again"
            )
        self.embedder = embedder
        self.pool = pool or ReferencePool.empty(embedder.embedder_id, embedder.width)
        self.layers = tuple(name for name in LAYERS if name in layers)
        self.local_rows = local_rows

    def state(
        self,
        outcomes: Sequence[Outcome],
        *,
        model: str = "",
        now: float | None = None,
        half_life: float | None = None,
    ) -> ModelState:
        """Return the state of one model after its outcomes; the order of rows does not matter.

        With `half_life`, a row dated `at` counts 0.5 ** ((now − at) / half_life) of its trials
        (`now` defaults to the newest row); undated rows count in full.

        Raises:
            ConfigError: rows of several models.
        """
        names = sorted({r.model for r in outcomes} | ({model} if model else set()))
        if len(names) > 1:
            raise ConfigError(f"one state is one model; the outcomes are of {', '.join(names)}")
        rows = _Rows.merge(outcomes, now, half_life)
        vectors = np.asarray(self.embedder.embed(rows.prompts), dtype=np.float64)
        return self.state_of_counts(
            vectors, rows.counts, rows.trials, keys=rows.keys, model=names[0] if names else ""
        )

    def state_of_counts(
        self,
        vectors: NDArray[Any],
        counts: Array,
        trials: Array,
        *,
        keys: Sequence[str] = (),
        model: str = "",
    ) -> ModelState:
        """Return the state for rows that are vectors already; `keys` must be distinct."""
        vectors = np.asarray(vectors, dtype=np.float64).reshape(len(counts), self.embedder.width)
        return ModelState(self, model, vectors, counts, trials, self.pool.covariates(vectors, keys))


@dataclass(frozen=True, slots=True)
class _Rows:
    keys: tuple[str, ...]
    prompts: tuple[str, ...]
    counts: Array
    trials: Array

    @classmethod
    def merge(
        cls, outcomes: Sequence[Outcome], now: float | None, half_life: float | None
    ) -> _Rows:
        if half_life is not None and not half_life > 0:
            raise ConfigError(f"half_life is {half_life!r}; allowed is a number above 0, or None")
        dated = [r.at for r in outcomes if r.at is not None]
        if now is None and dated:
            now = max(dated)
        prompts: dict[str, str] = {}
        sums: dict[str, list[tuple[float, float]]] = {}
        for row in outcomes:
            weight = 1.0
            if half_life is not None and row.at is not None and now is not None:
                weight = 0.5 ** (max(now - row.at, 0.0) / half_life)
            prompts.setdefault(row.key, row.prompt)
            sums.setdefault(row.key, []).append((weight * row.successes, weight * row.trials))
        keys = tuple(sorted(sums))
        total = [np.sum(sorted(sums[k]), axis=0) for k in keys]
        return cls(
            keys,
            tuple(prompts[k] for k in keys),
            np.array([t[0] for t in total]),
            np.array([t[1] for t in total]),
        )


@dataclass(frozen=True, slots=True)
class _Query:
    vectors: Array
    covariates: Covariates


class ModelState:
    """One model's outcomes, digested: predicts any prompt in well under a millisecond."""

    def __init__(
        self,
        owner: ValueModel,
        model: str,
        vectors: Array,
        counts: Array,
        trials: Array,
        covariates: Covariates,
    ) -> None:
        self.model, self._owner = model, owner
        self.vectors, self.counts, self.trials = vectors, counts, trials
        self.covariates = covariates
        self._known_ground: tuple[FloatRows, float] | None = None
        self._closed: _Expert | None = None
        self._experts: dict[Layer, _Expert] = {}
        for name in owner.layers:
            if self._can(name):
                self._experts[name] = _EXPERTS[name](self)
        self.weights: Mapping[Layer, float] = self._blend()

    @property
    def owner(self) -> ValueModel:
        """The value model that made this state."""
        return self._owner

    @property
    def n_trials(self) -> float:
        """Trials behind this state, after ageing."""
        return float(self.trials.sum())

    def _can(self, layer: Layer) -> bool:
        if layer == "difficulty":
            return self._owner.pool.size > 0
        if layer == "axes":
            return self._owner.pool.axes.size > 0
        return layer == "level" or len(self.counts) > 0

    def _blend(self) -> Mapping[Layer, float]:
        prior = np.array([_BLEND_PRIOR[name] for name in self._experts])
        if not len(self.counts) or len(self._experts) == 1:
            weights = prior / prior.sum()
        else:
            p = np.stack([e.left_out.probability for e in self._experts.values()])
            weights = mixture_weights(p, self.counts, self.trials, prior)
        return dict(zip(self._experts, (float(w) for w in weights), strict=True))

    def closed_form(self) -> _Expert:
        """Return the richest linear layer that the pool allows, in use or not."""
        if self._closed is None:
            for name in ("axes", "difficulty", "level"):
                if name in self._experts or self._can(name):
                    self._closed = self._experts.get(name) or _EXPERTS[name](self)
                    break
        assert self._closed is not None
        return self._closed

    def left_out(self) -> Array:
        """Return the blended leave-one-out probability of each context row."""
        parts = [w * self._experts[name].left_out.probability for name, w in self.weights.items()]
        return np.asarray(np.sum(parts, axis=0))

    def predict(self, prompts: Sequence[str], *, level: float = 0.9) -> Estimates:
        """Return estimates for texts; see `predict_vectors`."""
        return self.predict_vectors(self._owner.embedder.embed(prompts), level=level)

    def predict_vectors(
        self, vectors: NDArray[Any], *, keys: Sequence[str] = (), level: float = 0.9
    ) -> Estimates:
        """Return estimates for prompt vectors of shape (prompts, width).

        Raises:
            ConfigError: `level` is not inside (0, 1), or the width is another embedder's.
        """
        from scipy.special import ndtri

        if not 0 < level < 1:
            raise ConfigError(f"interval level {level!r}: allowed is a number between 0 and 1")
        vectors = np.asarray(vectors, dtype=np.float64)
        if vectors.ndim != 2 or vectors.shape[1] != self._owner.embedder.width:
            raise ConfigError(
                f"vectors of shape {vectors.shape}: expected (prompts, "
                f"{self._owner.embedder.width}) of "
                f"{self._owner.embedder.embedder_id!r}"
            )
        query = _Query(vectors, self._owner.pool.covariates(vectors, keys))
        parts = {name: self._experts[name].predict(query) for name in self.weights}
        w = np.array([self.weights[name] for name in parts])[:, None]
        f = np.stack([g.mean for g in parts.values()])
        v = np.stack([g.variance for g in parts.values()])
        p = np.stack([g.probability for g in parts.values()])
        mean = np.sum(w * p, axis=0)
        centre = np.sum(w * f, axis=0)
        variance = np.sum(w * (v + f**2), axis=0) - centre**2
        logits = Gaussian(centre, np.maximum(variance, 1e-9))
        half = ndtri(0.5 + level / 2) * np.sqrt(logits.variance)
        return Estimates(
            mean=mean,
            low=np.minimum(sigmoid(centre - half), mean),
            high=np.maximum(sigmoid(centre + half), mean),
            level=level,
            effective_n=_effective_trials(logits),
            coverage=self._coverage(query),
            weights=self.weights,
            logits=logits,
        )

    def _coverage(self, query: _Query) -> tuple[Coverage, ...]:
        if not len(self.counts):
            nothing: Coverage = "empty"
            return (nothing,) * len(query.vectors)
        rate = self.counts.sum() / self.trials.sum()
        thin = self.n_trials < MIN_TRIALS or rate in (0.0, 1.0)
        nearest, floor = self._ground(query.vectors)
        near: Coverage = "thin" if thin else "covered"
        far: Coverage = "far"
        return tuple(far if c < floor else near for c in nearest)

    def _ground(self, vectors: Array) -> tuple[Array, float]:
        """Cosine to the nearest known prompt, and the cosine below which a prompt is far."""
        if self._known_ground is None:
            pool = self._owner.pool.vectors
            pool = pool[:: max(len(pool) // _GROUND_ROWS, 1)]
            known = np.vstack([self.vectors, pool]).astype(np.float32)
            sample = known[:: max(len(known) // 512, 1)]
            cosines = np.sort(sample @ known.T, axis=1)[:, -2:-1]  # the largest is the row itself
            floor = float(np.quantile(cosines, 0.01)) if cosines.size else -1.0
            self._known_ground = known, floor
        known, floor = self._known_ground
        nearest = (known @ vectors.T.astype(np.float32)).max(axis=0)
        return nearest.astype(np.float64), floor


_GROUND_ROWS = 256


def _effective_trials(logits: Gaussian) -> Array:
    """Return n with p(1 − p)/(n + 1) equal to the posterior variance of p (9-node quadrature)."""
    at = sigmoid(logits.mean[:, None] + np.sqrt(logits.variance)[:, None] * _NODES)
    mean = at @ _NODE_WEIGHTS
    variance = np.maximum((at - mean[:, None]) ** 2 @ _NODE_WEIGHTS, 1e-9)
    return np.asarray(np.maximum(mean * (1 - mean) / variance - 1, 0.0))


def mixture_weights(p: Array, counts: Array, trials: Array, prior: Array) -> Array:
    """Return the mixture of experts that best explains counts: damped Newton on the simplex.

    `p` has shape (experts, rows): leave-one-out probabilities. The objective is the log likelihood
    of the mixed probability plus Σ prior·log weight, concave with its maximum inside.
    """
    p = np.clip(p, 1e-6, 1 - 1e-6)
    failures = trials - counts
    w = prior / prior.sum()
    k = len(w)

    def objective(w: Array) -> float:
        mixed = w @ p
        fit = counts @ np.log(mixed) + failures @ np.log1p(-mixed)
        return float(fit + prior @ np.log(w))

    value = objective(w)
    for _ in range(60):
        mixed = w @ p
        slope = counts / mixed - failures / (1 - mixed)
        bend = counts / mixed**2 + failures / (1 - mixed) ** 2
        system = np.zeros((k + 1, k + 1))
        system[:k, :k] = (p * bend) @ p.T + np.diag(prior / w**2)
        system[:k, k] = system[k, :k] = 1.0
        step = np.linalg.solve(system, np.append(p @ slope + prior / w, 0.0))[:k]
        scale = 1.0
        shrinking = step < 0
        if shrinking.any():
            scale = min(1.0, 0.95 * float(np.min(-w[shrinking] / step[shrinking])))
        while (new := objective(w + scale * step)) < value and scale > 1e-8:
            scale *= 0.5
        w = w + scale * step
        if new - value < 1e-9:
            break
        value = new
    return np.asarray(w / w.sum())


class _Expert(Protocol):
    @property
    def left_out(self) -> Gaussian:
        """Log odds of each context row, from the other rows."""
        ...

    def predict(self, query: _Query) -> Gaussian:
        """Log odds of new prompts."""
        ...


class _Level:
    """Beta-binomial: the same answer for every prompt."""

    def __init__(self, state: ModelState) -> None:
        a, b = state.owner.pool.priors.level
        self._a = a + float(state.counts.sum())
        self._b = b + float((state.trials - state.counts).sum())
        self._everywhere = _beta_logits(np.array([self._a]), np.array([self._b]))
        self.left_out = _beta_logits(
            self._a - state.counts, self._b - (state.trials - state.counts)
        )

    def predict(self, query: _Query) -> Gaussian:
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


def _quasi(state: ModelState) -> tuple[Array, Array]:
    """Counts and trials after subtracting the noise shared with the reference models."""
    priors, c = state.owner.pool.priors, state.covariates
    known = c.shared != 0.0
    phi = np.where(known, priors.dispersion, 1.0)
    counts = state.counts - state.trials * priors.shared_slope * c.shared
    return counts / phi, state.trials / phi


class _Linear:
    """Log odds linear in the reference covariates."""

    def __init__(self, state: ModelState, *, with_axes: bool) -> None:
        self._with_axes = with_axes
        priors = state.owner.pool.priors
        X = self._features(state.covariates)
        extra = X.shape[1] - 2
        mean = np.concatenate([priors.weights, np.zeros(extra)])
        covariance = np.diag(np.full(len(mean), priors.axis_variance))
        covariance[:2, :2] = priors.covariance
        self._posterior = fit_weights(X, *_quasi(state), mean, covariance)
        self.left_out: Gaussian = self._posterior.left_out

    def _features(self, c: Covariates) -> Array:
        columns = [np.ones(len(c.base)), c.base]
        return np.column_stack([*columns, c.axes] if self._with_axes else columns)

    def predict(self, query: _Query) -> Gaussian:
        return self._posterior.predict(self._features(query.covariates))


LOCAL_VARIANCE = 1.0
LOCAL_LENGTH = 0.7
"""Length scale in cosine: the kernel falls to 1/e where the cosine is 0.7 below 1."""
PROFILE_LENGTH = 2.0
"""Length scale in pool spreads of difficulty and axes."""


class _LocalPrior:
    """Prior of the log odds as a Gaussian process: weights, axes and nearness in one kernel."""

    def __init__(self, pool: ReferencePool, ground: Array) -> None:
        self._priors = pool.priors
        self._centre = (pool.vectors if pool.size else ground).mean(axis=0)

    def centred(self, vectors: Array, covariates: Covariates) -> _Query:
        """Return a query with vectors that are centred on the ground and of length 1."""
        moved = vectors - self._centre
        unit = moved / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-9)
        return _Query(unit, covariates)

    def mean(self, q: _Query) -> Array:
        """Prior mean."""
        w = self._priors.weights
        return np.asarray(w[0] + w[1] * q.covariates.base)

    @staticmethod
    def _linear(q: _Query) -> Array:
        return np.column_stack([np.ones(len(q.covariates.base)), q.covariates.base])

    def kernel(self, a: _Query, b: _Query) -> Array:
        """Prior covariance, shape (a, b)."""
        linear = self._linear(a) @ self._priors.covariance @ self._linear(b).T
        axes = self._priors.axis_variance * a.covariates.axes @ b.covariates.axes.T
        near = (np.minimum(a.vectors @ b.vectors.T, 1.0) - 1.0) / LOCAL_LENGTH
        pa, pb = a.covariates.profile, b.covariates.profile
        far = np.sum(pa**2, 1)[:, None] + np.sum(pb**2, 1) - 2 * pa @ pb.T
        local = LOCAL_VARIANCE * np.exp(near - np.maximum(far, 0.0) / (2 * PROFILE_LENGTH**2))
        return np.asarray(linear + axes + local)

    def variance(self, q: _Query) -> Array:
        """Diagonal of the prior covariance."""
        x = self._linear(q)
        linear = np.einsum("ij,jk,ik->i", x, self._priors.covariance, x)
        axes = self._priors.axis_variance * np.sum(q.covariates.axes**2, axis=1)
        return np.asarray(linear + axes + LOCAL_VARIANCE)


def prior_kernel(value: ValueModel, vectors: Array) -> tuple[Array, Array]:
    """Return the prior covariance and mean of the log odds of some prompts for a new model."""
    prior = _LocalPrior(value.pool, vectors)
    q = prior.centred(vectors, value.pool.covariates(vectors))
    return prior.kernel(q, q), prior.mean(q)


class _Local:
    """The axes' log odds plus a Gaussian process, near in meaning and in reference profile."""

    def __init__(self, state: ModelState) -> None:
        owner = state.owner
        rows = np.arange(len(state.counts))
        if len(rows) > owner.local_rows:
            rows = np.sort(np.random.default_rng(0).permutation(rows)[: owner.local_rows])
        self._prior = _LocalPrior(owner.pool, state.vectors)
        whole = self._prior.centred(state.vectors, state.covariates)
        self._context = _Query(whole.vectors[rows], whole.covariates.take(rows))
        counts, trials = _quasi(state)
        kernel = self._prior.kernel(self._context, self._context)
        mean = self._prior.mean(self._context)
        self._posterior = fit_process(kernel, mean, counts[rows], trials[rows])
        self.left_out: Gaussian = self._posterior.left_out
        self._beyond: _NearResidual | None = None
        if len(rows) < len(state.counts):
            out = self._process(whole)
            f, v = out.mean.copy(), out.variance.copy()
            f[rows], v[rows] = self.left_out.mean, self.left_out.variance
            rate = state.counts / state.trials
            self._beyond = _NearResidual(whole.vectors, rate - Gaussian(f, v).probability)
            self.left_out = self._beyond.correct(Gaussian(f, v), whole.vectors, hide_self=True)

    def _process(self, q: _Query) -> Gaussian:
        cross = self._prior.kernel(q, self._context)
        return self._posterior.predict(self._prior.mean(q), cross, self._prior.variance(q))

    def predict(self, query: _Query) -> Gaussian:
        q = self._prior.centred(query.vectors, query.covariates)
        found = self._process(q)
        return found if self._beyond is None else self._beyond.correct(found, q.vectors)


_NEAR = 20
_NEAR_STRENGTHS = (20.0, 60.0, 200.0, math.inf)
"""Neighbours that say nothing, set against the near ones; picked by leave-one-out."""


class _NearResidual:
    """What a process on part of a large context leaves: shrunk mean residual of all near rows."""

    def __init__(self, vectors: Array, residuals: Array) -> None:
        self._index = NeighbourIndex(vectors.astype(np.float32))
        self._residuals = residuals
        total = self._near(vectors, hide_self=True)
        errors = [np.mean((residuals - total / (_NEAR + s)) ** 2) for s in _NEAR_STRENGTHS]
        self._strength = _NEAR_STRENGTHS[int(np.argmin(errors))]

    def _near(self, vectors: Array, *, hide_self: bool) -> Array:
        """Sum of the residuals of the nearest rows."""
        near, _ = self._index.search(vectors.astype(np.float32), _NEAR + int(hide_self))
        left = self._residuals[near]
        if hide_self:
            left = np.where(near == np.arange(len(near))[:, None], 0.0, left)
        return np.asarray(left.sum(axis=1))

    def correct(self, f: Gaussian, vectors: Array, *, hide_self: bool = False) -> Gaussian:
        """Return log odds whose probability is moved by the shrunk residual."""
        if math.isinf(self._strength):
            return f
        change = self._near(vectors, hide_self=hide_self) / (_NEAR + self._strength)
        spread = np.sqrt(1.0 + np.pi / 8.0 * f.variance)
        moved = logit(np.clip(f.probability + change, 0.01, 0.99)) * spread
        return Gaussian(moved, f.variance)


@dataclass(frozen=True, slots=True)
class NetworkInputs:
    """What the network is given for some queries of a model."""

    context: FloatRows
    queries: FloatRows
    cosines: FloatRows
    skip: Gaussian
    """The closed form's log odds of the queries, which the network corrects."""


class _NetworkContext:
    """The closed form below the network, and the context as tokens."""

    def __init__(self, state: ModelState) -> None:
        self._prior = _LocalPrior(state.owner.pool, state.vectors)
        self._skip = state.closed_form()
        n = len(state.counts)
        rows = np.arange(n)
        if n > state.owner.local_rows:
            rows = np.sort(np.random.default_rng(0).permutation(rows)[: state.owner.local_rows])
        left = self._skip.left_out
        self.n, self.rows = n, rows
        self.left_out = Gaussian(left.mean[rows], left.variance[rows])
        c = state.covariates.take(rows)
        self.queries = tokens(self.left_out.mean, self.left_out.variance, c.profile, n)
        rate = state.counts[rows] / state.trials[rows]
        wrong = rate - self.left_out.probability
        labels = np.column_stack([2 * wrong, np.log1p(state.trials[rows]) / 3])
        self.context = np.column_stack([self.queries, labels]).astype(np.float32)
        self.vectors = self._prior.centred(state.vectors[rows], c).vectors.astype(np.float32)

    def ask(self, query: _Query) -> NetworkInputs:
        skip = self._skip.predict(query)
        unit = self._prior.centred(query.vectors, query.covariates).vectors.astype(np.float32)
        asked = tokens(skip.mean, skip.variance, query.covariates.profile, self.n)
        return NetworkInputs(self.context, asked, unit @ self.vectors.T, skip)


def network_inputs(state: ModelState, vectors: Array) -> NetworkInputs:
    """Return the network's inputs for prompt vectors: what the training script learns from."""
    query = _Query(vectors, state.owner.pool.covariates(vectors))
    return _NetworkContext(state).ask(query)


class _Net:
    """The network's correction of the closed form."""

    def __init__(self, state: ModelState) -> None:
        self._network = load_network()
        self._context = _NetworkContext(state)
        self._states = self._network.encode(self._context.context)
        c = self._context
        change = self._network.correct(
            c.queries, self._states, c.vectors @ c.vectors.T, hide_self=True
        )
        whole = state.closed_form().left_out
        mean = whole.mean.copy()
        mean[c.rows] += change
        self.left_out: Gaussian = Gaussian(mean, whole.variance)

    def predict(self, query: _Query) -> Gaussian:
        inputs = self._context.ask(query)
        change = self._network.correct(inputs.queries, self._states, inputs.cosines)
        return Gaussian(inputs.skip.mean + change, inputs.skip.variance)


_EXPERTS: Mapping[Layer, Callable[[ModelState], _Expert]] = {
    "level": _Level,
    "difficulty": lambda state: _Linear(state, with_axes=False),
    "axes": lambda state: _Linear(state, with_axes=True),
    "local": _Local,
    "network": _Net,
}
