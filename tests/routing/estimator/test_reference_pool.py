"""Reference pool: cross-fitting on both sides, unbiased control variate, missing cells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.routing.worlds import make_world
from tfgrpo.errors import ConfigError
from tfgrpo.routing.estimator.reference_pool import ReferencePool, _cross_fit, _features, _folds


def _fit(world, table=None):
    table = table or world.table
    return ReferencePool.fit(table, world.vectors, embedder_id=world.embedder.embedder_id)


def test_a_prompts_score_does_not_depend_on_its_own_outcome():
    world = make_world(120, 4)
    X, rates = world.vectors.astype(float), world.table.rates
    fold, known = _folds(world.table.keys, 5, 0), np.ones_like(rates, dtype=bool)
    ((before, *_),) = _cross_fit(X, rates, known, fold, [3.0])
    flipped = rates.copy()
    flipped[7] = 1 - flipped[7]
    ((after, *_),) = _cross_fit(X, flipped, known, fold, [3.0])
    np.testing.assert_allclose(before[7], after[7], atol=1e-10)
    assert np.abs(before - after).max() > 1e-4


def test_a_known_prompt_gets_its_left_out_score_and_a_new_one_the_mean_of_the_folds():
    world = make_world(120, 4)
    pool = _fit(world)
    known, _ = pool.scores_of(world.vectors[:5], world.table.keys[:5])
    new, shared = pool.scores_of(world.vectors[:5], ["never seen"] * 5)
    np.testing.assert_allclose(known, pool.scores[:5])
    np.testing.assert_allclose(new, world.vectors[:5] @ pool.coefficients + pool.intercepts)
    assert np.all(shared == 0.0)
    assert np.abs(known - new).max() > 1e-3


def test_left_out_scores_err_as_much_as_scores_of_new_prompts():
    """The trap: in-sample scores for the context, out-of-sample ones for the queries."""
    world = make_world(500, 6, seed=2, width=256)
    train, test = np.arange(300), np.arange(300, 500)
    pool = ReferencePool.fit(
        world.table.take(train), world.vectors[train], embedder_id=world.embedder.embedder_id
    )
    X = world.vectors[train].astype(float)
    y = world.table.rates[train]
    centre = X.mean(0)
    gram = (X - centre).T @ (X - centre) + 1.0 * np.eye(X.shape[1])
    w = np.linalg.solve(gram, (X - centre).T @ (y - y.mean(0)))
    in_sample = (X - centre) @ w + y.mean(0)
    crossed = pool.scores
    truth = world.table.rates[train]
    assert np.mean((in_sample - truth) ** 2) < 0.9 * np.mean((crossed - truth) ** 2)
    fresh = pool.scores_of(world.vectors[test])[0]
    honest = np.mean((crossed - truth) ** 2)
    out = np.mean((fresh - world.table.rates[test]) ** 2)
    assert honest == pytest.approx(out, rel=0.12)


def test_the_control_variate_is_orthogonal_to_the_features():
    pool = _fit(make_world(300, 8))
    c = pool.own_covariates()
    moments = _features(c.base, c.axes).T @ c.shared / len(c.shared)
    np.testing.assert_allclose(moments, 0.0, atol=1e-6)
    assert 0.3 <= pool.priors.dispersion <= 1.0


def test_leaving_models_out_equals_fitting_without_them():
    world = make_world(150, 6)
    whole = _fit(world)
    without = whole.without(families=["f0"])
    direct = _fit(world, world.table.of_models([2, 3, 4, 5]))
    assert without.model_names == direct.model_names
    if whole.penalty == direct.penalty:
        np.testing.assert_allclose(without.scores, direct.scores, atol=1e-9)
        np.testing.assert_allclose(without.priors.weights, direct.priors.weights, atol=1e-6)


def test_missing_cells_are_not_failures():
    world = make_world(200, 4)
    trials = world.table.trials.copy()
    trials[:100, 0] = 0
    successes = np.where(trials > 0, world.table.successes, 0.0)
    pool = _fit(world, replace(world.table, trials=trials, successes=successes))
    assert np.isnan(pool.residuals[:100, 0]).all()
    level = world.table.rates[100:, 0].mean()
    assert pool.scores[:, 0].mean() == pytest.approx(level, abs=0.1)


def test_too_little_to_fit_is_an_error_with_a_way_out():
    world = make_world(8, 2)
    with pytest.raises(ConfigError, match="at least 10 prompts"):
        _fit(world)
    trials = make_world(50, 2).table.trials.copy()
    trials[5:, 1] = 0
    table = replace(make_world(50, 2).table, trials=trials)
    with pytest.raises(ConfigError, match="m1"):
        _fit(make_world(50, 2), table)


def test_an_empty_pool_says_nothing():
    pool = ReferencePool.empty("hashed", 16)
    c = pool.covariates(np.ones((3, 16)))
    assert np.all(c.base == 0)
    assert c.axes.shape == (3, 0)
    assert pool.without(names=["x"]).size == 0
