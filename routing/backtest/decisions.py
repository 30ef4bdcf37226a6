"""Routing among all models of a table: quality of the decisions, and quality against cost.

Every model gets the same number of labels from train; each method predicts every model on test
prompts, and the largest prediction (less λ·cost) answers. Beside the methods stand the best single
model, random mixing of single models and the oracle.
Does not know where the outcomes come from. Sources: AIQ after RouterBench (arXiv 2403.12031).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfgrpo.errors import ConfigError
from tfgrpo.routing.backtest.metrics import CostCurve, sweep
from tfgrpo.routing.costs import CHARS_PER_TOKEN
from tfgrpo.routing.estimator.laplace import logit, sigmoid
from tfgrpo.routing.estimator.layers import Evidence, Query
from tfgrpo.routing.estimator.own_layers import Near, Ridge
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import ValueModel
from tfgrpo.routing.records import OutcomeTable
from tfgrpo.runtime.embedders import Embedder, Floats

__all__ = [
    "METHODS",
    "BacktestData",
    "Standing",
    "by_method",
    "chances",
    "costs_of",
    "curves_of",
    "standing",
]

Array = NDArray[np.float64]
Index = NDArray[np.intp]

METHODS = ("ours", "ridge", "weighted_knn", "blend")
"""The value model; a ridge regression, a similarity-weighted k-NN and the mean of the log odds of
all three, each on the model's own labels."""
ASSUMED_TOKENS = 200.0
"""Output tokens of an answer whose length nobody recorded."""
KNOBS = np.concatenate([[0.0], np.logspace(0, 6, 60)])
"""Successes a dollar: the trade-offs that make a curve."""


@dataclass(frozen=True)
class BacktestData:
    """A table with vectors of its prompts, and which prompts are for labels and for judging."""

    table: OutcomeTable
    vectors: Floats
    embedder: Embedder
    train: Index
    test: Index


def chances(ground: BacktestData, n: int, *, seed: int = 0) -> dict[str, Array]:
    """Return the predicted success (test prompts, models) of each method, n labels a model.

    What a model's family answered is hidden from it; the other models' labels of train are not.
    """
    table, rows = ground.table, ground.vectors
    whole = ReferencePool.fit(
        table.take(ground.train), rows[ground.train], embedder_id=ground.embedder.embedder_id
    )
    made = {m: np.zeros((len(ground.test), len(table.models))) for m in METHODS}
    rng = np.random.default_rng(seed)
    queries = rows[ground.test].astype(np.float64)
    for j, info in enumerate(table.models):
        answered = ground.train[table.trials[ground.train, j] > 0]
        known = np.sort(rng.permutation(answered)[:n])
        pool = whole.without(families=[info.group])
        state = ValueModel(ground.embedder, pool).state_of_counts(
            rows[known], table.successes[known, j], table.trials[known, j],
            keys=[table.keys[i] for i in known],
        )  # fmt: skip
        seen = Evidence(pool, rows[known].astype(np.float64), table.successes[known, j],
                        table.trials[known, j], state.covariates, 1024)  # fmt: skip
        asked = Query(queries, pool.covariates(queries))
        made["ours"][:, j] = state.predict_vectors(queries).mean
        made["ridge"][:, j] = Ridge(seen).predict(asked).probability
        made["weighted_knn"][:, j] = Near(seen).predict(asked).probability
        parts = [logit(made[m][:, j]) for m in ("ours", "ridge", "weighted_knn")]
        made["blend"][:, j] = sigmoid(np.mean(parts, axis=0))
    return made


def costs_of(table: OutcomeTable, rows: Index) -> Array:
    """Return dollars of each answer (prompts, models): as recorded, else by list prices.

    Raises:
        ConfigError: a model has neither prices nor recorded dollars.
    """
    found = np.full((len(rows), len(table.models)), np.nan)
    if table.cost_usd.size:
        found = table.cost_usd[rows].copy()
    read = np.array([len(table.prompts[i]) for i in rows]) / CHARS_PER_TOKEN
    for j, info in enumerate(table.models):
        missing = np.isnan(found[:, j])
        if not missing.any():
            continue
        if info.output_usd_per_mtok is None:
            raise ConfigError(
                f"model {info.name!r} has neither a price nor a recorded cost for every prompt: "
                "give prices as --models"
            )
        tokens = np.full(len(rows), np.nan)
        if table.output_tokens.size:
            tokens = table.output_tokens[rows, j]
        written = np.where(np.isnan(tokens), ASSUMED_TOKENS, tokens)
        usd = read * (info.input_usd_per_mtok or 0.0) + written * info.output_usd_per_mtok
        found[missing, j] = usd[missing] / 1e6
    return found


