"""One model's state as plain arrays: what is saved, stacked and updated without refitting.

A Gaussian process of n rows keeps its inverse as diag(d) + F·diag(g)·Fᵀ: exact up to 256 rows,
above that the 128 leading directions with the mean of the rest, which is flat. A new outcome is one
more column of F (a bordered inverse), one more step of each linear layer and one more token of the
network; nothing is refitted, so many of them drift and a refit follows.
Does not know how a state is fitted or asked. Source: own; bordered inverses are classic, range
finding after Halko, Martinsson & Tropp 2011.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tfgrpo.routing.estimator.laplace import sigmoid
from tfgrpo.routing.estimator.layers import (
    LOCAL_LENGTH,
    LOCAL_VARIANCE,
    PROFILE_LENGTH,
    LocalPrior,
    closed_of,
)
from tfgrpo.routing.estimator.network import N_CONTEXT, N_PROFILE, tokens
from tfgrpo.routing.estimator.reference_pool import N_AXES, Covariates, ReferencePool
from tfgrpo.routing.estimator.value_model import LAYERS, MIN_TRIALS, ModelState

__all__ = ["Compact", "compact"]

Array = NDArray[Any]

_EXACT, _RANK, _SPARE = 256, 128, 24


@dataclass(frozen=True, slots=True)
class Compact:
    """A model's state in single precision; see `compact` for what each array is."""

    model: str
    arrays: Mapping[str, Array]
    n_updates: int = 0
    """Outcomes worked in since the state was fitted."""

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    @property
    def n_rows(self) -> int:
        """Context rows."""
        return len(self["rows"])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values())


def compact(state: ModelState, rows: Array, members: Array, floor: float) -> Compact:
    """Return a state as arrays; `rows` are the numbers of its prompts in the shared ground.

    `members` are the columns of its pool among all reference models, `floor` the cosine below which
    a prompt is far from everything known.
    """
    pool, n = state.owner.pool, len(state.counts)
    read = state.evidence.read_rows()
    c = state.covariates.take(read)
    prior = LocalPrior(pool, state.vectors)
    moved = state.vectors - prior.centre
    arrays: dict[str, Array] = {
        "rows": np.asarray(rows, np.int32),
        "members": np.asarray(members, np.int32),
        "read": read.astype(np.int32),
        "rates": state.counts / np.maximum(state.trials, 1e-9),
        "layer_weights": np.array([state.weights.get(name, 0.0) for name in LAYERS]),
        "base": c.base,
        "along": _wide(c.axes, N_AXES),
        "profile": _wide(c.profile, N_PROFILE),
        "centre": prior.centre,
        "centre_dot": state.vectors @ prior.centre,
        "inverse_norm": 1.0 / np.maximum(np.linalg.norm(moved, axis=1), 1e-9),
        "marks": np.array([n, state.n_trials, floor, float(_thin(state)), float(pool.size > 1)]),
        "closed": np.array([("level", "difficulty", "axes").index(closed_of(pool))], np.float32),
    }
    arrays |= _of_pool(pool) | _of_layers(state)
    single = {k: np.asarray(v, np.float32) if v.dtype == np.float64 else v
              for k, v in arrays.items()}  # fmt: skip
    return Compact(state.model, single)


def _thin(state: ModelState) -> bool:
    total = state.n_trials
    return total < MIN_TRIALS or float(state.counts.sum()) in (0.0, total)


def _wide(a: Array, width: int) -> Array:
    """Pad or cut the columns of an array."""
    out = np.zeros((len(a), width))
    out[:, : min(width, a.shape[1])] = a[:, :width]
    return out


def _of_pool(pool: ReferencePool) -> dict[str, Array]:
    p = pool.priors
    axes = _wide(pool.axes, N_AXES) if pool.size else np.zeros((0, N_AXES))
    spread = np.ones(N_PROFILE)
    spread[: len(pool.spread)] = pool.spread
    return {
        "axes": axes,
        "axes_shift": pool.centre @ axes if pool.size else np.zeros(N_AXES),
        "spread": spread,
        "prior": np.array([*p.weights, p.covariance[0, 0], p.covariance[0, 1],
                           p.covariance[1, 1], p.axis_variance]),
    }  # fmt: skip


