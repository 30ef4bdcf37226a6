"""Label efficiency of the value model against its rivals: leave one family of models out.

    python -m tests.benchmarks.routing.routing                 all four sets, then record
    python -m tests.benchmarks.routing.routing --set llmrouter one set, for --collect
    python -m tests.benchmarks.routing.routing --collect       record what the parts measured

`bfcl` is measured only; nothing shipped is fitted on it. Its 863 train prompts are fewer than
1,024: that row uses all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.record import record
from tests.benchmarks.routing.routing_data import (
    ROOT,
    RoutingSet,
    embedder,
    load,
    with_metadata,
)
from tfgrpo.routing.backtest.backtest import ReplayPlan, ReplayResult, replay
from tfgrpo.routing.backtest.baselines import RIVALS
from tfgrpo.routing.backtest.metrics import CostCurve, bootstrap_gap, sweep
from tfgrpo.routing.backtest.plots import cost_curves, label_curves
from tfgrpo.routing.costs import CHARS_PER_TOKEN
from tfgrpo.routing.estimator.laplace import logit, sigmoid
from tfgrpo.routing.estimator.layers import Evidence, Query
from tfgrpo.routing.estimator.own_layers import Near, Ridge
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import LAYERS, Layer, ValueModel
from tfgrpo.runtime.embedders import Embedder, Floats, unit_rows

SETS = ("mmlu_pro", "zeroeval", "llmrouter", "bfcl")
JUDGED = (16, 64, 256, 1024)
DRAWS = {"mmlu_pro": 1, "zeroeval": 1, "llmrouter": 3, "bfcl": 1}
ALL_SIZES = {"llmrouter": (16, 64, 256, 512, 1024)}
METHODS = ("ours", "ridge", "weighted_knn", "blend")
PROMPT_BLIND = ("mean", "domain")
"""Printed, but no rivals: they do not see the prompt's words (`domain` is told the data set)."""
PARTS = ROOT / ".scratch" / "routing"
SHARED: tuple[Layer, ...] = ("level", "difficulty", "axes", "local", "network")
VARIANTS: dict[str, tuple[Layer, ...]] = {"full": LAYERS, "without_own": SHARED}

Array = NDArray[np.float64]


def measure(name: str) -> dict[str, Any]:
    """Replay one set and return its rows and comparisons."""
    began = time.process_time()
    data = load(name)
    sizes = ALL_SIZES.get(name, JUDGED)
    result = replay(
        data.table,
        data.vectors,
        embedder(),
        data.split,
        sizes=sizes,
        draws=DRAWS[name],
        plan=ReplayPlan(variants=VARIANTS, progress=lambda line: print(name, line, flush=True)),
    )
    PARTS.mkdir(parents=True, exist_ok=True)
    label_curves(result.rows, PARTS / f"{name}.png", title=name)
    part = {
        "rows": [{"set": name, **row.to_dict()} for row in result.rows],
        "models": len(data.table.models),
        "families": len({m.group for m in data.table.models}),
        "layer_weights": {str(n): w for n, w in result.weights.items()},
        "labels_to_match": _labels_to_match(result),
        "gaps": [_gap(result, n) for n in JUDGED],
        **_singles(data),
    }
    if name == "llmrouter":
        part |= cost_quality(data)
    part["cpu_s"] = round(time.process_time() - began, 1)
    return part


def _labels_to_match(result: ReplayResult) -> int | None:
    target = result.row("beta_knn20", 1024).brier
    return result.labels_to_match("full", target)


def _gap(result: ReplayResult, n: int) -> dict[str, Any]:
    """Ours minus the best rival at n labels, with a paired bootstrap over models and prompts."""
    rivals = [m for m in RIVALS if m not in PROMPT_BLIND]
    best = min(rivals, key=lambda m: result.row(m, n).brier)
    gap, low, high = bootstrap_gap(
        result.errors[best, n], result.errors["full", n], draws=400, seed=0
    )
    return {
        "n": n,
        "best_rival": best,
        "gap": round(result.row("full", n).brier - result.row(best, n).brier, 5),
        "pooled_gap": round(gap, 5),
        "interval_95": [round(low, 5), round(high, 5)],
        "gap_to_domain": round(result.row("full", n).brier - result.row("domain", n).brier, 5),
    }


