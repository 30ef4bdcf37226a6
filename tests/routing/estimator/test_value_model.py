"""The estimator: invariances, edge contexts, blending, negative controls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.routing.worlds import make_world, outcomes
from tfgrpo.errors import ConfigError
from tfgrpo.routing.backtest.backtest import identity, leaked, replay
from tfgrpo.routing.backtest.metrics import area, brier
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import LAYERS, ValueModel, mixture_weights
from tfgrpo.routing.records import SuccessCount
from tfgrpo.runtime.embedders import HashedNgrams


def _parts(seed=0, n=450):
    world = make_world(n, 8, seed=seed)
    train, test = np.arange(n * 2 // 3), np.arange(n * 2 // 3, n)
    pool = ReferencePool.fit(
        world.table.take(train), world.vectors[train], embedder_id=world.embedder.embedder_id
    ).without(families=["f0"])
    return world, pool, train, test


def _state(world, pool, rows, j=0, layers=LAYERS, successes=None):
    successes = world.table.successes if successes is None else successes
    return ValueModel(world.embedder, pool, layers=layers).state_of_counts(
        world.vectors[rows],
        successes[rows, j],
        world.table.trials[rows, j],
        keys=[world.table.keys[i] for i in rows],
    )


def test_the_order_of_the_context_changes_nothing_at_all():
    model = ValueModel(HashedNgrams(64))
    rows = outcomes(60)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(60)]
    asked = ["compute the integral of the function case 99", "a word"]
    a, b = model.state(rows).predict(asked), model.state(shuffled).predict(asked)
    assert np.array_equal(a.mean, b.mean)
    assert np.array_equal(a.low, b.low)
    assert a.weights == b.weights


def test_counts_equal_repeated_single_trials():
    model = ValueModel(HashedNgrams(64))
    counted = [SuccessCount(f"task {i}", "m", float(i % 3), 4.0) for i in range(30)]
    bits = [SuccessCount(f"task {i}", "m", float(t < i % 3)) for i in range(30) for t in range(4)]
    a, b = model.state(counted).predict(["task 3"]), model.state(bits).predict(["task 3"])
    assert a.mean[0] == pytest.approx(b.mean[0], abs=1e-12)


def test_an_empty_context_gives_a_wide_prior_and_says_so():
    e = ValueModel(HashedNgrams(64)).state([], model="new").predict(["anything"])
    assert e.coverage == ("empty",)
    assert e.mean[0] == pytest.approx(0.5, abs=0.01)
    assert e.high[0] - e.low[0] > 0.8
    assert e.effective_n[0] < 4


@pytest.mark.parametrize("success", [0.0, 1.0])
@pytest.mark.parametrize("n", [1, 5, 40])
def test_a_context_of_one_class_is_smoothed_and_flagged(success, n):
    rows = [SuccessCount(f"task number {i}", "m", success) for i in range(n)]
    e = ValueModel(HashedNgrams(64)).state(rows).predict(["task number 3", "task number 77"])
    assert np.all((e.mean > 0.005) & (e.mean < 0.995))
    assert set(e.coverage) <= {"thin", "far"}
    assert np.all(e.high - e.low > 0.4 / (n + 1))


def test_more_evidence_narrows_the_interval_and_raises_the_effective_count():
    model = ValueModel(HashedNgrams(64))
    few = model.state(outcomes(16, rate=0.6)).predict(["compute the integral of the function"])
    many = model.state(outcomes(400, rate=0.6)).predict(["compute the integral of the function"])
    assert many.high[0] - many.low[0] < few.high[0] - few.low[0]
    assert many.effective_n[0] > few.effective_n[0]


def test_the_interval_holds_the_mean_and_widens_with_its_level():
    state = ValueModel(HashedNgrams(64)).state(outcomes(64))
    narrow = state.predict(["prove the theorem"], level=0.5)
    wide = state.predict(["prove the theorem"], level=0.99)
    for e in (narrow, wide):
        assert e.low[0] <= e.mean[0] <= e.high[0]
    assert wide.low[0] < narrow.low[0]
    assert wide.high[0] > narrow.high[0]


def test_the_interval_covers_the_true_chance_about_as_often_as_it_says():
    inside = []
    for seed in range(3):
        world, pool, train, test = _parts(seed)
        rows = np.random.default_rng(seed).permutation(train)[:150]
        e = _state(world, pool, rows).predict_vectors(world.vectors[test], level=0.9)
        topic_chance = world.chance[test, 0]
        inside.append(np.mean((topic_chance >= e.low) & (topic_chance <= e.high)))
    # The chance holds a noise a prompt that no text tells, so coverage falls short of 0.9.
    assert 0.6 < np.mean(inside) <= 1.0


def test_a_strange_prompt_is_far():
    state = ValueModel(HashedNgrams(256)).state(outcomes(200))
    e = state.predict(["compute the integral of the function case 5", "zzz qqq xxyyw 0x1f 漢字"])
    assert e.coverage[0] == "covered"
    assert e.coverage[1] == "far"


def test_old_outcomes_fade():
    old = [SuccessCount(f"task {i}", "m", 0.0, at=0.0) for i in range(30)]
    new = [SuccessCount(f"job {i}", "m", 1.0, at=100.0) for i in range(30)]
    model = ValueModel(HashedNgrams(64))
    fresh = model.state(old + new, half_life=5.0).predict(["task 3"]).mean[0]
    stale = model.state(old + new).predict(["task 3"]).mean[0]
    assert fresh > stale + 0.2


def test_mistakes_of_the_caller_are_named():
    embedder = HashedNgrams(64)
    with pytest.raises(ConfigError, match="unknown"):
        ValueModel(embedder, layers=["deep"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="fitted on vectors of"):
        ValueModel(embedder, ReferencePool.empty("other", 64))
    model = ValueModel(embedder)
    with pytest.raises(ConfigError, match="one state is one model"):
        model.state([*outcomes(3, model="a"), *outcomes(3, model="b")])
    with pytest.raises(ConfigError, match="half_life"):
        model.state(outcomes(3), half_life=0.0)
    state = model.state(outcomes(9))
    with pytest.raises(ConfigError, match="interval level"):
        state.predict(["x"], level=1.5)
    with pytest.raises(ConfigError, match="expected"):
        state.predict_vectors(np.zeros((1, 3)))


def test_mixture_weights_are_the_maximum_over_a_grid():
    rng = np.random.default_rng(0)
    y = (rng.random(80) < 0.6).astype(float)
    p = np.stack(
        [np.full(80, 0.6), np.clip(y * 0.4 + 0.3 + 0.1 * rng.standard_normal(80), 0.05, 0.95)]
    )
    prior = np.array([2.0, 1.0])

    def objective(w):
        mixed = w * p[0] + (1 - w) * p[1]
        fit = np.sum(y * np.log(mixed) + (1 - y) * np.log(1 - mixed))
        return fit + 2.0 * np.log(w) + np.log(1 - w)

    grid = np.linspace(0.001, 0.999, 4000)
    best = grid[np.argmax([objective(w) for w in grid])]
    found = mixture_weights(p, y, np.ones(80), prior)
    assert found[0] == pytest.approx(best, abs=5e-4)
    assert found.sum() == pytest.approx(1.0)


def test_a_layer_that_is_wrong_gets_little_weight():
    rng = np.random.default_rng(1)
    y = (rng.random(500) < 0.7).astype(float)
    p = np.stack([np.full(500, 0.7), np.where(y > 0, 0.2, 0.8)])
    weights = mixture_weights(p, y, np.ones(500), np.array([1.0, 1.0]))
    assert weights[1] < 0.01


def test_reference_models_help_a_new_model_with_few_labels():
    gains = []
    for seed in range(3):
        world, pool, train, test = _parts(seed)
        rows = np.random.default_rng(seed).permutation(train)[:16]
        rates = world.table.rates[test, 0]
        with_pool = _state(world, pool, rows).predict_vectors(world.vectors[test])
        alone = ValueModel(world.embedder).state_of_counts(
            world.vectors[rows], world.table.successes[rows, 0], world.table.trials[rows, 0]
        )
        own = alone.predict_vectors(world.vectors[test])
        gains.append(brier(own.mean, rates) - brier(with_pool.mean, rates))
    assert np.mean(gains) > 0.005


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_stands_alone(layer):
    world, pool, train, test = _parts()
    e = _state(world, pool, train[:150], layers=[layer]).predict_vectors(world.vectors[test])
    assert list(e.weights) == [layer]
    assert np.isfinite(e.mean).all()
    assert brier(e.mean, world.table.rates[test, 0]) < 0.26


def test_control_shuffled_labels_leave_nothing_to_predict():
    world, _, train, test = _parts(0)
    rates = world.table.rates[test, 0]
    areas, excess = [], []
    for seed in range(16):
        rng = np.random.default_rng(1000 + seed)
        rows = rng.permutation(train)[:80]
        shuffled = world.table.successes.copy()
        shuffled[rows, 0] = rng.permutation(shuffled[rows, 0])
        e = _state(world, None, rows, successes=shuffled).predict_vectors(world.vectors[test])
        areas.append(area(e.mean, rates))
        blind = np.full(len(rates), shuffled[rows, 0].mean())
        excess.append(brier(e.mean, rates) - brier(blind, rates))
    assert abs(np.mean(areas) - 0.5) < 0.11
    assert np.mean(excess) < 0.02


def test_control_shuffled_prompts_leave_nothing_to_predict():
    areas, honest = [], []
    for seed in range(3):
        world, pool, train, test = _parts(seed)
        rng = np.random.default_rng(seed)
        rows = rng.permutation(train)[:120]
        asked = world.vectors[rng.permutation(test)]
        state = _state(world, pool, rows)
        rates = world.table.rates[test, 0]
        areas.append(area(state.predict_vectors(asked).mean, rates))
        honest.append(area(state.predict_vectors(world.vectors[test]).mean, rates))
    assert abs(np.mean(areas) - 0.5) < 0.1
    assert np.mean(honest) > 0.7


def test_control_leaked_prompts_are_found_and_refused():
    assert leaked(["Add  1 and 1"], ["add 1 AND 1", "add 2"]) == [0]
    assert identity(" A\n b ") == "a b"
    world = make_world(60, 4)
    split = np.array([0] * 40 + [9] * 20)
    prompts = list(world.table.prompts)
    prompts[50] = prompts[3].upper()
    table = replace(world.table, prompts=tuple(prompts))
    with pytest.raises(ConfigError, match="1 test prompts also stand in train"):
        replay(table, world.vectors, world.embedder, split)


def test_replay_prints_the_prompt_blind_row_and_beats_it():
    world = make_world(500, 6, seed=3)
    split = np.arange(500) % 10
    result = replay(world.table, world.vectors, world.embedder, split, sizes=(16, 64), draws=1)
    methods = {r.method for r in result.rows}
    assert {"mean", "domain", "full", "beta_knn20", "ridge", "2pl", "mf"} <= methods
    assert result.row("mean", 64).auc == pytest.approx(0.5)
    assert result.row("full", 64).brier < result.row("mean", 64).brier - 0.01
    assert result.labels_to_match("full", result.row("mean", 64).brier) == 16
    assert result.labels_to_match("full", 0.0) is None
    with pytest.raises(ConfigError, match="no row"):
        result.row("full", 999)
