"""Layers of a model's own labels: ridge against scikit-learn and refits, near labels by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.routing.worlds import make_world
from tfgrpo.routing import SuccessCount, fit
from tfgrpo.routing.backtest.baselines import RIVALS
from tfgrpo.routing.estimator.layers import Evidence, Query
from tfgrpo.routing.estimator.own_layers import NEIGHBOURS, Near, Ridge, weighted_rates
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.ridge import fit_ridge
from tfgrpo.routing.estimator.value_model import LAYERS, ValueModel


def rows(n, width, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, width))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    return X, (rng.random(n) < 1 / (1 + np.exp(-4 * X[:, 0]))).astype(float)


@pytest.mark.parametrize("shape", [(60, 12), (20, 50)])
@pytest.mark.parametrize("penalty", [0.3, 10.0])
def test_ridge_is_scikit_learns_and_its_left_out_rows_are_those_of_refits(shape, penalty):
    linear_model = pytest.importorskip("sklearn.linear_model")
    X, y = rows(*shape)
    fitted = fit_ridge(X, y, [penalty])
    peer = linear_model.Ridge(alpha=penalty).fit(X, y)
    np.testing.assert_allclose(fitted.slope, peer.coef_, atol=1e-8)
    assert fitted.intercept == pytest.approx(peer.intercept_)
    for i in range(0, len(X), 7):
        others = np.delete(np.arange(len(X)), i)
        again = linear_model.Ridge(alpha=penalty).fit(X[others], y[others])
        assert fitted.left_out[i] == pytest.approx(again.predict(X[[i]])[0], abs=1e-6)


def test_the_penalty_with_the_least_left_out_error_is_taken():
    X, y = rows(80, 10)
    losses = {p: fit_ridge(X, y, [p]).loss for p in (0.1, 1.0, 10.0, 1000.0)}
    assert fit_ridge(X, y, list(losses)).loss == min(losses.values())


def seen_by(X, y):
    pool = ReferencePool.empty("test", X.shape[1])
    return Evidence(pool, X, y, np.ones(len(y)), pool.covariates(X), 1024), pool


def test_near_labels_are_weighted_by_a_power_of_the_cosine_and_leave_themselves_out():
    X, y = rows(120, 6)
    seen, pool = seen_by(X, y)
    near = Near(seen)
    asked, _ = rows(5, 6, seed=1)
    for i, q in enumerate(asked):
        cosines = X @ q
        order = np.argsort(-cosines)[:NEIGHBOURS]
        w = np.maximum(cosines[order], 0) ** near.power
        by_hand = (w @ y[order] + near.strength * near.level) / (w.sum() + near.strength)
        got = near.predict(Query(asked, pool.covariates(asked))).mean[i]
        assert 1 / (1 + np.exp(-got)) == pytest.approx(np.clip(by_hand, 0.02, 0.98), abs=1e-4)
    cosines = X @ X[3]
    cosines[3] = -np.inf
    order = np.argsort(-cosines)[:NEIGHBOURS]
    w = np.maximum(cosines[order], 0) ** near.power
    by_hand = (w @ y[order] + near.strength * near.level) / (w.sum() + near.strength)
    assert 1 / (1 + np.exp(-near.left_out.mean[3])) == pytest.approx(by_hand, abs=1e-4)
    assert weighted_rates(np.array([[1.0, -1.0]]), np.array([[1.0, 0.0]]), 0.5, 1.0, 0.0)[0] == 1


def test_both_are_rivals_in_the_backtest():
    assert {"ridge", "weighted_knn50"} <= set(RIVALS)


def test_a_member_of_the_reference_pool_speaks_by_its_own_labels_too():
    """The others' outcomes say nothing of what `odd` can do; its own ridge layer does."""
    told = []
    for i in range(240):
        kind = ("prove the deep theorem", "translate the short word")[i % 2]
        text = f"{kind} number {i}"
        for name in ("a", "b", "c"):
            told.append(SuccessCount(text, name, float(i % 3 > 0)))
        told.append(SuccessCount(text, "odd", float(i % 2 == 0)))
    router = fit(told)
    assert "odd" in router.value.pool.model_names
    means = {}
    for kind in ("prove the deep theorem", "translate the short word"):
        candidates = {c.model: c for c in router.candidates(f"{kind} number 9000")}
        means[kind] = candidates["odd"].mean
        assert candidates["odd"].weights["ridge"] > 0
    assert means["prove the deep theorem"] > 0.9
    assert means["translate the short word"] < 0.1


def test_a_ridge_layer_keeps_probabilities_inside():
    X, y = rows(200, 8)
    seen, pool = seen_by(X, y)
    layer = Ridge(seen)
    p = layer.predict(Query(5 * X, pool.covariates(X))).mean
    assert np.all(np.abs(p) <= np.log(0.98 / 0.02) + 1e-9)


def test_own_layers_wait_for_enough_labels_and_the_level_answers_where_nothing_else_can():
    world = make_world(300, 4)
    whole = ReferencePool.fit(
        world.table.of_models([1, 2, 3]), world.vectors, embedder_id=world.embedder.embedder_id
    )

    def state(n, pool, layers=LAYERS):
        rows = np.arange(n)
        return ValueModel(world.embedder, pool, layers=layers).state_of_counts(
            world.vectors[rows], world.table.successes[rows, 0], world.table.trials[rows, 0],
            keys=[world.table.keys[i] for i in rows],
        )  # fmt: skip

    for n, pool, has in (
        (127, whole, False),
        (128, whole, True),
        (15, None, False),
        (16, None, True),
    ):
        assert ({"ridge", "near"} <= set(state(n, pool).weights)) == has
    alone = state(5, None, layers=("ridge",))
    assert alone.weights == {"level": 1.0}
    mean = alone.predict_vectors(world.vectors[:3]).mean
    assert np.ptp(mean) == 0 and 0 < mean[0] < 1
