"""Published rollout budgets: what each rule is named for, on counts worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.routing.worlds import group, tasks
from tfgrpo.routing.budgets.posterior_gain import uniform
from tfgrpo.routing.budgets.published import Dars, RolloutGdro, Sgpo, Vade, Xrpo


def test_sgpo_expects_about_one_success_a_group_and_drops_the_solved():
    history = [group("t0", 8, 8), group("t1", 4, 8), group("t2", 2, 8), group("t3", 1, 8)]
    counts = Sgpo()(tasks(5), history, 100)
    assert counts == [0, 2, 4, 8, 2]
    assert [c * p for c, p in zip(counts[1:4], (0.5, 0.25, 0.125), strict=True)] == [1, 1, 1]
    assert Sgpo()(tasks(5), history, 3) == [0, 2, 0, 0, 1]
    unsolved = [group(f"t{i}", 0, 8) for i in range(200)]
    kept = Sgpo(cap=16)(tasks(200), unsolved, 10_000)
    assert set(kept) == {0, 16}
    assert 60 < sum(c > 0 for c in kept) < 140


def test_vade_concentrates_on_one_half_and_recovers_after_a_jump():
    history = [
        group(f"t{i}", 4 if i < 4 else (0 if i % 2 else 8), 8, s)
        for i in range(20)
        for s in (0, 1, 2)
    ]
    chosen = np.zeros(20)
    for seed in range(60):
        chosen += np.array(Vade(group_size=4, seed=seed)(tasks(20), history, 16)) > 0
    assert chosen[:4].mean() > 5 * chosen[4:].mean()
    jumped = [*history, *[group("t19", 4, 8, s) for s in range(3, 7)]]
    after = sum(Vade(group_size=4, seed=s)(tasks(20), jumped, 16)[19] > 0 for s in range(60))
    assert after > 3 * max(chosen[19], 1)


def test_xrpo_spends_the_budget_and_leaves_settled_tasks_alone():
    history = [group("t0", 16, 16), group("t1", 8, 16), group("t2", 0, 16)]
    counts = Xrpo()(tasks(4), history, 40)
    assert counts[0] == counts[2] == 0
    assert counts[3] > counts[1] >= 2
    assert sum(counts) == 40


def test_dars_raises_hard_tasks_to_the_advantage_of_one_half():
    history = [group("t0", 4, 8), group("t1", 2, 8), group("t2", 0, 8), group("t3", 7, 8)]
    counts = Dars(base=8, cap=32)(tasks(5), history, 1000)
    assert counts[0] == counts[3] == counts[4] == 8  # easy and new tasks are trained too
    assert counts[2] == 32
    n = counts[1]

    def total(a, n):
        rewards = np.array([1.0] * round(a * n * 1000) + [0.0] * round((1 - a) * n * 1000))
        z = (rewards - rewards.mean()) / rewards.std()
        return np.abs(z).sum() / 1000

    assert total(0.25, n) >= total(0.5, 8) > total(0.25, n - 1)
    assert Dars(base=8, schedule="hard")(tasks(5), history, 1000)[1] > counts[1]
    assert Dars()(tasks(4), history, 5) == uniform(4, 5)


@pytest.mark.parametrize("schedule", ["equal", "hard"])
def test_dars_keeps_its_signal_over_fifty_steps(schedule):
    """64 tasks of rates .05 to .95, 16 a step: every step still rolls every task that it is given,
    and mixed groups stay as many as in the first steps."""
    rng = np.random.default_rng(3)
    rates = np.linspace(0.05, 0.95, 64)
    every, history, mixed = tasks(64), [], []
    for step in range(50):
        drawn = [(16 * step + 5 * i) % 64 for i in range(16)]
        sizes = Dars(schedule=schedule)([every[i] for i in drawn], history, 128)
        assert min(sizes) >= 4 and sum(sizes) <= 128
        solved = [int(rng.binomial(n, rates[i])) for i, n in zip(drawn, sizes, strict=True)]
        mixed.append(np.mean([0 < k < n for k, n in zip(solved, sizes, strict=True)]))
        history += [
            group(every[i].task_id, k, n) for i, k, n in zip(drawn, solved, sizes, strict=True)
        ]
        history = history[-8 * 64 :]
    assert np.mean(mixed[-16:]) == pytest.approx(np.mean(mixed[:16]), abs=0.06)
    assert min(mixed) > 0.4


def test_gdro_gives_most_to_one_half_and_spends_all():
    history = [group("t0", 8, 8), group("t1", 4, 8), group("t2", 0, 8)]
    counts = RolloutGdro()(tasks(3), history, 30)
    assert sum(counts) == 30
    assert counts[1] == max(counts)
    assert min(counts) >= 2
