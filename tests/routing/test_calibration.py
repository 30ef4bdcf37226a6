"""The promise: exact bounds, how often it is broken, what could be had, and when none is given."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from tfgrpo.errors import ConfigError
from tfgrpo.routing.calibration import (
    Gate,
    betting_rejects,
    calibrate,
    failure_bound,
)
from tfgrpo.routing.promises import HeldOut, calibrate_pool


@pytest.mark.parametrize(("k", "n"), [(0, 22), (3, 50), (10, 400), (49, 50)])
def test_the_bound_is_scipys_exact_one(k, n):
    upper = binomtest(k, n, alternative="less").proportion_ci(0.9, method="exact").high
    assert failure_bound(k, n, 0.9) == pytest.approx(upper)
    assert binom.cdf(k, n, failure_bound(k, n, 0.9)) == pytest.approx(0.1)


@pytest.mark.parametrize("size", [60, 400])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_bet_is_lost_as_often_as_its_level_allows(size, share):
    """Losses of −1, 0 and 1 whose mean is exactly δ: rejected in at most α of the draws."""
    rng, delta, wrong = np.random.default_rng(0), 0.02, 0
    chances = [share / 2 - delta / 2, 1 - share, share / 2 + delta / 2]
    for _ in range(600):
        losses = rng.choice([-1.0, 0.0, 1.0], size=size, p=chances)
        wrong += betting_rejects(losses, delta, 0.1)
    assert wrong / 600 <= 0.1 + 2 * math.sqrt(0.1 * 0.9 / 600)
    assert betting_rejects(np.full(600, -0.1), delta, 0.1)
    assert not betting_rejects(np.zeros(0), delta, 0.1)


def _world(rng, n):
    """Scores, both outcomes, and the true mean outcomes: a weak model that is as good on half."""
    scores = rng.random(n)
    weak, strong = 0.3 + 0.4 * scores, np.full(n, 0.6)
    return scores, (rng.random(n) < weak).astype(float), (rng.random(n) < strong).astype(float)


def _true_risk(threshold, risk):
    grid = np.linspace(0, 1, 20_001)
    keep = grid >= threshold
    weak = 0.3 + 0.4 * grid
    if risk == "net":
        return np.where(keep, 0.6 - weak, 0.0).mean()
    if risk == "regret":
        return np.where(keep, 0.6 * (1 - weak), 0.0).mean()
    return (1 - weak[keep]).mean() if keep.any() else 0.0


@pytest.mark.parametrize(("risk", "delta"), [("net", 0.02), ("regret", 0.1), ("failure", 0.4)])
def test_a_promise_is_broken_at_most_as_often_as_stated(risk, delta):
    rng, broken, opened, coverage = np.random.default_rng(0), 0, 0, []
    for _ in range(200):
        gate = calibrate(*_world(rng, 900), risk=risk, delta=delta)
        opened += gate.is_open
        coverage.append(gate.coverage)
        broken += _true_risk(gate.threshold, risk) > delta
    assert opened > 60
    assert broken / 200 <= 0.10 + 2 * math.sqrt(0.1 * 0.9 / 200)
    assert np.mean(coverage) > 0.05


def test_what_could_be_had_and_the_least_level_are_told():
    rng = np.random.default_rng(1)
    gate = calibrate(*_world(rng, 1000), risk="failure", delta=0.05)
    assert not gate.is_open
    assert gate.attainable < 0.05
    assert gate.least_delta is not None
    assert 0.3 <= gate.least_delta <= 0.5
    assert "cannot be promised" in gate.promise
    assert f"{gate.least_delta:.1%}" in gate.promise
    net = calibrate(*_world(np.random.default_rng(1), 1000), risk="net", delta=0.02)
    assert net.is_open
    assert 0.25 < net.attainable < 0.9
    assert net.coverage <= net.attainable
    hopeless = calibrate(np.arange(500.0), np.zeros(500), np.ones(500), risk="net", delta=0.01)
    assert hopeless.coverage <= 0.01
    assert calibrate(np.arange(300.0), np.zeros(300), risk="failure").least_delta is None


def test_equal_scores_are_kept_or_left_together():
    weak = np.array([1.0] * 50 + [0.0] * 50)
    gate = calibrate(np.ones(100), weak, risk="failure", delta=0.3)
    assert gate.attainable == 0.0
    assert not gate.is_open


def test_too_little_evidence_keeps_nothing():
    gate = calibrate(np.linspace(0, 1, 15), np.ones(15), risk="failure", delta=0.1)
    assert not gate.is_open
    assert not gate.keeps(1.0)
    scores = np.random.default_rng(0).random(500)
    assert not calibrate(scores, np.zeros(500), risk="failure", delta=0.1).is_open


def test_a_minimum_coverage_closes_a_gate_that_keeps_too_little():
    scores = np.random.default_rng(0).random(1000)
    weak = (scores >= 0.9).astype(float)
    assert calibrate(scores, weak, risk="failure", delta=0.1).is_open
    assert not calibrate(scores, weak, risk="failure", delta=0.1, min_coverage=0.5).is_open


def test_mistakes_are_named_and_nan_is_never_kept():
    with pytest.raises(ConfigError, match="NaN"):
        calibrate(np.array([0.1, math.nan]), np.zeros(2), risk="failure")
    with pytest.raises(ConfigError, match="equal lists"):
        calibrate(np.zeros(3), np.zeros(2), risk="failure")
    with pytest.raises(ConfigError, match="delta"):
        calibrate(np.zeros(3), np.zeros(3), risk="failure", delta=0.0)
    with pytest.raises(ConfigError, match="strong model"):
        calibrate(np.zeros(3), np.zeros(3), risk="net")
    with pytest.raises(ConfigError, match="unknown"):
        calibrate(np.zeros(3), np.zeros(3), np.zeros(3), risk="all")
    with pytest.raises(ConfigError, match="outside"):
        calibrate(np.zeros(3), np.full(3, 2.0), np.zeros(3))
    gate = calibrate(np.random.default_rng(0).random(200), np.ones(200), risk="failure", delta=0.1)
    assert gate.is_open
    assert not gate.keeps(math.nan)


def _pool(rng, n, k=2):
    """Cheap models at prices 1 and 2 under a strong one; scores are the true differences."""
    scores = rng.uniform(-0.4, 0.2, size=(n, k))
    weak = (rng.random((n, k)) < 0.6 + scores).astype(float)
    strong = (rng.random(n) < 0.6).astype(float)
    return HeldOut(("a", "b")[:k], scores, weak, strong, np.tile([1.0, 2.0][:k], (n, 1)))


def _routed(held, threshold):
    """Brute force: which model answers each prompt, −1 the strong one."""
    found = []
    for row, costs in zip(held.scores, held.costs, strict=True):
        kept = [j for j in range(len(row)) if row[j] >= threshold]
        found.append(min(kept, key=lambda j: (costs[j], -row[j])) if kept else -1)
    return np.array(found)


@pytest.mark.parametrize("risk", ["net", "regret", "failure"])
def test_several_models_promise_together_what_the_router_then_does(risk):
    delta = {"net": 0.02, "regret": 0.1, "failure": 0.5}[risk]
    rng, broken, opened = np.random.default_rng(0), 0, 0
    big = _pool(np.random.default_rng(99), 6000)
    for _ in range(60):
        gates = calibrate_pool(_pool(rng, 700), against="big", risk=risk, delta=delta)
        assert gates["a"].threshold == gates["b"].threshold
        if not gates["a"].is_open:
            continue
        opened += 1
        who = _routed(big, gates["a"].threshold)
        at = np.flatnonzero(who >= 0)
        difference = -big.scores[at, who[at]]
        lost = 0.6 * (0.4 + difference) if risk == "regret" else difference
        mean = (0.4 + difference).mean() if risk == "failure" else lost.sum() / len(who)
        broken += mean > delta
    assert opened > 20
    assert broken / 60 <= 0.10 + 2 * math.sqrt(0.1 * 0.9 / 60)


def test_a_pool_counts_what_each_model_keeps_and_versions_name_the_data():
    held = _pool(np.random.default_rng(0), 900)
    gates = calibrate_pool(held, against="big", delta=0.05)
    who = _routed(held, gates["a"].threshold)
    assert [gates[n].kept for n in "ab"] == [(who == j).sum() for j in (0, 1)]
    assert (gates["a"].model, gates["a"].against) == ("a", "big")
    loss = np.where(who == 0, held.strong - held.weak[:, 0], held.strong - held.weak[:, 1])
    assert gates["a"].observed == pytest.approx(np.where(who >= 0, loss, 0).mean())
    assert sum(g.coverage for g in gates.values()) <= gates["a"].attainable + 0.01
    again = calibrate_pool(held, against="big", delta=0.05)
    assert gates["a"].version == again["a"].version
    held.weak[0, 0] = 1 - held.weak[0, 0]
    assert calibrate_pool(held, delta=0.05)["a"].version != gates["a"].version
    for gate in (*gates.values(), calibrate(np.zeros(3), np.ones(3), risk="failure")):
        assert Gate.from_dict(gate.to_dict()) == gate


def test_a_pool_of_one_is_a_gate_and_minus_infinity_is_never_kept():
    held = _pool(np.random.default_rng(3), 800, k=1)
    alone = calibrate(held.scores[:, 0], held.weak[:, 0], held.strong, delta=0.03)
    pooled = calibrate_pool(held, delta=0.03)["a"]
    assert (pooled.threshold, pooled.kept) == (alone.threshold, alone.kept)
    assert pooled.attainable == pytest.approx(alone.attainable, abs=0.01)
    held.scores[:] = -np.inf
    assert not calibrate_pool(held, delta=0.03)["a"].is_open
    with pytest.raises(ConfigError, match="shapes"):
        HeldOut(("a",), np.zeros((3, 2)), np.zeros((3, 1)), np.zeros(3), np.zeros((3, 1)))
