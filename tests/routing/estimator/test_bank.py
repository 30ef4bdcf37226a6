"""Stacked states answer as each state does; one more outcome without a refit is a bordered fit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.routing.worlds import make_world
from tfgrpo.routing.estimator.bank import Bank, Scores
from tfgrpo.routing.estimator.compact import compact, with_outcome
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import LAYERS, ValueModel


def _bank(sizes, *, pooled=True, layers=LAYERS, local_rows=1024, n=600):
    """States of some models of a world on some of its prompts, and their bank."""
    world = make_world(n, 6)
    empty = ReferencePool.empty(world.embedder.embedder_id, world.embedder.width)
    whole = empty
    if pooled:
        train = np.arange(n // 2)
        whole = ReferencePool.fit(
            world.table.take(train), world.vectors[train], embedder_id=world.embedder.embedder_id
        )
    scores = Scores(whole.coefficients.astype(np.float32), whole.intercepts.astype(np.float32), 64)
    states, small = [], []
    for j, size in enumerate(sizes):
        rows = np.sort(np.random.default_rng(j).permutation(n)[:size])
        members = np.array([i for i in range(whole.size) if i != j], np.int32)
        pool = whole.of_models(members) if pooled else empty
        value = ValueModel(world.embedder, pool, layers=layers, local_rows=local_rows)
        state = value.state_of_counts(
            world.vectors[rows], world.table.successes[rows, j], world.table.trials[rows, j],
            keys=[world.table.keys[i] for i in rows],
        )  # fmt: skip
        states.append(state)
        small.append(compact(state, rows, members, -1.0))
    return world, states, small, Bank(small, world.vectors, scores)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("layer", [None, *LAYERS])
def test_a_bank_answers_as_its_states_do(pooled, layer):
    if not pooled and layer in ("difficulty", "axes"):
        pytest.skip("a layer of the pool")
    layers = LAYERS if layer is None else (layer,)
    world, states, _, bank = _bank((200, 40, 17, 90), pooled=pooled, layers=layers)
    for i in range(500, 540):
        got = bank.ask(world.vectors[i])
        for m, state in enumerate(states):
            e = state.predict_vectors(world.vectors[i : i + 1])
            assert got.mean[m] == pytest.approx(e.mean[0], abs=2e-3)
            assert got.low[m] == pytest.approx(e.low[0], abs=3e-3)
            assert got.high[m] == pytest.approx(e.high[0], abs=3e-3)
            assert got.effective_n[m] == pytest.approx(e.effective_n[0], rel=0.03, abs=0.05)


def test_large_contexts_keep_their_answers_and_their_spread():
    world, states, small, bank = _bank((500, 450), local_rows=400)
    assert small[0]["local_F"].shape == (400, 128)
    for i in range(560, 600):
        got = bank.ask(world.vectors[i])
        for m, state in enumerate(states):
            e = state.predict_vectors(world.vectors[i : i + 1])
            assert got.mean[m] == pytest.approx(e.mean[0], abs=5e-3)
            assert got.logits.variance[m] == pytest.approx(e.logits.variance[0], rel=0.08)


@pytest.mark.parametrize("pooled", [True, False])
def test_a_model_without_outcomes_stands_beside_others(pooled):
    world, states, _, bank = _bank((60, 0), pooled=pooled)
    got = bank.ask(world.vectors[500])
    assert got.coverage[1] == "empty"
    e = states[1].predict_vectors(world.vectors[500:501])
    assert got.mean[1] == pytest.approx(e.mean[0], abs=1e-3)


@pytest.mark.parametrize("layer", ["level", "difficulty", "axes", "local"])
def test_one_more_outcome_is_close_to_a_refit(layer):
    world, states, small, bank = _bank((150,), layers=(layer,))
    row, trials = 580, 4.0
    new = bank.outcome(0, row, 4.0, trials)
    quick = Bank([with_outcome(small[0], new)], world.vectors, bank._scores)
    rows = np.append(small[0]["rows"], row)
    members = small[0]["members"]
    old = states[0]
    refit = old.owner.state_of_counts(
        world.vectors[rows], np.append(old.counts, 4.0), np.append(old.trials, trials),
        keys=[world.table.keys[i] for i in rows],
    )  # fmt: skip
    full = Bank([compact(refit, rows, members, -1.0)], world.vectors, bank._scores)
    moved, gap = [], []
    for i in [580, *range(560, 600)]:
        before, after = (b.ask(world.vectors[i]).mean[0] for b in (bank, full))
        moved.append(abs(after - before))
        gap.append(abs(quick.ask(world.vectors[i]).mean[0] - after))
    assert np.mean(gap) < 0.5 * np.mean(moved) + 1e-3


def test_updates_count_and_leave_the_old_state_alone():
    world, _, small, bank = _bank((150, 150))
    before = bank.ask(world.vectors[590]).mean
    new = with_outcome(small[0], bank.outcome(0, 590, 0.0, 3.0))
    again = with_outcome(new, Bank([new], world.vectors, bank._scores).outcome(0, 591, 1.0, 1.0))
    assert (new.n_updates, again.n_updates, again.n_rows) == (1, 2, 152)
    np.testing.assert_array_equal(bank.ask(world.vectors[590]).mean, before)
    after = Bank([again, small[1]], world.vectors, bank._scores).ask(world.vectors[590]).mean
    assert after[0] < before[0]
    assert after[1] == pytest.approx(before[1], abs=1e-6)