def _of_layers(state: ModelState) -> dict[str, Array]:
    found: dict[str, Array] = {"level": np.array(state.level())}
    for name in ("difficulty", "axes"):
        mean, covariance = np.zeros(2 + N_AXES), np.zeros((2 + N_AXES, 2 + N_AXES))
        posterior = state.linear(name)
        if posterior is not None:
            k = len(posterior.mean)
            mean[:k], covariance[:k, :k] = posterior.mean, posterior.covariance
        found[f"{name}_mean"], found[f"{name}_covariance"] = mean, covariance
    local, net = state.expert("local"), state.expert("network")
    n_read = len(state.evidence.read_rows())
    if local is None:
        d, F, g, w = np.zeros(n_read), np.zeros((n_read, 0)), np.zeros(0), np.zeros(n_read)
    else:
        d, F, g = _factor(local.posterior.inverse, local.posterior.curvature)
        w = local.posterior.weights
    found |= {"local_weights": w, "local_d": d, "local_F": F, "local_g": g}
    beyond = None if local is None else local.beyond
    found["residuals"] = np.zeros(0) if beyond is None else beyond.residuals
    found["residual_strength"] = np.array([np.inf if beyond is None else beyond.strength])
    found["tokens"] = np.zeros((0, N_CONTEXT)) if net is None else net.context.context
    ridge, near = state.expert("ridge"), state.expert("near")
    width = state.vectors.shape[1]
    found["ridge"] = (
        np.zeros(width + 2) if ridge is None else np.array([*ridge.slope, ridge.intercept,
                                                            ridge.variance])
    )  # fmt: skip
    found["near"] = (
        np.array([1.0, 1.0, 0.5, 1.0]) if near is None
        else np.array([near.power, near.strength, near.level, near.variance])
    )  # fmt: skip
    return found


def _factor(inverse: Array, curvature: Array) -> tuple[Array, Array, Array]:
    """Return d, F, g with inverse ≈ diag(d) + F·diag(g)·Fᵀ.

    With W the curvature, inverse = W½ (I + W½ K W½)⁻¹ W½: the middle is the identity but for the
    directions that the kernel knows, so few of them and the mean of the others give it.
    """
    n = len(inverse)
    if n <= _EXACT:
        values, basis = np.linalg.eigh(inverse)
        return np.zeros(n), basis, values
    root = np.sqrt(curvature)
    middle = inverse / root[:, None] / root
    # Leading directions of the kernel are those where `middle` is far below 1.
    gap = np.eye(n) - middle
    basis = np.random.default_rng(0).standard_normal((n, _RANK + _SPARE))
    for _ in range(3):
        basis, _ = np.linalg.qr(gap @ basis)
    values, turn = np.linalg.eigh(basis.T @ gap @ basis)
    values, turn = values[::-1][:_RANK], turn[:, ::-1][:, :_RANK]
    rest = (np.trace(gap) - values.sum()) / (n - _RANK)
    return (1 - rest) * curvature, root[:, None] * (basis @ turn), rest - values


@dataclass(frozen=True, slots=True)
class Outcome:
    """One new outcome of a model, with what the bank said of its prompt."""

    row: int
    """Number of the prompt in the ground."""
    vector: Array
    raw: Array
    """Cosines of the prompt to the model's read rows."""
    covariates: Covariates
    successes: float
    trials: float


def with_outcome(c: Compact, new: Outcome) -> Compact:
    """Return the state after one more outcome, without a refit: one row more in every layer."""
    a = dict(c.arrays)
    k, n = new.successes, new.trials
    q = new.covariates
    x = np.concatenate([[1.0], q.base, _wide(q.axes, N_AXES)[0]])
    a["level"] = a["level"] + np.array([k, n - k], np.float32)
    closed = _closed(a)
    f, v = _closed_odds(a, x, closed)
    for name in ("difficulty", "axes"):
        a[f"{name}_mean"], a[f"{name}_covariance"] = _step(
            a[f"{name}_mean"], a[f"{name}_covariance"], x, k, n
        )
    profile = _wide(q.profile, N_PROFILE)
    if len(a["tokens"]):
        token = tokens(np.array([f]), np.array([v]), profile, c.n_rows)
        p = sigmoid(np.array([f / np.sqrt(1 + np.pi / 8 * v)]))[0]
        labels = np.array([[2 * (k / n - p), np.log1p(n) / 3]], np.float32)
        a["tokens"] = np.vstack([a["tokens"], np.hstack([token, labels])])
    a |= _border(a, new, x, profile[0])
    moved = new.vector - a["centre"]
    a["rows"] = np.append(a["rows"], np.int32(new.row))
    a["read"] = np.append(a["read"], np.int32(c.n_rows))
    for name, value in (
        ("rates", k / n), ("base", x[1]), ("centre_dot", new.vector @ a["centre"]),
        ("inverse_norm", 1 / max(float(np.linalg.norm(moved)), 1e-9)),
    ):  # fmt: skip
        a[name] = np.append(a[name], np.float32(value))
    if len(a["residuals"]):
        a["residuals"] = np.append(a["residuals"], np.float32(0.0))
    a["along"] = np.vstack([a["along"], x[2:].astype(np.float32)])
    a["profile"] = np.vstack([a["profile"], profile.astype(np.float32)])
    marks = a["marks"].copy()
    marks[:2] += np.array([1.0, n], np.float32)
    good, bad = (a["rates"] > 0).any(), (a["rates"] < 1).any()
    marks[3] = float(marks[1] < MIN_TRIALS or not (good and bad))
    a["marks"] = marks
    return replace(c, arrays=a, n_updates=c.n_updates + 1)


