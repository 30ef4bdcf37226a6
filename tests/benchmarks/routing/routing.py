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

from tests.benchmarks.record import record
from tests.benchmarks.routing.routing_data import ROOT, RoutingSet, embedder, load
from tfgrpo.routing.backtest.backtest import ReplayResult, replay, routed
from tfgrpo.routing.backtest.baselines import RIVALS
from tfgrpo.routing.backtest.metrics import CostCurve, bootstrap_gap, sweep
from tfgrpo.routing.backtest.plots import cost_curves, label_curves
from tfgrpo.routing.costs import CHARS_PER_TOKEN
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import LAYERS, Layer, ValueModel

SETS = ("mmlu_pro", "zeroeval", "llmrouter", "bfcl")
JUDGED = (16, 64, 256, 1024)
DRAWS = {"mmlu_pro": 1, "zeroeval": 1, "llmrouter": 3, "bfcl": 1}
ALL_SIZES = {"llmrouter": (16, 64, 256, 512, 1024)}
PROMPT_BLIND = ("mean", "domain")
"""Printed, but no rivals: they do not see the prompt's words (`domain` is told the data set)."""
PARTS = ROOT / ".scratch" / "routing"
CLOSED: tuple[Layer, ...] = ("level", "difficulty", "axes", "local")
VARIANTS: dict[str, tuple[Layer, ...]] = {"full": LAYERS, "closed": CLOSED}


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
        variants=VARIANTS,
        progress=lambda line: print(name, line, flush=True),
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


def cost_quality(data: RoutingSet) -> dict[str, Any]:
    """Route among all models with N labels each: AIQ with list prices × output length.

    The source has no token counts, so the output of every model counts as 200 tokens plus the
    prompt (in and out prices are equal there): costs differ by model and by prompt length.
    """
    table = data.table
    train = np.flatnonzero(data.split < 6)
    test = np.flatnonzero(np.isin(data.split, (8, 9)))
    prices = np.array([m.output_usd_per_mtok or 0.0 for m in table.models]) / 1e6
    tokens = np.array([len(table.prompts[i]) for i in test]) / CHARS_PER_TOKEN + 200.0
    cost = tokens[:, None] * prices
    quality = table.rates[test]
    knobs = np.concatenate([[0.0], np.logspace(0, 6, 60)])
    whole = ReferencePool.fit(
        table.take(train), data.vectors[train], embedder_id=embedder().embedder_id
    )
    singles = CostCurve(cost.mean(axis=0), quality.mean(axis=0))
    low, high = float(singles.cost.min()), float(singles.cost.max())
    curves = {"zero_router": singles, "oracle": sweep(quality, cost, quality, cost, knobs)}
    accuracy = {}
    rng = np.random.default_rng(0)
    for n in (64, 256, 1024):
        value = np.zeros_like(quality)
        for j, info in enumerate(table.models):
            rows = np.sort(rng.permutation(train)[:n])
            pool = whole.without(families=[info.group])
            state = ValueModel(embedder(), pool).state_of_counts(
                data.vectors[rows],
                table.successes[rows, j],
                table.trials[rows, j],
                keys=[table.keys[i] for i in rows],
            )
            value[:, j] = state.predict_vectors(data.vectors[test]).mean
        curves[f"full_{n}"] = sweep(value, cost, quality, cost, knobs)
        accuracy[str(n)] = {k: round(v, 4) for k, v in routed(value, quality).items()}
    cost_curves(curves, PARTS / "llmrouter_cost.png", title="llmrouter")
    return {
        "aiq": {name: round(c.area(low, high), 4) for name, c in curves.items()},
        "routed_accuracy": accuracy,
    }


def figures(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Join the parts into the figures that are recorded."""
    worst = max((g["gap"] for p in parts.values() for g in p["gaps"]), default=float("nan"))
    return {
        "rows": [row for part in parts.values() for row in part["rows"]],
        "labels_to_match": {k: parts[k]["labels_to_match"] for k in SETS[:3] if k in parts},
        "worst_gap_brier": worst,
        "gaps": {name: part["gaps"] for name, part in parts.items()},
        "aiq": parts.get("llmrouter", {}).get("aiq"),
        "routed_accuracy": parts.get("llmrouter", {}).get("routed_accuracy"),
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
