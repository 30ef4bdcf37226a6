"""Published rollout budgets: what each rule is named for, on counts worked out by hand."""

from __future__ import annotations

import numpy as np

from tests.routing.worlds import group, tasks
from tfgrpo.routing.allocation_published import Dars, RolloutGdro, Sgpo, Vade, Xrpo


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
    counts = Dars(cap=32)(tasks(4), history, 1000)
    assert counts[0] == counts[3] == 0
    assert counts[2] == 32 - 8
    n = 8 + counts[1]

    def total(a, n):
        rewards = np.array([1.0] * round(a * n * 1000) + [0.0] * round((1 - a) * n * 1000))
        z = (rewards - rewards.mean()) / rewards.std()
        return np.abs(z).sum() / 1000

    assert total(0.25, n) >= total(0.5, 8) > total(0.25, n - 1)
    assert Dars(schedule="hard")(tasks(4), history, 1000)[1] > counts[1]
    assert sum(Dars()(tasks(4), history, 5)) <= 5


def test_gdro_gives_most_to_one_half_and_spends_all():
    history = [group("t0", 8, 8), group("t1", 4, 8), group("t2", 0, 8)]
    counts = RolloutGdro()(tasks(3), history, 30)
    assert sum(counts) == 30
    assert counts[1] == max(counts)
    assert min(counts) >= 2