def _closed(a: Mapping[str, Array]) -> Literal["level", "difficulty", "axes"]:
    names: tuple[Literal["level", "difficulty", "axes"], ...] = ("level", "difficulty", "axes")
    return names[int(a["closed"][0])]


def _closed_odds(a: Mapping[str, Array], x: Array, name: str) -> tuple[float, float]:
    if name == "level":
        p = float(a["level"][0] / a["level"].sum())
        return float(np.log(p / (1 - p))), 1.0 / float(a["level"].sum() * p * (1 - p))
    return float(x @ a[f"{name}_mean"]), float(x @ a[f"{name}_covariance"] @ x)


def _step(mean: Array, covariance: Array, x: Array, k: float, n: float) -> tuple[Array, Array]:
    """One Newton step of a normal posterior of weights on one binomial row."""
    p = float(sigmoid(np.array([x @ mean]))[0])
    curvature = max(n * p * (1 - p), 1e-6)
    along = covariance @ x
    gain = along / (1 / curvature + x @ along)
    moved = mean + gain * (k - n * p) / curvature
    return moved.astype(np.float32), (covariance - np.outer(gain, along)).astype(np.float32)


def _border(a: Mapping[str, Array], new: Outcome, x: Array, profile: Array) -> dict[str, Array]:
    """The process with one more row: (K + 1/W)⁻¹ bordered, which is one more column of F."""
    n = len(a["local_weights"])
    if not a["local_F"].size:
        return {
            name: np.append(a[name], np.float32(0)) for name in ("local_weights", "local_d")
        } | {"local_F": np.vstack([a["local_F"], np.zeros((1, a["local_F"].shape[1]), np.float32)])}
    read, w = a["read"], a["prior"]
    q_dot = float(new.vector @ a["centre"])
    square = float(a["centre"] @ a["centre"])
    norm = np.sqrt(max(float(new.vector @ new.vector) - 2 * q_dot + square, 1e-12))
    cosines = (new.raw - a["centre_dot"][read] - q_dot + square) * a["inverse_norm"][read] / norm
    far = np.sum((a["profile"] - profile) ** 2, axis=1)
    near = (np.minimum(cosines, 1) - 1) / LOCAL_LENGTH - far / (2 * PROFILE_LENGTH**2)
    cross = LOCAL_VARIANCE * np.exp(near)
    cross += w[2] + w[3] * x[1] + (w[3] + w[4] * x[1]) * a["base"]
    cross += w[5] * (a["along"] @ x[2:])
    own = w[2] + 2 * w[3] * x[1] + w[4] * x[1] ** 2 + w[5] * (x[2:] @ x[2:]) + LOCAL_VARIANCE
    f = w[0] + w[1] * x[1] + float(cross @ a["local_weights"])
    u = a["local_d"] * cross + a["local_F"] @ (a["local_g"] * (a["local_F"].T @ cross))
    p = float(sigmoid(np.array([f]))[0])
    curvature = max(new.trials * p * (1 - p), 1e-6)
    s = max(float(own - cross @ u), 1e-6) + 1 / curvature
    column = np.append(u, -1.0)
    gap = (new.successes - new.trials * p) / curvature
    F = np.zeros((n + 1, a["local_F"].shape[1] + 1), np.float32)
    F[:n, :-1], F[:, -1] = a["local_F"], column
    return {
        "local_weights": (np.append(a["local_weights"], 0.0) - column * gap / s).astype(np.float32),
        "local_d": np.append(a["local_d"], np.float32(0.0)),
        "local_F": F,
        "local_g": np.append(a["local_g"], np.float32(1 / s)),
    }
