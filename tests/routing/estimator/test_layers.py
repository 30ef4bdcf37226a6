"""The experts: what the rows beyond a process on part of a large context add to it."""

from __future__ import annotations

import numpy as np

from tests.routing.worlds import make_world
from tfgrpo.routing.backtest.metrics import brier
from tfgrpo.routing.estimator.laplace import Gaussian
from tfgrpo.routing.estimator.layers import NearResidual
from tfgrpo.routing.estimator.value_model import ValueModel


def test_the_rows_beyond_the_process_never_hurt_it():
    world = make_world(900, 2, seed=4)
    train, test = np.arange(700), np.arange(700, 900)
    rates = world.table.rates[test, 0]
    chosen = np.sort(np.random.default_rng(0).permutation(700)[:100])
    losses = {}
    for rows, limit in ((train[chosen], 100), (train, 100), (train, 700)):
        model = ValueModel(world.embedder, layers=["local"], local_rows=limit)
        state = model.state_of_counts(
            world.vectors[rows], world.table.successes[rows, 0], world.table.trials[rows, 0]
        )
        assert len(state.left_out()) == len(rows)
        p = state.predict_vectors(world.vectors[test]).mean
        losses[len(rows), limit] = brier(p, rates)
    # The subset alone, then the same subset with the other 600 rows as neighbours.
    assert losses[700, 100] <= losses[100, 100] + 1e-3
    assert losses[700, 700] < losses[100, 100]


def test_neighbours_correct_what_a_process_misses():
    rng = np.random.default_rng(0)
    vectors = np.repeat(np.eye(8), 100, axis=0) + 0.01 * rng.standard_normal((800, 8))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    truth = np.repeat(np.linspace(0.1, 0.9, 8), 100)
    rate = (rng.random(800) < truth).astype(float)
    flat = Gaussian(np.zeros(8), np.zeros(8))
    corrected = NearResidual(vectors, rate - 0.5).correct(flat, np.eye(8))
    assert brier(corrected.probability, np.linspace(0.1, 0.9, 8)) < 0.03
    assert brier(flat.probability, np.linspace(0.1, 0.9, 8)) > 0.06
    blind = NearResidual(vectors, rng.permutation(rate) - 0.5).correct(flat, np.eye(8))
    assert np.abs(blind.probability - 0.5).max() < 0.15
