"""Failures among prompts kept on the cheaper model: promised level against recalibration draws.

    python -m tests.benchmarks.routing_guarantee

`routellm_pair`: keep a prompt on Mixtral when its calibrated score allows, else GPT-4. A failure is
a kept prompt that Mixtral gets wrong. 200 draws split the MMLU prompts outside train into
calibration and check; then calibrated on MMLU and checked on GSM8K, where the promise does not hold
by right.
"""

from __future__ import annotations

import time

import numpy as np

from tests.benchmarks.record import record
from tests.benchmarks.routing_data import embedder, load
from tfgrpo.routing.calibration import calibrate
from tfgrpo.routing.metrics import area, recovered_gap
from tfgrpo.routing.reference import ReferencePool
from tfgrpo.routing.value_model import ValueModel

LEVEL, CONFIDENCE, DRAWS, LABELS, CALIBRATION = 0.10, 0.90, 200, 1024, 1500


def main() -> None:
    """Measure and record."""
    began = time.process_time()
    data = load("routellm_pair")
    table = data.table
    weak = next(j for j, m in enumerate(data.models) if m["tier"] == "weak")
    strong = 1 - weak
    is_mmlu = np.array([p["dataset"] == "mmlu" for p in data.prompts])
    train = np.flatnonzero((data.split < 6) & is_mmlu)
    rng = np.random.default_rng(0)
    pool = ReferencePool.fit(
        table.take(train).of_models([strong]),
        data.vectors[train],
        embedder_id=embedder().embedder_id,
    )
    rows = np.sort(rng.permutation(train)[:LABELS])
    state = ValueModel(embedder(), pool).state_of_counts(
        data.vectors[rows],
        table.successes[rows, weak],
        table.trials[rows, weak],
        keys=[table.keys[i] for i in rows],
    )
    rest = np.flatnonzero((data.split >= 6) & is_mmlu)
    shifted = np.flatnonzero(~is_mmlu)
    score = {name: state.predict_vectors(data.vectors[at]).mean for name, at in
             (("rest", rest), ("shifted", shifted))}  # fmt: skip
    failed = 1 - table.rates[rest, weak]
    over, coverage, rates, closed, shift_rates, shift_coverage = 0, [], [], 0, [], []
    for _ in range(DRAWS):
        order = rng.permutation(len(rest))
        fit, check = order[:CALIBRATION], order[CALIBRATION:]
        gate = calibrate(score["rest"][fit], failed[fit], level=LEVEL, confidence=CONFIDENCE)
        kept = score["rest"][check] >= gate.threshold
        closed += not gate.is_open
        coverage.append(float(kept.mean()))
        rate = float(failed[check][kept].mean()) if kept.any() else 0.0
        rates.append(rate)
        over += rate > LEVEL
        kept = score["shifted"] >= gate.threshold
        shift_coverage.append(float(kept.mean()))
        if kept.any():
            shift_rates.append(float(1 - table.rates[shifted, weak][kept].mean()))
    thresholds = np.quantile(score["rest"], np.linspace(0, 1, 51))
    share = np.array([(score["rest"] < t).mean() for t in thresholds])
    quality = np.array(
        [
            np.where(score["rest"] < t, table.rates[rest, strong], table.rates[rest, weak]).mean()
            for t in thresholds
        ]
    )
    apgr, half = recovered_gap(
        share,
        quality,
        float(table.rates[rest, weak].mean()),
        float(table.rates[rest, strong].mean()),
    )
    figures = {
        "stated": round(1 - CONFIDENCE, 4),
        "level": LEVEL,
        "violations": over / DRAWS,
        "draws": DRAWS,
        "coverage": round(float(np.mean(coverage)), 4),
        "mean_failure_rate": round(float(np.mean(rates)), 4),
        "closed_gates": closed,
        "calibration_prompts": CALIBRATION,
        "check_prompts": len(rest) - CALIBRATION,
        "base_failure_rate": round(float(failed.mean()), 4),
        "auc": round(area(score["rest"], table.rates[rest, weak]), 4),
        "apgr": round(apgr, 4),
        "strong_share_at_half_gap": round(half, 4),
        "shift_mmlu_to_gsm8k": {
            "violations": round(float(np.mean(np.array(shift_rates) > LEVEL)), 4)
            if shift_rates
            else 0,
            "coverage": round(float(np.mean(shift_coverage)), 4),
            "mean_failure_rate": round(float(np.mean(shift_rates)), 4) if shift_rates else None,
            "base_failure_rate": round(float(1 - table.rates[shifted, weak].mean()), 4),
        },
        "cpu_s": round(time.process_time() - began, 1),
    }
    record("routing_guarantee", figures, "python -m tests.benchmarks.routing_guarantee")


if __name__ == "__main__":
    main()
