"""Failures among prompts kept on the cheaper model: promised level against recalibration draws.

    python -m tests.benchmarks.routing.routing_guarantee

`routellm_pair`: keep a prompt on Mixtral when its calibrated score allows, else GPT-4. A failure is
a kept prompt that Mixtral gets wrong. 200 draws split the MMLU prompts outside train into
calibration and check; then calibrated on MMLU and checked on GSM8K, where the promise does not hold
by right.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.record import record
from tests.benchmarks.routing.routing_data import embedder, load
from tfgrpo.routing.backtest.metrics import area, recovered_gap
from tfgrpo.routing.calibration import calibrate
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import ValueModel

Array = NDArray[np.float64]

LEVEL, CONFIDENCE, DRAWS, LABELS, CALIBRATION = 0.10, 0.90, 200, 1024, 1500


def recalibrated(
    level: float,
    draws: list[NDArray[np.int64]],
    scores: Array,
    failed: Array,
    shifted: Array,
    shifted_failed: Array,
) -> dict[str, Any]:
    """Calibrate on each draw, check on the rest of it and on the shifted prompts."""
    rates, kept_share, shift_rates, shift_share, closed = [], [], [], [], 0
    for order in draws:
        fit, check = order[:CALIBRATION], order[CALIBRATION:]
        gate = calibrate(scores[fit], failed[fit], level=level, confidence=CONFIDENCE)
        closed += not gate.is_open
        kept = scores[check] >= gate.threshold
        kept_share.append(float(kept.mean()))
        rates.append(float(failed[check][kept].mean()) if kept.any() else 0.0)
        kept = shifted >= gate.threshold
        shift_share.append(float(kept.mean()))
        shift_rates.append(float(shifted_failed[kept].mean()) if kept.any() else 0.0)
    some = [r for r, share in zip(rates, kept_share, strict=True) if share > 0]
    return {
        "violations": float(np.mean(np.array(rates) > level)),
        "coverage": round(float(np.mean(kept_share)), 4),
        "closed_gates": closed,
        "mean_failure_rate": round(float(np.mean(some)), 4) if some else None,
        "mmlu_to_gsm8k": {
            "violations": float(np.mean(np.array(shift_rates) > level)),
            "coverage": round(float(np.mean(shift_share)), 4),
            "mean_failure_rate": round(float(np.mean(shift_rates)), 4),
        },
    }


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
    draws = [rng.permutation(len(rest)) for _ in range(DRAWS)]
    shift_failed = 1 - table.rates[shifted, weak]
    at = {
        level: recalibrated(level, draws, score["rest"], failed, score["shifted"], shift_failed)
        for level in (LEVEL, 0.15, 0.20, 0.25)
    }
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
        "draws": DRAWS,
        **at[LEVEL],
        "other_levels": {str(level): row for level, row in at.items() if level != LEVEL},
        "calibration_prompts": CALIBRATION,
        "check_prompts": len(rest) - CALIBRATION,
        "base_failure_rate": round(float(failed.mean()), 4),
        "auc": round(area(score["rest"], table.rates[rest, weak]), 4),
        "apgr": round(apgr, 4),
        "strong_share_at_half_gap": round(half, 4),
        "base_failure_rate_gsm8k": round(float(shift_failed.mean()), 4),
        "cpu_s": round(time.process_time() - began, 1),
    }
    record("routing_guarantee", figures, "python -m tests.benchmarks.routing.routing_guarantee")


if __name__ == "__main__":
    main()
