"""Rollout budgets: contracts of every rule, optimality, never worse than uniform, shrinkage."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.routing.worlds import group, outcomes, tasks
from tfgrpo.errors import ConfigError
from tfgrpo.routing.budgets.posterior_gain import (
    GRID,
    PosteriorGain,
    PredictionError,
    Uniform,
    mixed_share,
    pool_weights,
    state_predictor,
    uniform,
)
from tfgrpo.routing.budgets.published import Dars, RolloutGdro, Sgpo, Vade, Xrpo
from tfgrpo.routing.estimator.laplace import Gaussian, logit
from tfgrpo.routing.estimator.value_model import Estimates, ValueModel
from tfgrpo.runtime.embedders import HashedNgrams

RULES = {
    "uniform": Uniform(),
    "posterior": PosteriorGain(),
    "unguarded": PosteriorGain(guard=False),
    "sgpo": Sgpo(),
    "vade": Vade(group_size=4),
    "xrpo": Xrpo(),
    "dars": Dars(),
    "dars_hard": Dars(schedule="hard"),
    "gdro": RolloutGdro(),
}


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=25)
@given(
    counts=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), max_size=9),
    extra=st.integers(0, 4),
    budget=st.integers(0, 120),
)
def test_every_rule_keeps_the_contract(name, counts, extra, budget):
    history = [group(f"t{i}", min(k, n), n) for i, (k, n) in enumerate(counts)]
    asked = tasks(len(counts) + extra)
    first = RULES[name](asked, history, budget)
    assert len(first) == len(asked)
    assert all(isinstance(c, int) and c >= 0 for c in first)
    assert sum(first) <= budget
    assert RULES[name](asked, history, budget) == first


@pytest.mark.parametrize("name", RULES)
def test_a_budget_that_is_none_is_refused(name):
    for bad in (-1, 2.5, True):
        with pytest.raises(ConfigError, match="budget"):
            RULES[name](tasks(2), [], bad)


def test_greedy_is_the_best_of_all_allocations():
    rng = np.random.default_rng(0)
    rule = PosteriorGain(floor=2, cap=7, guard=False)
    sizes = np.arange(8)
    for _ in range(5):
        weights = rng.dirichlet(np.full(len(GRID), 0.2), size=4)
        useful = np.array([[w @ mixed_share(GRID, int(n)) for n in sizes] for w in weights])
        best = max(
            sum(useful[i, c] for i, c in enumerate(choice))
            for choice in itertools.product(range(2, 8), repeat=4)
            if sum(choice) == 16
        )
        got = rule.from_posterior(weights, 16)
        assert sum(got) == 16
        assert sum(useful[i, c] for i, c in enumerate(got)) == pytest.approx(best)


def _noisy(p, sd, rng):
    mean = np.clip(p + sd * rng.standard_normal(len(p)), 0, 1)
    zero = np.zeros_like(mean)
    flat = Gaussian(logit(mean), zero + 1)
    return Estimates(mean, zero, zero + 1, 0.9, zero, ("covered",) * len(p), {}, flat)


@pytest.mark.parametrize("sd", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("shape", [(0.3, 0.3), (1.0, 1.0), (0.5, 2.0)])
def test_the_guarded_posterior_is_never_worse_than_uniform_by_half_a_percent(sd, shape):
    rng = np.random.default_rng(0)
    for g in (4, 8):
        p = rng.beta(*shape, size=400)
        other = rng.binomial(10, rng.beta(*shape, size=400)).astype(float)
        rule = PosteriorGain(error=PredictionError(sd=sd))
        nothing = np.zeros(400)
        weights = rule.posterior(
            pool_weights(other, np.full(400, 10.0)), nothing, nothing, _noisy(p, sd, rng)
        )
        counts = np.array(rule.from_posterior(weights, g * 400))
        even = mixed_share(p, np.array(uniform(400, g * 400))).mean()
        assert mixed_share(p, counts).mean() / even - 1 >= -0.005


def test_knowing_the_rates_gains_and_trusting_noise_loses():
    rng = np.random.default_rng(1)
    p = rng.beta(0.4, 0.4, size=500)
    nothing, flat = np.zeros(500), np.full(len(GRID), 1 / len(GRID))
    sharp = PosteriorGain(error=PredictionError(sd=0.012), guard=False)
    even = mixed_share(p, np.array(uniform(500, 4000))).mean()

    def gain(estimates):
        counts = sharp.from_posterior(sharp.posterior(flat, nothing, nothing, estimates), 4000)
        return mixed_share(p, np.array(counts)).mean() / even - 1

    assert gain(_noisy(p, 0.0, rng)) > 0.05
    assert gain(_noisy(p, 0.3, rng)) < 0.0


def test_an_uninformed_rule_deals_evenly():
    assert PosteriorGain()(tasks(5), [], 23) == [5, 5, 5, 4, 4]
    assert PosteriorGain(cap=3)(tasks(2), [], 100) == [3, 3]
    assert uniform(3, 2) == [1, 1, 0]


def test_seen_outcomes_move_rollouts_to_the_uncertain_tasks():
    history = [group("t0", 4, 8), group("t1", 8, 8), group("t2", 8, 8), group("t3", 2, 8)]
    history += [group(f"x{i}", 8 if i % 2 else 0, 8) for i in range(40)]
    counts = PosteriorGain(guard=False, max_seen=8)(tasks(4), history, 40)
    assert counts[3] > counts[0]
    assert min(counts) >= 2


def test_the_pool_of_rates_is_found_behind_the_counts():
    rng = np.random.default_rng(0)
    p = np.where(rng.random(4000) < 0.5, 0.1, 0.8)
    weights = pool_weights(rng.binomial(10, p).astype(float), np.full(4000, 10.0), rounds=300)
    low, high = np.abs(GRID - 0.1) < 0.09, np.abs(GRID - 0.8) < 0.09
    assert weights[low].sum() == pytest.approx(0.5, abs=0.06)
    assert weights[high].sum() == pytest.approx(0.5, abs=0.06)
    np.testing.assert_allclose(pool_weights(np.zeros(0), np.zeros(0)), 1 / len(GRID))


def test_the_error_of_a_blind_predictor_says_nothing():
    model = ValueModel(HashedNgrams(64))
    thin = PredictionError.of_state(model.state(outcomes(8)))
    assert thin.slope == 0.0
    state = model.state([*outcomes(60)])
    assert 0.0 <= PredictionError.of_state(state).slope <= 1.0
    rule = PosteriorGain(
        predict=state_predictor(state.predict), error=PredictionError.of_state(state)
    )
    counts = rule(tasks(6), [], 48)
    assert sum(counts) == 48
