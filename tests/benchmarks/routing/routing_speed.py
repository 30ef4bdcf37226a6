"""Time of a decision with cached vectors, and what the package carries.

    python -m tests.benchmarks.routing.routing_speed

A decision is `Router.ask` over the 7 models of `llmrouter`, each with 256 labels, vector at hand.
`benchmark_cpu_s` is the sum over the label benchmark's sets, taken from its result file.
"""

from __future__ import annotations

import json
import time
from importlib.resources import files

import numpy as np

from tests.benchmarks.record import RESULTS, record
from tests.benchmarks.routing.routing_data import embedder, load
from tfgrpo.routing.estimator.network import card
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import ValueModel
from tfgrpo.routing.records import SuccessCount
from tfgrpo.routing.router import Router, TradeOff

LABELS, DECISIONS = 256, 300


def main() -> None:
    """Measure and record."""
    data = load("llmrouter")
    table = data.table
    train, test = np.flatnonzero(data.split < 6), np.flatnonzero(data.split >= 8)
    encoder = embedder()
    pool = ReferencePool.fit(
        table.take(train), data.vectors[train], embedder_id=encoder.embedder_id
    )
    rng = np.random.default_rng(0)
    outcomes: list[SuccessCount] = []
    for info in table.models:
        rows = np.sort(rng.permutation(train)[:LABELS])
        outcomes += table.take(rows).outcomes(info.name)
    router = Router(
        ValueModel(encoder, pool),
        table.models,
        outcomes,
        rule=TradeOff(per_usd=10.0),
        fallback=table.model_names[0],
    )
    began = time.perf_counter()
    router.ask(table.prompts[test[0]], vector=data.vectors[test[0]])
    first_s = time.perf_counter() - began
    times, alone, processor = [], [], 0.0
    for i in test[:DECISIONS]:
        began, busy = time.perf_counter(), time.process_time()
        router.ask(table.prompts[i], vector=data.vectors[i])
        times.append(1000 * (time.perf_counter() - began))
        processor += 1000 * (time.process_time() - busy) / DECISIONS
    for i in test[:DECISIONS]:
        began = time.perf_counter()
        router.ask(table.prompts[i], vector=data.vectors[i], among=[table.model_names[0]])
        alone.append(1000 * (time.perf_counter() - began))
    name = table.model_names[0]
    prepared = []
    for i in test[:20]:
        router.record(SuccessCount(table.prompts[i], name, 1.0, prompt_id=table.keys[i]))
        began = time.perf_counter()
        router.state(name)
        prepared.append(1000 * (time.perf_counter() - began))
    state = router.state(name)
    batch = []
    for _ in range(20):
        began = time.perf_counter()
        state.predict_vectors(data.vectors[test[:64]])
        batch.append(1000 * (time.perf_counter() - began))
    path = RESULTS / "routing.json"
    measured = json.loads(path.read_text())["benchmark_cpu_s"] if path.exists() else None
    training = card()
    figures = {
        "decision_ms": round(float(np.median(times)), 3),
        "decision_p95_ms": round(float(np.quantile(times, 0.95)), 3),
        "decision_cpu_ms": round(processor, 3),
        "decision_one_model_ms": round(float(np.median(alone)), 3),
        "models": len(table.models),
        "labels": LABELS,
        "first_decision_s": round(first_s, 3),
        "state_after_new_outcome_ms": round(float(np.median(prepared)), 2),
        "batch_of_64_one_model_ms": round(float(np.median(batch)), 2),
        "benchmark_cpu_s": measured,
        "weights_kb": round(
            len(files("tfgrpo.routing.estimator").joinpath("network.npz").read_bytes()) / 1000, 1
        ),
        "train_cpu_s": training["train_cpu_s"],
    }
    record("routing_speed", figures, "python -m tests.benchmarks.routing.routing_speed")


if __name__ == "__main__":
    main()
