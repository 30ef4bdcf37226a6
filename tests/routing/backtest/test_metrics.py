"""Measures against brute force, peers and hand-made cases."""

from __future__ import annotations

import numpy as np
import pytest

from tfgrpo.errors import ConfigError
from tfgrpo.routing.backtest import metrics
from tfgrpo.routing.backtest.metrics import CostCurve


def test_the_area_is_the_share_of_pairs_in_order():
    rng = np.random.default_rng(0)
    p, y = np.round(rng.random(60), 1), (rng.random(60) < 0.4).astype(float)
    pairs = [(a > b) + 0.5 * (a == b) for a in p[y > 0] for b in p[y == 0]]
    assert metrics.area(p, y) == pytest.approx(np.mean(pairs))
    assert np.isnan(metrics.area(p, np.ones(60)))


def test_an_area_pooled_over_policies_is_refused_and_would_be_earned_prompt_blind():
    """The flaw of grouping by checkpoint alone: a context mean scores far above one half."""
    rng = np.random.default_rng(0)
    rate = {"weak": 0.3, "strong": 0.7}
    models = np.repeat(["weak", "strong"], 500)
    y = np.array([float(rng.random() < rate[m]) for m in models])
    blind = np.array([rate[m] for m in models])
    assert metrics.area(blind, y) > 0.62
    with pytest.raises(ConfigError, match="pooled over models"):
        metrics.grouped_area(blind, y, ["step 16"] * 1000, models=list(models))
    honest = metrics.grouped_area(blind, y, list(models), models=list(models))
    assert honest == pytest.approx(0.5)


def test_calibration_error_is_zero_for_the_truth_and_the_offset_for_a_shift():
    rng = np.random.default_rng(1)
    p = rng.random(60_000)
    y = (rng.random(60_000) < p).astype(float)
    assert metrics.ece(p, y) < 0.01
    assert metrics.ece(np.full(1000, 0.9), np.full(1000, 0.6)) == pytest.approx(0.3)


def test_brier_and_log_loss_by_hand():
    p, y = np.array([0.8, 0.4]), np.array([1.0, 0.0])
    assert metrics.brier(p, y) == pytest.approx((0.04 + 0.16) / 2)
    assert metrics.log_loss(p, y) == pytest.approx(-(np.log(0.8) + np.log(0.6)) / 2)
    assert np.isfinite(metrics.log_loss(np.array([0.0]), np.array([1.0])))


def test_the_hull_is_above_every_point_and_made_of_points():
    rng = np.random.default_rng(2)
    for _ in range(30):
        cost, quality = rng.random(12), rng.random(12)
        x, y = metrics.hull(cost, quality)
        assert np.all(np.diff(x) > 0)
        assert np.all(np.diff(y) > 0)
        slopes = np.diff(y) / np.diff(x)
        assert np.all(np.diff(slopes) < 1e-9)
        at = np.interp(cost, x, y, left=-np.inf)
        inside = cost >= x[0]
        assert np.all(at[inside] >= quality[inside] - 1e-9)


def test_the_area_under_a_cost_curve_is_normalised_by_the_range():
    curve = CostCurve(np.array([1.0, 3.0]), np.array([0.4, 0.8]))
    assert curve.area(1.0, 3.0) == pytest.approx(0.6)
    assert curve.area(1.0, 5.0) == pytest.approx((0.6 * 2 + 0.8 * 2) / 4)
    scaled = CostCurve(np.array([10.0, 30.0]), np.array([0.4, 0.8]))
    assert scaled.area(10.0, 30.0) == pytest.approx(0.6)


def test_a_sweep_runs_from_the_best_model_to_the_cheapest():
    value = np.array([[0.5, 0.9], [0.8, 0.81]])
    cost = np.array([[1.0, 10.0], [1.0, 10.0]])
    curve = metrics.sweep(value, cost, value, cost, np.array([0.0, 0.01, 1.0]))
    np.testing.assert_allclose(curve.cost, [10.0, 5.5, 1.0])
    np.testing.assert_allclose(curve.quality, [0.855, 0.85, 0.65])


def test_random_mixing_recovers_half_the_gap():
    share = np.linspace(0, 1, 11)
    apgr, half = metrics.recovered_gap(share, 0.6 + 0.2 * share, 0.6, 0.8)
    assert apgr == pytest.approx(0.5)
    assert half == pytest.approx(0.5)


def test_the_paired_bootstrap_finds_a_difference_and_none():
    rng = np.random.default_rng(3)
    base = rng.random((6, 300))
    gap, low, high = metrics.bootstrap_gap(
        base, base - 0.05 + 0.01 * rng.random((6, 300)), draws=200
    )
    assert low < gap < high < 0
    other = base + 0.1 * rng.standard_normal((6, 300))
    _, low, high = metrics.bootstrap_gap(base, other, draws=200)
    assert low < 0 < high


def test_pair_accuracy_counts_ties_half():
    assert metrics.pair_accuracy(np.array([0.9, 0.5, 0.1]), np.array([0.1, 0.5, 0.9])) == 0.5
