"""Group advantages against hand-computed values, numpy, and under permutation."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from tfgrpo.advantage import (
    AdvantageKind,
    advantages_G,
    group_advantages,
    is_informative,
    select_informative,
    spread,
)
from tfgrpo.errors import ConfigError
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task

KINDS: tuple[AdvantageKind, ...] = get_args(AdvantageKind)
REWARDS = st.lists(st.floats(-1e6, 1e6).map(lambda x: round(x, 6)), min_size=1, max_size=12)


def group_of(group_id: str, rewards: list[float | None], text: str = "same text") -> RolloutGroup:
    task = Task(f"task of {group_id}", text)
    rollouts = []
    for i, reward in enumerate(rewards):
        blank = Rollout(f"{group_id}-{i}", task.task_id)
        rollouts.append(
            blank.failed("provider_failed", "down")
            if reward is None
            else blank.graded(Score(reward))
        )
    return RolloutGroup(group_id, task, tuple(rollouts))


def test_two_prompts_that_arrive_interleaved_are_still_two_groups() -> None:
    arrived = [("P1", 1.0), ("P2", 0.0)] * 1 + [("P1", 0.0), ("P2", 0.0)]
    arrived += [("P1", 1.0), ("P2", 0.0), ("P1", 0.0), ("P2", 0.0)]
    groups = {name: group_of(name, [r for n, r in arrived if n == name]) for name in ("P1", "P2")}
    first = group_advantages(groups["P1"])
    assert [round(first[f"P1-{i}"], 4) for i in range(4)] == [0.866, -0.866, 0.866, -0.866]
    assert list(group_advantages(groups["P2"]).values()) == [0.0] * 4
    kept, dropped = select_informative(groups.values())
    assert [g.group_id for g in kept] == ["P1"] and [g.group_id for g in dropped] == ["P2"]
    # Cut by position, the flat list would give +1.5 and -0.5: two tasks mixed into one row.
    assert max(advantages_G([r for _, r in arrived][:4])) == pytest.approx(1.5)


def test_hand_computed_values_of_every_kind() -> None:
    rewards_G = [1.0, 0.0, 0.0, 0.5]  # mean 0.375, sum of squares 0.6875
    centred = [0.625, -0.375, -0.375, 0.125]
    sample = math.sqrt(0.6875 / 3)
    assert advantages_G(rewards_G, "mean") == pytest.approx(centred)
    assert advantages_G(rewards_G, "grpo") == pytest.approx([c / sample for c in centred])
    assert advantages_G(rewards_G, "grpo_population") == pytest.approx(
        [c / math.sqrt(0.6875 / 4) for c in centred]
    )
    assert advantages_G(rewards_G, "rloo") == pytest.approx([1 - 1 / 6, -0.5, -0.5, 0.5 - 1 / 3])
    assert advantages_G(rewards_G, "rank") == pytest.approx([1.0, -2 / 3, -2 / 3, 1 / 3])
    assert advantages_G([0.0, 1.0], "grpo", epsilon=1.0) == pytest.approx(
        [-0.5 / (math.sqrt(0.5) + 1), 0.5 / (math.sqrt(0.5) + 1)]
    )


@given(REWARDS)
def test_the_formulas_agree_with_numpy_and_scipy(rewards_G: list[float]) -> None:
    array = np.asarray(rewards_G)
    size = len(array)
    if not is_informative(rewards_G, 1e-6):
        return
    expected = {
        "mean": array - array.mean(),
        "grpo": (array - array.mean()) / array.std(ddof=1),
        "grpo_population": (array - array.mean()) / array.std(),
        "rloo": array - (array.sum() - array) / (size - 1),
        "rank": (rankdata(array) - (size + 1) / 2) * 2 / (size - 1),
    }
    for kind in KINDS:
        got = advantages_G(rewards_G, kind)
        assert np.allclose(got, expected[kind], rtol=1e-5, atol=1e-5 * max(1.0, abs(array).max()))


@given(REWARDS, st.sampled_from(KINDS), st.integers(0, 2**20))
def test_a_permutation_changes_no_digit(
    rewards_G: list[float], kind: AdvantageKind, seed: int
) -> None:
    order = list(range(len(rewards_G)))
    random.Random(seed).shuffle(order)
    straight = advantages_G(rewards_G, kind)
    assert advantages_G([rewards_G[i] for i in order], kind) == tuple(straight[i] for i in order)


@given(REWARDS, st.sampled_from(KINDS))
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(
    rewards_G: list[float], kind: AdvantageKind
) -> None:
    got = advantages_G(rewards_G, kind)
    assert all(math.isfinite(a) for a in got)
    assert abs(math.fsum(got)) <= 1e-9 * max(1.0, max(map(abs, rewards_G))) * len(got)
    for a, r in zip(got, rewards_G, strict=True):
        for b, s in zip(got, rewards_G, strict=True):
            assert not (r > s and a < b)


@given(st.floats(-1e300, 1e300), st.integers(1, 9), st.sampled_from(KINDS))
def test_equal_rewards_give_exactly_zero(reward: float, size: int, kind: AdvantageKind) -> None:
    assert advantages_G([reward] * size, kind) == (0.0,) * size
    assert advantages_G([reward], kind) == (0.0,)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rewards_give_no_advantages(kind: AdvantageKind) -> None:
    assert advantages_G([], kind) == ()


def test_huge_and_tiny_rewards_stay_finite() -> None:
    assert advantages_G([0.0, 1e200], "grpo") == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert advantages_G([0.0, 1e-200], "grpo", tolerance=0.0) == pytest.approx(
        [-math.sqrt(0.5), math.sqrt(0.5)]
    )


def test_rounding_is_not_signal() -> None:
    assert not is_informative([0.1 + 0.2, 0.3])
    assert advantages_G([0.1 + 0.2, 0.3]) == (0.0, 0.0)
    assert spread([0.0, float(Fraction(1, 3))]) == 1 / 3


def test_failures_take_no_part() -> None:
    group = group_of("g", [1.0, None, 0.0, None])
    assert set(group_advantages(group)) == {"g-0", "g-2"}
    assert group_advantages(group)["g-0"] == pytest.approx(math.sqrt(0.5))
    assert group_advantages(group_of("g", [None, 1.0])) == {"g-1": 0.0}


def test_wrong_input_is_named() -> None:
    with pytest.raises(ConfigError, match="'zscore'; allowed are grpo"):
        advantages_G([1.0], "zscore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nan"):
        advantages_G([1.0, float("nan")])
