"""The small network: torch and numpy agree, leave-one-out is exact, the weights are the card's."""

from __future__ import annotations

import hashlib
from importlib.resources import files

import numpy as np
import pytest

from tests.routing.worlds import make_world
from tfgrpo.errors import StoreError
from tfgrpo.routing.estimator import network
from tfgrpo.routing.estimator.network import N_CONTEXT, N_QUERY, card, load_network
from tfgrpo.routing.estimator.reference_pool import ReferencePool
from tfgrpo.routing.estimator.value_model import ValueModel, network_inputs


def _inputs(n=12, q=5, seed=0):
    rng = np.random.default_rng(seed)
    context = rng.standard_normal((n, N_CONTEXT)).astype(np.float32)
    queries = rng.standard_normal((q, N_QUERY)).astype(np.float32)
    return context, queries, rng.uniform(-1, 1, (q, n)).astype(np.float32)


def test_the_weights_are_those_of_the_card_and_small():
    raw = files("tfgrpo.routing.estimator").joinpath("network.npz").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == card()["sha256"]
    assert len(raw) < 300_000
    assert card()["train_cpu_s"] < 300
    assert "no recorded outcome" in card()["data"]["outcomes"]


def test_exchanged_weights_are_refused(monkeypatch):
    load_network.cache_clear()
    monkeypatch.setattr(network, "card", lambda: {"sha256": "0" * 64})
    with pytest.raises(StoreError, match="not the file its card"):
        load_network()
    monkeypatch.undo()
    load_network.cache_clear()
    assert load_network().weights["head"].shape == (network.WIDTH,)


def test_the_order_of_the_context_does_not_matter():
    context, queries, cosines = _inputs()
    net = load_network()
    order = np.random.default_rng(1).permutation(len(context))
    a = net.correct(queries, net.encode(context), cosines)
    b = net.correct(queries, net.encode(context[order]), cosines[:, order])
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_hiding_a_row_equals_leaving_it_out():
    context, _, _ = _inputs()
    net = load_network()
    queries = context[:, :N_QUERY]
    rng = np.random.default_rng(2)
    cosines = rng.uniform(-1, 1, (12, 12)).astype(np.float32)
    hidden = net.correct(queries, net.encode(context), cosines, hide_self=True)
    for i in range(12):
        rest = np.arange(12) != i
        alone = net.correct(queries[[i]], net.encode(context[rest]), cosines[[i]][:, rest])
        assert hidden[i] == pytest.approx(alone[0], abs=1e-5)


@pytest.mark.real
def test_numpy_and_torch_compute_the_same():
    torch = pytest.importorskip("torch")
    from tfgrpo.routing.estimator.train_network import NetworkTask, _forward

    context, queries, cosines = _inputs(40, 9)
    zero = np.zeros(9, np.float32)
    net = load_network()
    ours = net.correct(queries, net.encode(context), cosines)
    weights = {name: torch.from_numpy(a) for name, a in net.weights.items()}
    theirs = _forward(torch, weights, NetworkTask(context, queries, cosines, zero, zero, zero))
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)


@pytest.mark.real
def test_training_lowers_the_loss_on_worlds_it_has_not_seen():
    pytest.importorskip("torch")
    from tfgrpo.routing.estimator.train_network import make_tasks, train, validate

    world = make_world(700, 2, width=64)
    tasks = make_tasks([world.vectors], world.embedder, 3, seed=0)
    fresh = make_tasks([world.vectors], world.embedder, 1, seed=9)
    start = validate(train(tasks, steps=0, batch=4, seed=0), fresh)
    assert start["logloss_network"] == pytest.approx(start["logloss_closed_form"], abs=1e-4)
    done = validate(train(tasks, steps=60, batch=4, seed=0), tasks)
    assert done["logloss_network"] < done["logloss_closed_form"]


def test_tokens_carry_no_vector_and_fit_any_width():
    for width in (32, 200):
        world = make_world(80, 4, width=width)
        pool = ReferencePool.fit(world.table, world.vectors, embedder_id=world.embedder.embedder_id)
        state = ValueModel(world.embedder, pool.without(names=["m0"])).state_of_counts(
            world.vectors[:30], world.table.successes[:30, 0], world.table.trials[:30, 0]
        )
        inputs = network_inputs(state, world.vectors[40:45].astype(float))
        assert inputs.context.shape == (30, N_CONTEXT)
        assert inputs.queries.shape == (5, N_QUERY)
        assert inputs.cosines.shape == (5, 30)
