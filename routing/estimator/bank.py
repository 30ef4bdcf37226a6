"""Many models asked at once: their compact states stacked, one pass of numpy a prompt.

What the models share is computed once: the cosines of the prompt to every known prompt and the
scores of the reference models. The rest is arithmetic on padded arrays of shape (models, rows).
A bank never changes; threads may share it without a lock. It answers as the states do, to single
precision. Does not know texts, prices or rules. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.routing.estimator.compact import Compact, Outcome
from tfgrpo.routing.estimator.coverage import text_part
from tfgrpo.routing.estimator.laplace import Gaussian, logit, mean_sigmoid, sigmoid
from tfgrpo.routing.estimator.layers import LOCAL_LENGTH, LOCAL_VARIANCE, NEAR, PROFILE_LENGTH
from tfgrpo.routing.estimator.network import HEADS, Network, load_network
from tfgrpo.routing.estimator.own_layers import NEIGHBOURS
from tfgrpo.routing.estimator.reference_pool import Covariates
from tfgrpo.routing.estimator.value_model import (
    LAYERS,
    Coverage,
    Estimates,
    effective_trials,
)

__all__ = ["Bank", "Scores"]

Floats = NDArray[np.float32]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Scores:
    """The fold-averaged regressions of the reference models."""

    coefficients: Floats
    """Shape (width, reference models)."""
    intercepts: Floats
    text_width: int
    """Leading columns of a row that come from the text alone: what far is measured on."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What every layer needs of the prompt asked about; leading axis = models."""

    vector: Floats
    raw: Floats
    """Cosine to every known prompt."""
    base: Array
    along: Array
    profile: Array
    features: Array
    """1, base, axes: shape (models, 6)."""
    cosines: Array
    """Centred cosines to the read rows, shape (models, rows)."""
    shift: tuple[Array, Array]
    """Inner product with each centre, and the length of the centred prompt."""


