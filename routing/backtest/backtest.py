"""Replay recorded outcomes: a family becomes new, gets N labels, is judged on test prompts.

Families stay on one side. Labels are drawn from train prompts; the reference pool is fitted on the
train prompts of the other families; every method sees the same labels and the same vectors.
`mean`, `domain`, best-single and oracle rows are always there: a figure without its prompt-blind
companion says nothing.
Does not know where the outcomes come from. Source: own protocol, `docs/routing.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.routing.backtest import metrics
from tfgrpo.routing.backtest.baselines import RIVALS, Trial
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import LAYERS, Layer, ValueModel
from tfgrpo.routing.records import OutcomeTable
from tfgrpo.runtime.embedders import Embedder, Floats

__all__ = [
    "ReplayResult",
    "BacktestRow",
    "ReplayPlan",
    "clusters_of",
    "hash_split",
    "identity",
    "leaked",
    "replay",
    "routed",
]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BacktestRow:
    """One method at one number of labels, averaged over models and draws."""

    method: str
    n: int
    brier: float
    auc: float
    logloss: float
    ece: float

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, rounded to 5 decimals."""
        return {
            "method": self.method,
            "n": self.n,
            **{k: round(getattr(self, k), 5) for k in ("brier", "auc", "logloss", "ece")},
        }


@dataclass
class ReplayResult:
    """Rows, and squared errors a cell for paired comparisons."""

    rows: list[BacktestRow] = field(default_factory=list)
    errors: dict[tuple[str, int], Array] = field(default_factory=dict)
    """(method, n) to squared error, shape (models, test prompts), mean over draws; NaN unknown."""
    weights: dict[int, dict[str, float]] = field(default_factory=dict)
    """n to mean mixture weight a layer."""

    def row(self, method: str, n: int) -> BacktestRow:
        """Return one row.

        Raises:
            ConfigError: it was not measured.
        """
        for row in self.rows:
            if row.method == method and row.n == n:
                return row
        raise ConfigError(f"no row for {method!r} at {n} labels")

    def labels_to_match(self, method: str, target: float) -> int | None:
        """Return the least measured labels at which a method's Brier is at most `target`."""
        fitting = [r.n for r in self.rows if r.method == method and r.brier <= target]
        return min(fitting) if fitting else None


def hash_split(identities: Sequence[str]) -> NDArray[np.intp]:
    """Return 0 to 9 a prompt, fixed by its identity: the suggested split of the shared sets."""
    import hashlib

    heads = (hashlib.sha256(i.encode()).hexdigest()[:8] for i in identities)
    return np.array([int(h, 16) % 10 for h in heads], dtype=np.intp)


def identity(prompt: str) -> str:
    """Return the text without letter case and spacing: what makes two prompts the same."""
    return " ".join(prompt.casefold().split())


def leaked(train: Sequence[str], test: Sequence[str]) -> list[int]:
    """Return the indices of test prompts whose text, case and spacing aside, occurs in train."""
    seen = {identity(prompt) for prompt in train}
    return [i for i, prompt in enumerate(test) if identity(prompt) in seen]


def clusters_of(vectors: Floats | Array, k: int = 32, seed: int = 0) -> Array:
    """Return k unit centres of spherical k-means (20 rounds from random rows)."""
    rng = np.random.default_rng(seed)
    X = np.asarray(vectors, dtype=np.float64)
    centres = X[rng.permutation(len(X))[: min(k, len(X))]]
    for _ in range(20):
        nearest = np.argmax(X @ centres.T, axis=1)
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, X)
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        centres = np.where(norms > 1e-9, sums / np.maximum(norms, 1e-9), centres)
    return centres


def _quiet(line: str) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class ReplayPlan:
    """What is compared on which prompts."""

    rivals: Sequence[str] = tuple(RIVALS)
    variants: Mapping[str, Sequence[Layer]] = field(default_factory=lambda: {"full": LAYERS})
    """Named sets of layers of the value model."""
    train: Sequence[int] = (0, 1, 2, 3, 4, 5)
    """Values of the split that labels are drawn from."""
    test: Sequence[int] = (8, 9)
    seed: int = 0
    progress: Callable[[str], None] = _quiet


_PLAN = ReplayPlan()


@dataclass(frozen=True)
class _Ground:
    """What every model is measured on."""

    table: OutcomeTable
    vectors: Floats
    embedder: Embedder
    at_test: NDArray[np.intp]


@dataclass(frozen=True)
class _Fold:
    """The pool without a family, and what does not change between its models."""

    pool: ReferencePool
    centres: Array


@dataclass(frozen=True)
class _Labels:
    """One draw of labels for one model."""

    j: int
    """The model's column."""
    n: int
    """Labels asked for; `rows` has fewer where train has."""
    rows: NDArray[np.intp]
    asked: NDArray[np.intp]
    """Test prompts whose outcome is known."""