def _singles(data: RoutingSet) -> dict[str, float]:
    test = np.isin(data.split, (8, 9)) & (data.table.trials > 0).all(axis=1)
    rates = data.table.rates[test]
    return {
        "best_single": round(float(rates.mean(axis=0).max()), 4),
        "oracle": round(float(rates.max(axis=1).mean()), 4),
    }


def features_of(data: RoutingSet, kind: str) -> tuple[Floats, Embedder]:
    """Rows of a set: the text's vector, lengths and category beside it, or those two alone."""
    if kind == "vectors":
        return data.vectors, embedder()
    train = np.flatnonzero(data.split < 6)
    rows, encoder = with_metadata(data, train)
    if kind == "metadata":
        text = encoder.base.width
        rows = unit_rows(np.hstack([np.zeros_like(rows[:, :text]), rows[:, text:]]))
    return rows, encoder


def chances(
    data: RoutingSet, kind: str, n: int, at: NDArray[np.intp], seed: int
) -> dict[str, Array]:
    """Predicted success (prompts, models) of each method with n labels a model."""
    table, train = data.table, np.flatnonzero(data.split < 6)
    rows, encoder = features_of(data, kind)
    whole = ReferencePool.fit(table.take(train), rows[train], embedder_id=encoder.embedder_id)
    made = {m: np.zeros((len(at), len(table.models))) for m in METHODS}
    rng = np.random.default_rng(seed)
    queries = rows[at].astype(np.float64)
    for j, info in enumerate(table.models):
        known = np.sort(rng.permutation(train)[:n])
        pool = whole.without(families=[info.group])
        state = ValueModel(encoder, pool).state_of_counts(
            rows[known], table.successes[known, j], table.trials[known, j],
            keys=[table.keys[i] for i in known],
        )  # fmt: skip
        seen = Evidence(pool, rows[known].astype(np.float64), table.successes[known, j],
                        table.trials[known, j], state.covariates, 1024)  # fmt: skip
        asked = Query(queries, pool.covariates(queries))
        made["ours"][:, j] = state.predict_vectors(queries).mean
        made["ridge"][:, j] = Ridge(seen).predict(asked).probability
        made["weighted_knn"][:, j] = Near(seen).predict(asked).probability
        made["blend"][:, j] = sigmoid(
            np.mean([logit(made[m][:, j]) for m in ("ours", "ridge", "weighted_knn")], axis=0)
        )
    return made


def cost_quality(data: RoutingSet) -> dict[str, Any]:
    """Route among all models with N labels each: share of the gap to the oracle, and AIQ.

    Costs are list prices × output length. The source has no token counts, so the output of every
    model counts as 200 tokens plus the prompt (in and out prices are equal there): costs differ by
    model and by prompt length. Intervals are of 300 bootstrap draws of the test prompts.
    """
    table = data.table
    test = np.flatnonzero(np.isin(data.split, (8, 9)))
    prices = np.array([m.output_usd_per_mtok or 0.0 for m in table.models]) / 1e6
    tokens = np.array([len(table.prompts[i]) for i in test]) / CHARS_PER_TOKEN + 200.0
    cost, quality = tokens[:, None] * prices, table.rates[test]
    knobs = np.concatenate([[0.0], np.logspace(0, 6, 60)])
    singles = CostCurve(cost.mean(axis=0), quality.mean(axis=0))
    low, high = float(singles.cost.min()), float(singles.cost.max())
    draws = np.random.default_rng(0).integers(len(test), size=(300, len(test)))
    curves = {"zero_router": singles, "oracle": sweep(quality, cost, quality, cost, knobs)}
    rows = []
    for kind in ("vectors", "vectors+metadata", "metadata"):
        for n in (256, 1024):
            value = chances(data, kind, n, test, seed=n)
            for method in METHODS:
                curve = sweep(value[method], cost, quality, cost, knobs)
                if kind == "vectors+metadata":
                    curves[f"{method}_{n}"] = curve
                rows.append({
                    "features": kind, "n": n, "method": method,
                    "aiq": round(curve.area(low, high), 4),
                    **_decided(value[method], value["ours"], quality, draws),
                    "aiq_against_ours": _area_gap(value[method], value["ours"], cost, quality,
                                                  draws[:40], knobs),
                })  # fmt: skip
                print(rows[-1], flush=True)
    cost_curves(
        {k: v for k, v in curves.items() if not k.endswith("_256")},
        PARTS / "llmrouter_cost.png", title="llmrouter",
    )  # fmt: skip
    return {
        "decisions": rows,
        "aiq": {name: round(c.area(low, high), 4) for name, c in curves.items()},
    }


