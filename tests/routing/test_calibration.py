"""The promise: exact bound, its violation rate, and when none is given."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from tfgrpo.errors import ConfigError
from tfgrpo.routing.calibration import Gate, calibrate, calibrate_pool, failure_bound


@pytest.mark.parametrize(("k", "n"), [(0, 22), (3, 50), (10, 400), (49, 50)])
def test_the_bound_is_scipys_exact_one(k, n):
    upper = binomtest(k, n, alternative="less").proportion_ci(0.9, method="exact").high
    assert failure_bound(k, n, 0.9) == pytest.approx(upper)
    assert binom.cdf(k, n, failure_bound(k, n, 0.9)) == pytest.approx(0.1)


def test_the_promise_is_broken_at_most_as_often_as_stated():
    """Scores with a known failure curve: the true risk of each gate is computed, not sampled."""
    rng = np.random.default_rng(0)
    grid = np.linspace(0, 1, 20_001)
    curve = 0.4 * (1 - grid) ** 1.5
    broken, open_gates = 0, 0
    for _ in range(400):
        scores = rng.random(600)
        failed = (rng.random(600) < 0.4 * (1 - scores) ** 1.5).astype(float)
        gate = calibrate(scores, failed, level=0.10, confidence=0.90)
        if gate.is_open:
            open_gates += 1
            broken += curve[grid >= gate.threshold].mean() > 0.10
    assert open_gates > 350
    assert broken / 400 <= 0.10 + 2 * math.sqrt(0.1 * 0.9 / 400)


def test_too_little_evidence_keeps_nothing():
    gate = calibrate(np.linspace(0, 1, 15), np.zeros(15))
    assert not gate.is_open
    assert not gate.keeps(1.0)
    assert gate.upper == 1.0
    hopeless = calibrate(np.random.default_rng(0).random(500), np.ones(500))
    assert not hopeless.is_open


def test_a_minimum_coverage_closes_a_gate_that_keeps_too_little():
    rng = np.random.default_rng(0)
    scores = rng.random(1000)
    failed = (scores < 0.9).astype(float)
    assert calibrate(scores, failed).is_open
    assert not calibrate(scores, failed, min_coverage=0.5).is_open


def test_nan_is_an_error_and_never_kept():
    with pytest.raises(ConfigError, match="NaN"):
        calibrate(np.array([0.1, math.nan]), np.zeros(2))
    with pytest.raises(ConfigError, match="two equal lists"):
        calibrate(np.zeros(3), np.zeros(2))
    with pytest.raises(ConfigError, match="level"):
        calibrate(np.zeros(3), np.zeros(3), level=0.0)
    gate = calibrate(np.random.default_rng(0).random(200), np.zeros(200))
    assert gate.is_open
    assert not gate.keeps(math.nan)


def test_a_pool_shares_the_error_and_versions_name_the_data():
    rng = np.random.default_rng(0)
    scores = {"a": rng.random(300), "b": rng.random(300)}
    failed = {name: (s < 0.3).astype(float) for name, s in scores.items()}
    gates = calibrate_pool(scores, failed, confidence=0.9)
    assert gates["a"].confidence == pytest.approx(0.95)
    again = calibrate_pool(scores, failed, confidence=0.9)
    assert gates["a"].version == again["a"].version
    failed["a"][0] = 1 - failed["a"][0]
    assert calibrate_pool(scores, failed)["a"].version != gates["a"].version
    for gate in (*gates.values(), calibrate(np.zeros(3), np.zeros(3))):
        assert Gate.from_dict(gate.to_dict()) == gate
