"""P(success | prompt, model) of any model from its outcomes, as layers blended by evidence.

    level       Beta-binomial on the counts
    difficulty  two weights on the reference difficulty (2PL), and on its latent axes (`axes`)
    local       a Gaussian process on what the axes leave, near in meaning and in reference profile
    network     a small prior-fitted network, corrections to the log odds of `axes`
    own         a ridge regression on the model's own labels (`ridge`), and near ones (`near`)

Each layer predicts every context row from the other rows (leave-one-out); the blend is the mixture
that explains those best, with a prior on the mixture so that 16 rows cannot swing it. A layer that
is wrong here gets no weight here. No parameter is trained: a new outcome is a new row.
Does not know how a layer is fitted (`experts`), prices, policies of routing or files.
Sources: in-context value estimation (V_0, arXiv 2602.03584); everything after the idea is own, see
`docs/routing.md` for what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.routing.estimator.coverage import far_floor, text_part, text_width
from tfgrpo.routing.estimator.laplace import Gaussian, WeightPosterior, sigmoid
from tfgrpo.routing.estimator.layers import (
    Evidence,
    Expert,
    Level,
    Linear,
    Local,
    LocalPrior,
    Net,
    NetworkContext,
    NetworkInputs,
    Query,
    closed_of,
)
from tfgrpo.routing.estimator.own_layers import Near, Ridge
from tfgrpo.routing.estimator.prompt_features import embed_prompts
from tfgrpo.routing.estimator.reference_pool import Covariates, ReferencePool
from tfgrpo.routing.records import SuccessCount
from tfgrpo.runtime.embedders import Embedder, Floats

__all__ = ["Coverage", "Estimates", "Layer", "LAYERS", "ModelState", "ValueModel"]

Array = NDArray[np.float64]
Layer = Literal["level", "difficulty", "axes", "local", "network", "ridge", "near"]
LAYERS: tuple[Layer, ...] = get_args(Layer)
Coverage = Literal["covered", "far", "thin", "empty"]
"""`far`: unlike everything seen; `thin`: fewer than `MIN_TRIALS` trials or one class only;
`empty`: no outcome of this model at all."""

MIN_TRIALS = 8.0
LEAST_OWN, LEAST_ALONE = 128, 16
"""Labels from which a model's own ridge regression and near labels are asked at all, with and
without reference models. Beside reference models they cost .001 of Brier score at 16 and 64 labels
on function calls and maths, and gain .01 of AUC at 256."""

_BLEND_PRIOR: Mapping[Layer, float] = {
    "level": 0.05, "difficulty": 1.0, "axes": 1.0, "local": 1.5, "network": 1.5, "ridge": 0.5,
    "near": 0.5,
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
        outcomes: Sequence[SuccessCount],
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
        made = embed_prompts(self.embedder, rows.prompts, rows.tags)
        vectors = np.asarray(made, dtype=np.float64)
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
    tags: tuple[tuple[str, ...], ...]
    counts: Array
    trials: Array

    @classmethod
    def merge(
        cls, outcomes: Sequence[SuccessCount], now: float | None, half_life: float | None
    ) -> _Rows:
        if half_life is not None and not half_life > 0:
            raise ConfigError(f"half_life is {half_life!r}; allowed is a number above 0, or None")
        dated = [r.at for r in outcomes if r.at is not None]
        if now is None and dated:
            now = max(dated)
        prompts: dict[str, tuple[str, tuple[str, ...]]] = {}
        sums: dict[str, list[tuple[float, float]]] = {}
        for row in outcomes:
            weight = 1.0
            if half_life is not None and row.at is not None and now is not None:
                weight = 0.5 ** (max(now - row.at, 0.0) / half_life)
            prompts.setdefault(row.key, (row.prompt, row.tags))
            sums.setdefault(row.key, []).append((weight * row.successes, weight * row.trials))
        keys = tuple(sorted(sums))
        total = [np.sum(sorted(sums[k]), axis=0) for k in keys]
        return cls(
            keys,
            tuple(prompts[k][0] for k in keys),
            tuple(prompts[k][1] for k in keys),
            np.array([t[0] for t in total]),
            np.array([t[1] for t in total]),
        )


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
        self.evidence = Evidence(owner.pool, vectors, counts, trials, covariates, owner.local_rows)
        self._known_ground: tuple[Floats, float] | None = None
        self._closed: Expert | None = None
        self._experts: dict[Layer, Expert] = {}
        # Where none of the layers in use has enough to say, the level answers.
        for name in [n for n in owner.layers if self._can(n)] or ["level"]:
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
        if layer in ("ridge", "near"):
            return len(self.counts) >= (LEAST_OWN if self._owner.pool.size else LEAST_ALONE)
        return layer == "level" or len(self.counts) > 0

    def _blend(self) -> Mapping[Layer, float]:
        prior = np.array([_BLEND_PRIOR[name] for name in self._experts])
        if not len(self.counts) or len(self._experts) == 1:
            weights = prior / prior.sum()
        else:
            p = np.stack([e.left_out.probability for e in self._experts.values()])
            weights = mixture_weights(p, self.counts, self.trials, prior)
        return dict(zip(self._experts, (float(w) for w in weights), strict=True))

    def closed_form(self) -> Expert:
        """Return the richest linear layer that the pool allows, in use or not."""
        if self._closed is None:
            name = closed_of(self._owner.pool)
            self._closed = self._experts.get(name) or _EXPERTS[name](self)
        return self._closed

    def expert(self, name: Layer) -> Any:
        """Return a layer that is in use, or None."""
        return self._experts.get(name)

    def level(self) -> tuple[float, float]:
        """Return the Beta parameters of the success rate after the outcomes."""
        found = self._experts.get("level") or Level(self.evidence)
        assert isinstance(found, Level)
        return found.a, found.b

    def linear(self, name: Layer) -> WeightPosterior | None:
        """Return the weights of a linear layer that is in use or that the network corrects."""
        closed = closed_of(self._owner.pool)
        found = self._experts.get(name) or (self.closed_form() if closed == name else None)
        return found.posterior if isinstance(found, Linear) else None

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
        query = Query(vectors, self._owner.pool.covariates(vectors, keys))
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
            effective_n=effective_trials(logits),
            coverage=self._coverage(query),
            weights=self.weights,
            logits=logits,
        )

    def _coverage(self, query: Query) -> tuple[Coverage, ...]:
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
            floor = far_floor(self._owner.embedder, known)
            self._known_ground = text_part(known, text_width(self._owner.embedder)), floor
        known, floor = self._known_ground
        nearest = (known @ text_part(vectors, known.shape[1]).T).max(axis=0)
        return nearest.astype(np.float64), floor


_GROUND_ROWS = 256


def effective_trials(logits: Gaussian) -> Array:
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


def prior_kernel(value: ValueModel, vectors: Array) -> tuple[Array, Array]:
    """Return the prior covariance and mean of the log odds of some prompts for a new model."""
    prior = LocalPrior(value.pool, vectors)
    q = prior.centred(vectors, value.pool.covariates(vectors))
    return prior.kernel(q, q), prior.mean(q)


def network_inputs(state: ModelState, vectors: Array) -> NetworkInputs:
    """Return the network's inputs for prompt vectors: what the training script learns from."""
    query = Query(vectors, state.owner.pool.covariates(vectors))
    return NetworkContext(state.evidence, state.closed_form()).ask(query)


_EXPERTS: Mapping[Layer, Callable[[ModelState], Expert]] = {
    "level": lambda state: Level(state.evidence),
    "difficulty": lambda state: Linear(state.evidence, with_axes=False),
    "axes": lambda state: Linear(state.evidence, with_axes=True),
    "local": lambda state: Local(state.evidence),
    "network": lambda state: Net(state.evidence, state.closed_form()),
    "ridge": lambda state: Ridge(state.evidence),
    "near": lambda state: Near(state.evidence),
}
