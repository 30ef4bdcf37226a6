"""Does a rewritten prompt go to the same model? RouterArena's robustness row, as a check only.

    TFGRPO_ROUTERARENA=FOLDER python -m tests.benchmarks.routing.routing_robustness

FOLDER holds two kinds of files of the public repository RouteWorks/RouterArena (Apache-2.0):
`cached_results/*.jsonl` (the original prompts) and one `router_inference/predictions/
*-robustness.json` (420 of them rewritten: other words, typing errors, another order). Nothing is
fitted on them. The routers are fitted on `llmrouter` (7 models, 256 labels each, list prices);
`equal` is the share of rewritten prompts that go to the model of the original. A router that always
takes one model reaches 1, so the share of the commonest choice stands beside it, and `chance` is
what two independent draws from the choices would agree on. Published shares: .67 (Cross-Router,
vLLM-SR), .80 (KT-ModelRouter).
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.record import record
from tests.benchmarks.routing.routing_data import ROOT, load
from tfgrpo.routing import Cheapest, Router, SuccessCount, TradeOff, fit
from tfgrpo.routing.estimator.prompt_features import embed_prompts
from tfgrpo.routing.rules import RouteRule

FOLDER = Path(os.environ.get("TFGRPO_ROUTERARENA", ROOT / ".scratch" / "routerarena"))
LABELS, TOKENS = 256, 200.0
"""Labels a model, and output tokens of an answer, which the source does not hold."""
RULES: dict[str, RouteRule] = {
    "largest p": TradeOff(0.0),
    "p less 50 a dollar": TradeOff(50.0),
    "p less 200 a dollar": TradeOff(200.0),
    "cheapest with p above .6": Cheapest(0.6, bound="mean"),
}


def prompt_pairs(folder: Path) -> list[tuple[str, str]]:
    """Original and rewritten texts, by their common index."""
    original: dict[str, str] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "question" in row:
                original[str(row["global_index"])] = row["question"]
    (rewritten, *_) = sorted(folder.glob("*-robustness.json"))
    rows = json.loads(rewritten.read_text(encoding="utf-8"))
    named = [(str(r.get("global index", r.get("global_index"))), r["prompt"]) for r in rows]
    return [(original[i], text) for i, text in named if i in original]


def fitted(embedder: str) -> Router:
    """A router on `llmrouter`: every model has labels of its own prompts of train."""
    data = load("llmrouter")
    train, rng = np.flatnonzero(data.split < 6), np.random.default_rng(0)
    outcomes: list[SuccessCount] = []
    for info in data.table.models:
        rows = np.sort(rng.permutation(train)[:LABELS])
        told = data.table.take(rows).outcomes(info.name)
        outcomes += [replace(o, output_tokens=TOKENS) for o in told]
    cache = ROOT / ".scratch" / "robustness" / embedder.replace(":", "-")
    return fit(outcomes, models=data.table.models, embedder=embedder, out=cache)


def measure(router: Router, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Share of equal choices under each rule, and how far the probabilities move."""
    texts = [list(side) for side in zip(*pairs, strict=True)]
    asked = [
        list(zip(side, embed_prompts(router.embedder, side, [()] * len(side)), strict=True))
        for side in texts
    ]
    sides = [[router.candidates(p, vector=v) for p, v in side] for side in asked]
    moved = [
        abs(a.mean - b.mean)
        for one, two in zip(*sides, strict=True)
        for a, b in zip(one, two, strict=True)
    ]
    found: dict[str, Any] = {"moved_p": round(float(np.mean(moved)), 4)}
    for name, rule in RULES.items():
        told = router.with_rule(rule, router.best_model())
        chosen = [[told.ask(p, vector=v).model for p, v in side] for side in asked]
        counts = Counter(chosen[0])
        shares = np.array(list(counts.values())) / len(pairs)
        equal = np.array([a == b for a, b in zip(*chosen, strict=True)])
        spread = 1.96 * equal.std() / np.sqrt(len(equal))
        found[name] = {
            "equal": round(float(equal.mean()), 4),
            "ci": [round(float(equal.mean() - spread), 4), round(float(equal.mean() + spread), 4)],
            "commonest": round(float(shares.max()), 4),
            "models": len(counts),
            "chance": round(float((shares**2).sum()), 4),
        }
    return found


def main() -> None:
    """Measure and record."""
    began = time.process_time()
    pairs = prompt_pairs(FOLDER)
    rows = {e: measure(fitted(e), pairs) for e in ("hashed", "minilm:bf16", "minilm:bf16+hashed")}
    figures = {
        "prompts": len(pairs),
        "labels": LABELS,
        "rows": rows,
        "published": {"Cross-Router": 0.67, "vLLM-SR": 0.67, "KT-ModelRouter": 0.80},
        "cpu_s": round(time.process_time() - began, 1),
    }
    record("routing_robustness", figures, "python -m tests.benchmarks.routing.routing_robustness")


if __name__ == "__main__":
    main()