@dataclass(frozen=True, slots=True)
class Standing:
    """How one method's decisions do; intervals are 95 % over draws of the prompts."""

    routed: float
    """Mean quality of the largest prediction."""
    gap_closed: float
    """Share of the way from the best single model to the oracle; below 0 is worse than it."""
    gap_closed_ci: tuple[float, float]
    aiq: float
    """Mean quality over the range of costs."""
    aiq_ci: tuple[float, float]
    routed_less_ours: tuple[float, float, float]
    """Mean and interval of the difference to `ours`, the same prompts."""
    aiq_less_ours: tuple[float, float, float]


def curves_of(value: Mapping[str, Array], cost: Array, quality: Array) -> dict[str, CostCurve]:
    """Return cost against quality of each method, of single models mixed, and of the oracle."""
    curves = {name: sweep(v, cost, quality, cost, KNOBS) for name, v in value.items()}
    curves["single models"] = CostCurve(cost.mean(axis=0), quality.mean(axis=0))
    curves["oracle"] = sweep(quality, cost, quality, cost, KNOBS)
    return curves


def standing(
    draws: Sequence[Mapping[str, Array]], cost: Array, quality: Array, *, samples: int = 200
) -> dict[str, Standing]:
    """Return the standing of each method, mean over draws of the labels.

    Args:
        draws: predictions (prompts, models) of each method, a mapping a draw of the labels: one
            draw can put either of two equal methods a point ahead.
        cost: dollars of each answer.
        quality: what each answer is worth, from 0 to 1.
        samples: bootstrap samples of the prompts.
    """
    n, line = len(quality), np.arange(len(quality))
    at = np.random.default_rng(0).integers(n, size=(samples, n))
    best, top = int(quality.mean(0).argmax()), quality.max(1)
    names = list(draws[0])
    got = {m: np.mean([quality[line, d[m].argmax(1)] for d in draws], axis=0) for m in names}
    closed = {m: np.array([_closed(g[i], quality[i, best], top[i]) for i in at])
              for m, g in got.items()}  # fmt: skip
    routed = {m: g[at].mean(axis=1) for m, g in got.items()}

    def areas(m: str, i: Index) -> float:
        return float(np.mean([_area(d[m][i], cost[i], quality[i]) for d in draws]))

    spread = {m: np.array([areas(m, i) for i in at]) for m in names}
    return {
        m: Standing(
            float(got[m].mean()),
            _closed(got[m], quality[:, best], top),
            _bounds(closed[m]),
            areas(m, line),
            _bounds(spread[m]),
            _against(routed[m], routed["ours"]),
            _against(spread[m], spread["ours"]),
        )
        for m in names
    }


def _closed(got: Array, base: Array, top: Array) -> float:
    return float((got.mean() - base.mean()) / max(top.mean() - base.mean(), 1e-9))


def _area(value: Array, cost: Array, quality: Array) -> float:
    single = cost.mean(axis=0)
    low, high = float(single.min()), float(single.max())
    return sweep(value, cost, quality, cost, KNOBS).area(low, high)


def _bounds(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return round(float(low), 4), round(float(high), 4)


def _against(values: Array, ours: Array) -> tuple[float, float, float]:
    return round(float((values - ours).mean()), 4), *_bounds(values - ours)


def by_method(rows: Sequence[tuple[str, Standing]]) -> str:
    """Return the rows as lines of a table."""
    lines = [f"{'':14}{'routed':>8}{'gap closed':>24}{'AIQ':>8}{'AIQ less ours':>26}"]
    for name, s in rows:
        gap = f"{s.gap_closed:.3f} [{s.gap_closed_ci[0]:.3f}, {s.gap_closed_ci[1]:.3f}]"
        less = "{:+.4f} [{:+.4f}, {:+.4f}]".format(*s.aiq_less_ours)
        lines.append(f"{name:14}{s.routed:8.4f}{gap:>24}{s.aiq:8.4f}{less:>26}")
    return "\n".join(lines)