def _decided(value: Array, ours: Array, quality: Array, draws: Any) -> dict[str, Any]:
    """Routed quality and share of the gap from best single model to oracle, with bounds."""
    line = np.arange(len(value))
    got, mine = quality[line, value.argmax(1)], quality[line, ours.argmax(1)]
    best, top = quality.mean(0).argmax(), quality.max(1)
    closed = np.array([
        (got[d].mean() - quality[d, best].mean()) / (top[d].mean() - quality[d, best].mean())
        for d in draws
    ])  # fmt: skip
    behind = np.array([(got[d] - mine[d]).mean() for d in draws])
    base = float(quality[:, best].mean())
    return {
        "routed": round(float(got.mean()), 4),
        "gap_closed": round(float((got.mean() - base) / (top.mean() - base)), 4),
        "gap_closed_ci": [round(float(v), 4) for v in np.quantile(closed, [0.025, 0.975])],
        "routed_against_ours": [
            round(float(v), 4) for v in (behind.mean(), *np.quantile(behind, [0.025, 0.975]))
        ],
    }


def _area_gap(
    value: Array, ours: Array, cost: Array, quality: Array, draws: Any, knobs: Array
) -> list[float]:
    """AIQ less that of ours: mean and 95 % bounds over draws of prompts."""
    gaps = []
    for d in draws:
        c, q = cost[d], quality[d]
        low, high = float(c.mean(0).min()), float(c.mean(0).max())
        areas = [sweep(v[d], c, q, c, knobs).area(low, high) for v in (value, ours)]
        gaps.append(areas[0] - areas[1])
    return [round(float(v), 4) for v in (np.mean(gaps), *np.quantile(gaps, [0.025, 0.975]))]


def figures(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Join the parts into the figures that are recorded."""
    worst = max((g["gap"] for p in parts.values() for g in p["gaps"]), default=float("nan"))
    return {
        "rows": [row for part in parts.values() for row in part["rows"]],
        "labels_to_match": {k: parts[k]["labels_to_match"] for k in SETS[:3] if k in parts},
        "worst_gap_brier": worst,
        "gaps": {name: part["gaps"] for name, part in parts.items()},
        "aiq": parts.get("llmrouter", {}).get("aiq"),
        "decisions": parts.get("llmrouter", {}).get("decisions"),
        "layer_weights": {name: part["layer_weights"] for name, part in parts.items()},
        "sets": {
            name: {k: part[k] for k in ("models", "families", "best_single", "oracle", "cpu_s")}
            for name, part in parts.items()
        },
        "benchmark_cpu_s": round(sum(part["cpu_s"] for part in parts.values()), 1),
        "draws": DRAWS,
    }


def main() -> None:
    """Measure, or collect what was measured set by set."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", choices=SETS)
    parser.add_argument("--collect", action="store_true")
    options = parser.parse_args()
    if options.set:
        part = measure(options.set)
        (PARTS / f"{options.set}.json").write_text(json.dumps(part))
        for row in part["rows"]:
            print(row)
        return
    if options.collect:
        found = {n: PARTS / f"{n}.json" for n in SETS if (PARTS / f"{n}.json").exists()}
        parts = {name: json.loads(path.read_text()) for name, path in found.items()}
    else:
        parts = {name: measure(name) for name in SETS}
    record("routing", figures(parts), "python -m tests.benchmarks.routing.routing")


if __name__ == "__main__":
    main()
