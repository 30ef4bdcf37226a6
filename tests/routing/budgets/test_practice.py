"""Selecting, probing, stopping: contracts, and fewer rollouts for a mixed group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.routing.worlds import group, tasks
from tfgrpo.errors import ConfigError
from tfgrpo.routing.budgets.posterior_gain import GRID, mixed_share
from tfgrpo.routing.budgets.practice import Practice


def flat(n):
    return np.full((n, len(GRID)), 1 / len(GRID))


@given(
    counts=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), max_size=9),
    extra=st.integers(0, 5),
    seed=st.integers(0, 3),
)
def test_a_selection_holds_n_tasks_once_each_and_repeats(counts, extra, seed):
    history = [group(f"t{i}", min(k, n), n) for i, (k, n) in enumerate(counts)]
    asked = tasks(len(counts) + extra)
    n = len(asked) // 2
    chosen = Practice().select(asked, history, n, seed=seed)
    assert len(set(chosen)) == len(chosen) == n
    assert Practice().select(asked, history, n, seed=seed) == chosen


def test_own_history_ranks_first_and_the_floor_draws_others():
    history = [group(f"t{i}", 4 if i < 10 else 8, 8) for i in range(40)]
    plan = Practice(floor=0.0)
    assert set(plan.select(tasks(40), history, 10)) == set(range(10))
    drawn = [Practice(floor=0.5).select(tasks(40), history, 10, seed=s) for s in range(20)]
    assert all(len(set(d) & set(range(10))) >= 5 for d in drawn)
    assert len({i for d in drawn for i in d if i >= 10}) > 15


def test_after_a_probe_mixed_groups_are_finished_to_one_size_and_hopeless_ones_stop():
    plan = Practice(size=8, probe=3)
    # Rates near 0 or 1: a group of one kind stays of one kind.
    weights = np.zeros((4, len(GRID)))
    weights[:, 0] = weights[:, -1] = 0.45
    weights[:, len(GRID) // 2] = 0.1
    step = plan.judge(weights, np.array([1.0, 0.0, 3.0, 5.0]), np.array([3.0, 3.0, 3.0, 8.0]))
    assert step.moves == ("finish", "stop", "stop", "done")
    assert step.rollouts == (5, 0, 0, 0)
    assert step.n_stopped == 2
    hopeful = np.zeros((1, len(GRID)))
    hopeful[:, len(GRID) // 2] = 1.0
    assert plan.judge(hopeful, np.array([0.0]), np.array([3.0])).moves == ("finish",)


def test_probing_buys_a_full_mixed_group_for_fewer_rollouts():
    rng = np.random.default_rng(0)
    p = rng.beta(0.3, 0.3, size=4000)
    counts = np.histogram(p, bins=np.append(GRID - 0.01, 1.0))[0]
    weights = np.tile(counts / counts.sum(), (len(p), 1))
    plan = Practice(size=8, probe=3)
    k, n = rng.binomial(3, p).astype(float), np.full(len(p), 3.0)
    more = np.array(plan.judge(weights, k, n).rollouts)
    k, n = k + rng.binomial(more, p), n + more
    full = (n == 8) & (k > 0) & (k < 8)
    assert n.sum() / full.sum() < 0.95 * 8 / mixed_share(p, 8).mean()
    assert set(n) == {3.0, 8.0}


def test_the_spread_rule_is_the_best_of_all_ways_to_deal():
    import itertools

    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.full(len(GRID), 0.3), size=3)
    k, n = np.array([1.0, 0.0, 2.0]), np.full(3, 2.0)
    seen = weights * GRID ** k[:, None] * (1 - GRID) ** (n - k)[:, None]
    variance = (seen / seen.sum(1, keepdims=True)) @ (GRID * (1 - GRID))
    best = min(
        sum(variance / (n + np.array(c)))
        for c in itertools.product(range(7), repeat=3)
        if sum(c) == 6
    )
    got = np.array(Practice().spread(weights, k, n, 6))
    assert got.sum() == 6
    assert sum(variance / (n + got)) == pytest.approx(best)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="probe"):
        Practice(size=4, probe=5)
    with pytest.raises(ConfigError, match="floor"):
        Practice(floor=2.0)
    with pytest.raises(ConfigError, match="number of tasks"):
        Practice().select(tasks(3), [], 4)
    with pytest.raises(ConfigError, match="budget"):
        Practice().spread(flat(2), np.zeros(2), np.ones(2), -1)
