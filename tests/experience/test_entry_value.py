"""Entry values against ordinary least squares, simulation and hand-made cases."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tfgrpo.context import Context, ContextPart
from tfgrpo.experience.entry_value import (
    Observation,
    expected_power,
    inclusion_plan,
    leave_one_out,
    observations_of,
    value_entries,
)
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task

ENTRIES = [f"e{i}" for i in range(10)]


def simulate(
    seed: int, effects: dict[str, float], n_tasks: int = 40, draws: int = 20, keep: float = 0.5
) -> list[Observation]:
    rng = np.random.default_rng(seed)
    found = []
    for t in range(n_tasks):
        base = rng.beta(2, 3) * 0.7
        for shown in inclusion_plan(ENTRIES, draws, keep=keep, seed=seed * 1000 + t):
            chance = base + sum(effects.get(e, 0.0) for e in shown)
            reward = float(rng.random() < min(1.0, max(0.0, chance)))
            found.append(Observation(f"t{t}", reward, shown, frozenset(ENTRIES), keep))
    return found


def test_every_entry_is_left_out_equally_often() -> None:
    plan = inclusion_plan(ENTRIES, 20, keep=0.8, seed=1)
    assert {e: sum(e in shown for shown in plan) for e in ENTRIES} == dict.fromkeys(ENTRIES, 16)
    assert plan == inclusion_plan(ENTRIES, 20, keep=0.8, seed=1)
    assert plan != inclusion_plan(ENTRIES, 20, keep=0.8, seed=2)


def test_a_fractional_share_is_kept_on_average() -> None:
    count = sum(len(inclusion_plan(["e"], 3, keep=0.5, seed=s)[0]) for s in range(2000))
    assert count / 2000 == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("keep", [0.0, 1.0, 1.5])
def test_an_entry_that_is_always_shown_cannot_be_planned(keep: float) -> None:
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        inclusion_plan(["e"], 4, keep=keep)


def test_without_task_effects_the_values_are_those_of_least_squares() -> None:
    rng = np.random.default_rng(0)
    effects = rng.normal(0, 1, 3)
    shown = rng.random((90, 3)) < 0.5
    rewards = shown @ effects + rng.normal(0, 0.5, 90)
    names = ["a", "b", "c"]
    observations = [
        Observation(
            f"t{i}",  # one row a task: no task effect can be told apart
            float(r),
            frozenset(n for n, s in zip(names, row, strict=True) if s),
            frozenset(names),
            0.5,
        )
        for i, (row, r) in enumerate(zip(shown, rewards, strict=True))
    ]
    plain = np.linalg.lstsq(np.column_stack([np.ones(90), shown]), rewards, rcond=None)[0]
    found = {v.experience_id: v.effect.estimate for v in value_entries(observations)}
    assert [found[n] for n in names] == pytest.approx(plain[1:].tolist())


def test_the_one_good_entry_among_ten_is_found_with_the_power_stated() -> None:
    stated = expected_power(0.15, 800, 10, n_tasks=40, reward_sd=0.46)
    runs = 60
    first, found = 0, 0
    for seed in range(runs):
        values = value_entries(simulate(seed, {"e3": 0.15}))
        first += values[0].experience_id == "e3"
        found += next(v for v in values if v.experience_id == "e3").p_value < 0.05
    assert stated > 0.9
    assert found / runs >= stated - 2 * math.sqrt(stated * (1 - stated) / runs)
    assert first / runs >= 0.95


def test_nothing_is_found_where_no_entry_helps() -> None:
    runs = 100
    wrong = sum(
        any(v.p_value < 0.05 for v in value_entries(simulate(seed, {}, draws=8)))
        for seed in range(runs)
    )
    assert wrong / runs <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / runs)


def test_the_interval_covers_the_true_effect() -> None:
    runs, hits = 150, 0
    for seed in range(runs):
        values = value_entries(simulate(seed, {"e0": 0.2, "e1": -0.1}, n_tasks=25, draws=8))
        hits += next(v for v in values if v.experience_id == "e0").effect.low <= 0.2
        hits += next(v for v in values if v.experience_id == "e0").effect.high >= 0.2
    assert 0.93 <= hits / runs - 1 <= 1.0


def test_a_harmful_entry_is_called_harmful_and_stands_last() -> None:
    values = value_entries(simulate(3, {"e7": -0.25}))
    assert values[-1].experience_id == "e7"
    assert values[-1].is_harmful
    assert values[-1].n_with == values[-1].n_without == 400


def test_an_entry_learnt_from_hard_tasks_is_not_praised_for_their_regression() -> None:
    rng = np.random.default_rng(5)
    observations = []
    for t in range(60):
        p = rng.beta(1, 1)
        early = rng.random(4) < p
        observations += [
            Observation(f"t{t}", float(r), frozenset(), frozenset(), 0.5) for r in early
        ]
        for shown in inclusion_plan(["late"], 8, keep=0.5, seed=t):
            observations.append(
                Observation(f"t{t}", float(rng.random() < p), shown, frozenset(["late"]), 0.5)
            )
    (value,) = value_entries(observations)
    assert value.effect.low < 0 < value.effect.high
    assert value.n_with + value.n_without == 480  # the early draws tell nothing about it


def test_entries_that_chance_never_withheld_are_not_judged() -> None:
    rows = [
        Observation(f"t{i % 5}", float(i % 2), frozenset(["a"]), frozenset(["a"]), 0.9)
        for i in range(20)
    ]
    assert value_entries(rows) == []
    assert value_entries([]) == []


def group(task_id: str, sources: Sequence[str], metadata: dict) -> RolloutGroup:
    rollouts = (
        Rollout(f"{task_id}-0", task_id, outcome="graded", score=Score(1.0)),
        Rollout(f"{task_id}-1", task_id, outcome="timed_out", error="slow"),
    )
    parts = tuple(ContextPart("lesson", f"text {s}", source=s) for s in sources)
    return RolloutGroup(
        f"g-{task_id}", Task(task_id, "?"), rollouts, Context(parts), metadata=metadata
    )


def test_observations_come_from_graded_rollouts_of_randomised_groups_only() -> None:
    randomised = group("t1", ["e1", "pinned"], {"offered": ["e1", "e2"], "keep": 0.7})
    fixed = group("t2", ["e1"], {})
    assert observations_of([randomised, fixed]) == [
        Observation("t1", 1.0, frozenset(["e1"]), frozenset(["e1", "e2"]), 0.7)
    ]


async def test_leave_one_out_asks_for_the_library_without_each_entry_once() -> None:
    asked = []

    async def evaluate(ids: Sequence[str]) -> dict[str, list[float]]:
        asked.append(tuple(ids))
        return {f"t{i}": [0.2 + 0.5 * ("good" in ids) - 0.3 * ("bad" in ids)] for i in range(12)}

    values = await leave_one_out(["bad", "good", "idle"], evaluate)
    assert asked == [
        ("bad", "good", "idle"),
        ("good", "idle"),
        ("bad", "idle"),
        ("bad", "good"),
    ]
    assert [v.experience_id for v in values] == ["good", "idle", "bad"]
    assert [v.effect.estimate for v in values] == pytest.approx([0.5, 0.0, -0.3])
    assert values[0].p_value < 0.05 < values[1].p_value