class Bank:
    """Stacked states of some models."""

    def __init__(self, states: Sequence[Compact], vectors: Floats, scores: Scores) -> None:
        """Stack states whose `rows` count in `vectors`, the unit rows of all known prompts."""
        self.states, self.vectors = tuple(states), vectors
        self._scores = scores
        self._text = text_part(vectors, scores.text_width)
        self._network: Network = load_network()
        self._a: dict[str, Array] = {}
        s = self.states
        self._read_all = _stack([c["rows"][c["read"]] for c in s])
        self._all = _stack([c["rows"] for c in s])
        self._n_all = np.array([c.n_rows for c in s])
        self._mask = _stack([np.ones(len(c["read"]), bool) for c in s])
        self._hide = np.where(_stack([np.ones(c.n_rows, bool) for c in s]), 0.0, -np.inf)
        self._hide = self._hide.astype(np.float32)
        self._no_row = np.where(self._mask, np.float32(0), np.float32(-1e9))
        for name in ("base", "along", "profile", "local_weights", "local_d", "rates"):
            self._a[name] = _stack([c[name] for c in s])
        self._square = np.sum(self._a["profile"] ** 2, axis=2)
        self._dot = _stack([c["centre_dot"][c["read"]] for c in s])
        self._inverse_norm = _stack([c["inverse_norm"][c["read"]] for c in s])
        for name in ("centre", "axes_shift", "spread", "prior", "level", "layer_weights", "marks",
                     "near", "ridge", "difficulty_mean", "difficulty_covariance", "axes_mean",
                     "axes_covariance"):  # fmt: skip
            self._a[name] = np.stack([c[name] for c in s])
        self._centre_square = np.sum(self._a["centre"] ** 2, axis=1)
        self._closed = np.array([int(c["closed"][0]) for c in s])
        self._pool(s, len(scores.intercepts))
        self._levels = _level_odds(self._a["level"])
        self._encode(s)
        self._named = [
            {str(n): float(w) for n, w in zip(LAYERS, c["layer_weights"], strict=True) if w}
            for c in s
        ]  # fmt: skip

    def _pool(self, states: Sequence[Compact], n: int) -> None:
        """One matrix from reference scores to each model's mean and axes."""
        m = len(states)
        self._means, self._turn = np.zeros((n, m), np.float32), np.zeros((n, m, 4), np.float32)
        for i, c in enumerate(states):
            members = c["members"]
            if len(members):
                self._means[members, i] = 1 / len(members)
                self._turn[members, i] = c["axes"]
        self._turn_sum = self._turn.sum(axis=0)
        self._has_pool = np.array([len(c["members"]) > 0 for c in states])

    def _encode(self, states: Sequence[Compact]) -> None:
        """Keys and values of the network, padded: (layer) → (models, heads, size, rows)."""
        found = [self._network.encode(c["tokens"]) for c in states]
        self._has_net = np.array([len(c["tokens"]) > 0 for c in states])
        self._encoded: list[tuple[Floats, Floats]] = []
        n = self._mask.shape[1]
        for layer in range(len(found[0]) if found else 0):
            size = found[0][layer][0].shape[1]
            keys = np.zeros((len(states), HEADS, size, n), np.float32)
            values = np.zeros((len(states), HEADS, n, size), np.float32)
            for i, pair in enumerate(found):
                k, v = pair[layer]
                keys[i, :, :, : k.shape[2]], values[i, :, : v.shape[1]] = k, v
            self._encoded.append((keys, values))

    def _prompt(self, vector: Floats) -> _Prompt:
        vector = np.asarray(vector, np.float32)
        raw = self.vectors @ vector
        m = len(self.states)
        scores = vector @ self._scores.coefficients + self._scores.intercepts
        mean = scores @ self._means
        base = np.where(self._has_pool, logit(np.clip(mean, 0.02, 0.98)), 0.0)
        along = (scores @ self._turn.reshape(len(scores), 4 * m)).reshape(m, 4)
        along = along - mean[:, None] * self._turn_sum
        along = (along - self._a["axes_shift"]) * self._has_pool[:, None]
        profile = np.column_stack([base, along]) / self._a["spread"]
        dot = self._a["centre"] @ vector
        length = np.sqrt(np.maximum(vector @ vector - 2 * dot + self._centre_square, 1e-12))
        cosines = raw[self._read_all] - self._dot + (self._centre_square - dot)[:, None]
        cosines = cosines * self._inverse_norm / length[:, None]
        features = np.column_stack([np.ones(m), base, along])
        return _Prompt(vector, raw, base, along, profile, features, cosines, (dot, length))

    def ask(self, vector: Floats, *, level: float = 0.9) -> Estimates:
        """Return every model's estimate for one prompt, in the order of the states."""
        from scipy.special import ndtri

        q = self._prompt(vector)
        linear = {name: self._linear(q, name) for name in ("difficulty", "axes")}
        skips = [self._levels[0], linear["difficulty"][0], linear["axes"][0]]
        spreads = [self._levels[1], linear["difficulty"][1], linear["axes"][1]]
        at = np.arange(len(self.states))
        f_skip, v_skip = np.array(skips)[self._closed, at], np.array(spreads)[self._closed, at]
        local = self._local(q)
        parts = {
            "level": self._levels[:2], **linear, "local": local,
            "network": (f_skip + self._correct(q, f_skip, v_skip), v_skip),
            "ridge": self._own_ridge(q), "near": self._own_near(q),
        }  # fmt: skip
        f = np.array([parts[name][0] for name in LAYERS]).T
        v = np.array([parts[name][1] for name in LAYERS]).T
        p = mean_sigmoid(f, v)
        p[:, 0] = self._levels[2]
        w = self._a["layer_weights"]
        centre = np.sum(w * f, axis=1)
        variance = np.sum(w * (v + f**2), axis=1) - centre**2
        logits = Gaussian(centre, np.maximum(variance, 1e-9))
        half = float(ndtri(0.5 + level / 2)) * np.sqrt(logits.variance)
        mean = np.sum(w * p, axis=1)
        return Estimates(
            mean=mean,
            low=np.minimum(sigmoid(centre - half), mean),
            high=np.maximum(sigmoid(centre + half), mean),
            level=level,
            effective_n=effective_trials(logits),
            coverage=self._coverage(q),
            weights={},
            logits=logits,
        )

    def _linear(self, q: _Prompt, name: str) -> tuple[Array, Array]:
        mean, covariance = self._a[f"{name}_mean"], self._a[f"{name}_covariance"]
        x = q.features
        return (x * mean).sum(axis=1), np.einsum("mi,mij,mj->m", x, covariance, x)

    def _local(self, q: _Prompt) -> tuple[Array, Array]:
        w, b = self._a["prior"], q.base
        far = self._square + np.sum(q.profile**2, axis=1)[:, None]
        far = far - 2 * (self._a["profile"] @ q.profile[:, :, None].astype(np.float32))[:, :, 0]
        near = (np.minimum(q.cosines, 1) - 1) / LOCAL_LENGTH
        near = near - np.maximum(far, 0) / (2 * PROFILE_LENGTH**2)
        cross = LOCAL_VARIANCE * np.exp(near.astype(np.float32))
        cross += (w[:, 2] + w[:, 3] * b)[:, None] + (w[:, 3] + w[:, 4] * b)[:, None] * self._a[
            "base"
        ]
        along = (w[:, 5:6] * q.along).astype(np.float32)
        cross += (self._a["along"] @ along[:, :, None])[:, :, 0]
        cross = np.where(self._mask, cross, 0.0).astype(np.float32)
        mean = w[:, 0] + w[:, 1] * b + (cross * self._a["local_weights"]).sum(axis=1)
        own = w[:, 2] + 2 * w[:, 3] * b + w[:, 4] * b**2 + LOCAL_VARIANCE
        own = own + w[:, 5] * np.sum(q.along**2, axis=1)
        taken = (self._a["local_d"] * cross**2).sum(axis=1)
        for i, c in enumerate(self.states):
            F = c["local_F"]
            taken[i] += (cross[i, : len(F)] @ F) ** 2 @ c["local_g"]
        variance = np.maximum(own - taken, 1e-9)
        return self._beyond(q, mean, variance), variance

    def _beyond(self, q: _Prompt, f: Array, v: Array) -> Array:
        """Move log odds by the shrunk residual of the near rows of large contexts."""
        for i, c in enumerate(self.states):
            strength = float(c["residual_strength"][0])
            if not np.isfinite(strength):
                continue
            dot, length = q.shift[0][i], q.shift[1][i]
            cosines = q.raw[c["rows"]] - c["centre_dot"] - dot + self._centre_square[i]
            cosines = cosines * c["inverse_norm"] / length
            near = np.argpartition(-cosines, NEAR - 1)[:NEAR]
            change = float(c["residuals"][near].sum()) / (NEAR + strength)
            spread = np.sqrt(1 + np.pi / 8 * v[i])
            p = sigmoid(f[i : i + 1] / spread)
            f[i] = (logit(np.clip(p + change, 0.01, 0.99)) * spread)[0]
        return f

    def _correct(self, q: _Prompt, mean: Array, variance: Array) -> Array:
        """The network's correction: one query a model against its own context."""
        if not self._has_net.any():
            return np.zeros(len(mean))
        marks = self._a["marks"]
        few = np.column_stack(
            [np.clip(mean, -6, 6) / 3, np.sqrt(np.clip(variance, 0, 9)),
             np.clip(q.profile, -4, 4) / 2, np.log1p(marks[:, 0]) / 7, marks[:, 4]]
        ).astype(np.float32)  # fmt: skip
        change = self._network.correct_stacked(
            few, self._encoded,
            q.cosines.astype(np.float32), self._no_row,
        )  # fmt: skip
        return np.where(self._has_net, change, 0.0)

    def _own_ridge(self, q: _Prompt) -> tuple[Array, Array]:
        p = self._a["ridge"][:, :-2] @ q.vector + self._a["ridge"][:, -2]
        return logit(np.clip(p, 0.02, 0.98)), self._a["ridge"][:, -1]

    def _own_near(self, q: _Prompt) -> tuple[Array, Array]:
        cosines, rates = q.raw[self._all] + self._hide, self._a["rates"]
        if cosines.shape[1] > NEIGHBOURS:
            near = np.argpartition(-cosines, NEIGHBOURS - 1, axis=1)[:, :NEIGHBOURS]
            cosines = np.take_along_axis(cosines, near, axis=1)
            rates = np.take_along_axis(rates, near, axis=1)
        power, strength, level, variance = self._a["near"].T
        weights = np.maximum(cosines, 0.0) ** power[:, None]
        p = ((weights * rates).sum(axis=1) + strength * level) / (weights.sum(axis=1) + strength)
        return logit(np.clip(p, 0.02, 0.98)), variance

    def _coverage(self, q: _Prompt) -> tuple[Coverage, ...]:
        text = text_part(q.vector[None, :], self._text.shape[1])[0]
        nearest = float((self._text @ text).max()) if len(self._text) else -1.0
        found: list[Coverage] = []
        for n, _, floor, thin, _ in self._a["marks"]:
            found.append(
                "empty" if n == 0 else "far" if nearest < floor else "thin" if thin else "covered"
            )
        return tuple(found)

    def weights(self, i: int) -> dict[str, float]:
        """Return the mixture over layers of one model."""
        return self._named[i]

    def outcome(self, i: int, row: int, successes: float, trials: float) -> Outcome:
        """Return an outcome of model i on a known prompt, ready for `with_outcome`."""
        q = self._prompt(self.vectors[row])
        c = self.states[i]
        members = len(c["members"])
        k = 0 if members < 2 else min(4, members - 1)
        covariates = Covariates(
            q.base[i : i + 1], q.along[i : i + 1, :k], np.zeros(1),
            q.profile[i : i + 1, : 1 + k],
        )  # fmt: skip
        raw = q.raw[c["rows"][c["read"]]]
        return Outcome(row, self.vectors[row], raw, covariates, successes, trials)


def _stack(parts: Sequence[Array]) -> Array:
    """Stack arrays of unlike length along a new first axis, padded with zeros."""
    longest = max((len(p) for p in parts), default=0)
    out = np.zeros((len(parts), longest, *parts[0].shape[1:]), parts[0].dtype)
    for i, part in enumerate(parts):
        out[i, : len(part)] = part
    return out


def _level_odds(level: Array) -> tuple[Array, Array, Array]:
    """Mean and variance of the log odds, and mean of the probability, of Beta variables."""
    from scipy.special import digamma, polygamma

    a, b = np.maximum(level.astype(np.float64), 1e-3).T
    return digamma(a) - digamma(b), polygamma(1, a) + polygamma(1, b), a / (a + b)