def replay(
    table: OutcomeTable,
    vectors: Floats,
    embedder: Embedder,
    split: NDArray[np.intp],
    *,
    sizes: Sequence[int] = (16, 64, 256, 1024),
    draws: int = 2,
    plan: ReplayPlan = _PLAN,
) -> ReplayResult:
    """Leave each family out in turn and measure every method at every number of labels.

    A size above the train prompts of a model is cut to them and keeps its name.

    Raises:
        ConfigError: a test prompt's text also stands in train.
    """
    at_train = np.flatnonzero(np.isin(split, plan.train))
    at_test = np.flatnonzero(np.isin(split, plan.test))
    leaks = leaked([table.prompts[i] for i in at_train], [table.prompts[i] for i in at_test])
    if leaks:
        raise ConfigError(
            f"{len(leaks)} test prompts also stand in train, such as "
            f"{table.prompts[at_test[leaks[0]]][:60]!r}: split by `identity` of the text"
        )
    families = [m.group for m in table.models]
    whole = ReferencePool.fit(
        table.take(at_train), vectors[at_train], embedder_id=embedder.embedder_id
    )
    centres = clusters_of(vectors[at_train])
    ground = _Ground(table, vectors, embedder, at_test)
    sums: dict[tuple[str, int], list[tuple[float, float, float, float]]] = {}
    result = ReplayResult()
    for family in dict.fromkeys(families):
        fold = _Fold(whole.without(families=[family]), centres)
        for j in [i for i, f in enumerate(families) if f == family]:
            rng = np.random.default_rng([plan.seed, j])
            known = at_train[table.trials[at_train, j] > 0]
            asked = at_test[table.trials[at_test, j] > 0]
            if len(known) < min(sizes) or not len(asked):
                continue
            for _ in range(draws):
                order = rng.permutation(known)
                for n in sizes:
                    labels = _Labels(j, n, np.sort(order[:n]), asked)
                    for method, p in _answers(ground, fold, labels, plan, result).items():
                        sums.setdefault((method, n), []).append(_figures(ground, labels, p))
                        _add_errors(result, ground, labels, method, p, draws)
        plan.progress(f"{family}: {families.count(family)} models")
    for (method, n), values in sums.items():
        means = np.nanmean(np.array(values), axis=0)
        result.rows.append(BacktestRow(method, n, *(float(v) for v in means)))
    for n, weights in result.weights.items():
        total = sum(weights.values())
        result.weights[n] = {k: round(v / total, 4) for k, v in weights.items()}
    return result


def _answers(
    ground: _Ground, fold: _Fold, labels: _Labels, plan: ReplayPlan, result: ReplayResult
) -> dict[str, Array]:
    table, vectors, pool = ground.table, ground.vectors, fold.pool
    j, rows, asked = labels.j, labels.rows, labels.asked
    keys = [table.keys[i] for i in rows]
    X, Q = vectors[rows].astype(np.float64), vectors[asked].astype(np.float64)
    datasets = np.array(table.datasets)
    trial = Trial(
        vectors=X,
        rates=table.rates[rows, j],
        queries=Q,
        datasets=datasets[rows],
        query_datasets=datasets[asked],
        pool=pool,
        context=pool.covariates(X, keys),
        asked=pool.covariates(Q),
        context_scores=pool.scores_of(X, keys)[0],
        asked_scores=pool.scores_of(Q)[0],
        clusters=np.argmax(X @ fold.centres.T, axis=1),
        query_clusters=np.argmax(Q @ fold.centres.T, axis=1),
    )
    answers = {name: RIVALS[name](trial) for name in plan.rivals}
    for name, layers in plan.variants.items():
        model = ValueModel(ground.embedder, pool, layers=layers)
        state = model.state_of_counts(X, table.successes[rows, j], table.trials[rows, j], keys=keys)
        answers[name] = state.predict_vectors(Q).mean
        if name == "full":
            totals = result.weights.setdefault(labels.n, {})
            for layer, weight in state.weights.items():
                totals[layer] = totals.get(layer, 0.0) + weight
    return answers


def _figures(ground: _Ground, labels: _Labels, p: Array) -> tuple[float, float, float, float]:
    rates = ground.table.rates[labels.asked, labels.j]
    return (
        metrics.brier(p, rates),
        metrics.area(p, rates),
        metrics.log_loss(p, rates),
        metrics.ece(p, rates),
    )


def _add_errors(
    result: ReplayResult, ground: _Ground, labels: _Labels, method: str, p: Array, draws: int
) -> None:
    """Add the squared errors of one draw, of which there are `draws`."""
    shape = len(ground.table.models), len(ground.at_test)
    errors = result.errors.setdefault((method, labels.n), np.full(shape, np.nan))
    line, at = errors[labels.j], np.searchsorted(ground.at_test, labels.asked)
    rates = ground.table.rates[labels.asked, labels.j]
    line[at] = np.where(np.isnan(line[at]), 0.0, line[at]) + (p - rates) ** 2 / draws


def routed(value: Array, quality: Array) -> dict[str, float]:
    """Return routed, best-single, oracle and prompt-blind accuracy of argmax routing.

    Shapes (prompts, models); prompts with an unknown cell must be left out by the caller.
    """
    line = np.arange(len(value))
    return {
        "routed": float(quality[line, value.argmax(1)].mean()),
        "best_single": float(quality.mean(0).max()),
        "prompt_blind": float(quality[:, value.mean(0).argmax()].mean()),
        "oracle": float(quality.max(1).mean()),
    }
