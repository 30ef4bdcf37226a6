"""Label efficiency of the value model against its rivals: leave one family of models out.

    python -m tests.benchmarks.routing.routing                  all parts, then record
    python -m tests.benchmarks.routing.routing --part llmrouter one part, for --collect
    python -m tests.benchmarks.routing.routing --collect        record what the parts measured

The part `decisions` routes among the 7 models of `llmrouter`: with vectors of the text, with its
category and lengths beside them, and with those two alone.

`bfcl` is measured only; nothing shipped is fitted on it. Its 863 train prompts are fewer than
1,024: that row uses all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import Any

import numpy as np

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
from tfgrpo.routing.backtest.decisions import BacktestData, chances, costs_of, curves_of, standing
from tfgrpo.routing.backtest.metrics import bootstrap_gap
from tfgrpo.routing.backtest.plots import cost_curves, label_curves
from tfgrpo.routing.estimator.value_model import LAYERS, Layer
from tfgrpo.runtime.embedders import Embedder, Floats, unit_rows

SETS = ("mmlu_pro", "zeroeval", "llmrouter", "bfcl")
JUDGED = (16, 64, 256, 1024)
DRAWS = {"mmlu_pro": 1, "zeroeval": 1, "llmrouter": 3, "bfcl": 1}
ALL_SIZES = {"llmrouter": (16, 64, 256, 512, 1024)}
DECIDED = {256: 4, 1024: 4, 3703: 1}
"""Labels a model (3,703 is all of train) and draws of them."""
PROMPT_BLIND = ("mean", "domain")
"""Printed, but no rivals: they do not see the prompt's words (`domain` is told the data set)."""
PARTS = ROOT / ".scratch" / "routing"
SHARED: tuple[Layer, ...] = ("level", "difficulty", "axes", "local", "network")
VARIANTS: dict[str, tuple[Layer, ...]] = {"full": LAYERS, "without_own": SHARED}


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


def decisions() -> dict[str, Any]:
    """Route among all models with N labels each, mean over draws of the labels.

    Costs are list prices × output length. The source has no token counts, so the output of every
    model counts as 200 tokens beside the prompt (in and out prices are equal there): costs differ
    by model and by prompt length.
    """
    began = time.process_time()
    data = load("llmrouter")
    table = data.table
    train, test = np.flatnonzero(data.split < 6), np.flatnonzero(np.isin(data.split, (8, 9)))
    cost, quality = costs_of(table, test), table.rates[test]
    rows, curves = [], {}
    for kind in ("vectors", "vectors+metadata", "metadata"):
        ground = BacktestData(table, *features_of(data, kind), train, test)
        for n, draws in DECIDED.items():
            found = [chances(ground, n, seed=seed) for seed in range(draws)]
            for method, s in standing(found, cost, quality, samples=100).items():
                row = {"features": kind, "n": n, "draws": draws, "method": method, **asdict(s)}
                rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
                print(rows[-1], flush=True)
            if kind == "vectors+metadata" and n == 1024:
                curves = curves_of(found[0], cost, quality)
    PARTS.mkdir(parents=True, exist_ok=True)
    cost_curves(curves, PARTS / "llmrouter_cost.png", title="llmrouter, 1,024 labels a model")
    low, high = cost.mean(axis=0).min(), cost.mean(axis=0).max()
    fixed = {name: round(curves[name].area(low, high), 4) for name in ("single models", "oracle")}
    singles = quality.mean(axis=0)
    return {
        "decisions": rows,
        "aiq_of": fixed,
        "best_single": round(float(singles.max()), 4),
        "behind": [r for r in rows if r["method"] != "ours" and _is_ahead(r)],
        "cpu_s": round(time.process_time() - began, 1),
    }


def _is_ahead(row: dict[str, Any]) -> bool:
    """Whether a rival is ahead of ours by more than its interval."""
    return bool(row["routed_less_ours"][1] > 0 or row["aiq_less_ours"][1] > 0)


def figures(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Join the parts into the figures that are recorded."""
    decided = parts.pop("decisions", {})
    worst = max((g["gap"] for p in parts.values() for g in p["gaps"]), default=float("nan"))
    return {
        "rows": [row for part in parts.values() for row in part["rows"]],
        "labels_to_match": {k: parts[k]["labels_to_match"] for k in SETS[:3] if k in parts},
        "worst_gap_brier": worst,
        "gaps": {name: part["gaps"] for name, part in parts.items()},
        **{k: decided[k] for k in ("decisions", "aiq_of", "behind") if k in decided},
        "layer_weights": {name: part["layer_weights"] for name, part in parts.items()},
        "sets": {
            name: {k: part[k] for k in ("models", "families", "best_single", "oracle", "cpu_s")}
            for name, part in parts.items()
        },
        "benchmark_cpu_s": round(sum(part["cpu_s"] for part in parts.values()), 1),
        "decisions_cpu_s": decided.get("cpu_s"),
        "draws": DRAWS,
    }


def main() -> None:
    """Measure, or collect what was measured set by set."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=(*SETS, "decisions"))
    parser.add_argument("--collect", action="store_true")
    options = parser.parse_args()
    PARTS.mkdir(parents=True, exist_ok=True)
    if options.part:
        (PARTS / f"{options.part}.json").write_text(json.dumps(part_of(options.part)))
        return
    names = (*SETS, "decisions")
    if options.collect:
        found = {n: PARTS / f"{n}.json" for n in names if (PARTS / f"{n}.json").exists()}
        parts = {name: json.loads(path.read_text()) for name, path in found.items()}
    else:
        parts = {name: part_of(name) for name in names}
    record("routing", figures(parts), "python -m tests.benchmarks.routing.routing")


def part_of(name: str) -> dict[str, Any]:
    """Measure one part."""
    return decisions() if name == "decisions" else measure(name)


if __name__ == "__main__":
    main()
