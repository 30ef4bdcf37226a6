"""Length rewards against values worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from tests.rl.formulas.batches import rewards
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.rewards.length import (
    cosine_schedule,
    length_budget,
    length_cosine,
    length_in_group,
    length_outlier,
    length_sigmoid,
    length_target,
    overlong_soft,
)


def test_overlong_soft_falls_linearly_inside_the_buffer() -> None:
    batch = rewards([1, 1, 0, 1, 1], lengths=[10, 80, 90, 100, 130])
    found = overlong_soft(batch, max_tokens=100, buffer=20)
    assert found.tolist() == pytest.approx([1.0, 1.0, -0.5, 0.0, 0.0])
    half = overlong_soft(batch, max_tokens=100, buffer=20, factor=0.5)
    assert half.tolist() == pytest.approx([1.0, 1.0, -0.25, 0.5, 0.5])
    with pytest.raises(ConfigError, match="buffer is 200"):
        overlong_soft(batch, max_tokens=100, buffer=200)


def test_length_in_group_rewards_the_short_and_never_the_wrong() -> None:
    batch = rewards([1, 1, 0, 0], [1, 0], lengths=[10, 50, 10, 40, 7, 7])
    found = length_in_group(batch, weight=2.0)
    assert found.tolist() == pytest.approx([2.0, 0.0, 0.0, -0.5, 1.0, 0.0])


def test_length_cosine_meets_its_ends_and_middle() -> None:
    batch = rewards([1, 1, 1, 0, 0, 0, 1], lengths=[0, 50, 100, 0, 50, 100, 500])
    found = length_cosine(batch, max_tokens=100)
    assert found.tolist() == pytest.approx([1.0, 0.75, 0.5, -1.0, -0.75, -0.5, 0.5])


def test_length_sigmoid_scales_right_answers() -> None:
    batch = rewards([1, 1, 0, 0], [1, 0], lengths=[10, 30, 5, 99, 8, 9])
    sig = 1 / (1 + math.exp(1))  # one deviation below the right answers' mean
    expected = [1 - 0.2 * sig, 1 - 0.2 * (1 - sig), 0, 0, 0.9, 0]
    assert length_sigmoid(batch, alpha=0.2).tolist() == pytest.approx(expected)


def test_length_target_penalises_both_sides() -> None:
    batch = rewards([1, 1, 0], lengths=[80, 120, 100], extra={"target_R": np.full(3, 100.0)})
    assert length_target(batch, alpha=0.01).tolist() == pytest.approx([0.8, 0.8, 0.0])


def test_length_outlier_touches_all_right_groups_only() -> None:
    lengths = [10, 10, 10, 10, 10, 90]
    batch = rewards([1] * 6, [1] * 5 + [0], lengths=lengths * 2)
    limit = np.mean(lengths) + 2 * np.std(lengths)
    assert limit < 90
    assert length_outlier(batch).tolist() == [1] * 5 + [0] + [1] * 5 + [0]
    assert length_outlier(batch, k=5.0)[5] == 1


def test_length_budget_is_free_inside_the_budget() -> None:
    budget = np.array([100.0, 100.0, 100.0, 100.0])
    batch = rewards([1, 1, 1, 0], lengths=[100, 150, 900, 900], extra={"budget_R": budget})
    found = length_budget(batch, slope=0.5, floor=0.1)
    assert found.tolist() == pytest.approx([1.0, 0.75, 0.1, 0.0])


def test_a_cosine_schedule_only_falls() -> None:
    weights = [cosine_schedule(t, 50, floor=0.1) for t in range(60)]
    assert weights[0] == 1.0 and weights[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(weights))
