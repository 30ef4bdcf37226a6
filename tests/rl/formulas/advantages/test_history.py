"""Advantages that use what is known of a task besides its group."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.rl.formulas.batches import rewards
from tfgrpo.rl.formulas.advantages.history import adora, pc_grpo, shrunk, vgpo
from tfgrpo.rl.formulas.inputs import RewardBatch

NAN = math.nan


def with_column(groups: list[list[float]], name: str, column: list[float]) -> RewardBatch:
    return rewards(*groups, extra={name: np.array(column)})


def test_shrunk_leans_on_the_prior_as_a_bayesian_would() -> None:
    """Prior ¾ counts as 2 rollouts; others of the first rollout: 0, 1, so (1 + 1.5)/4."""
    batch = with_column([[1, 0, 1]], "prior_R", [0.75] * 3)
    found = shrunk(batch, kappa=2)
    assert found.tolist() == pytest.approx([1 - 2.5 / 4, 0 - 3.5 / 4, 1 - 2.5 / 4])
    # without a prediction the prior is the mean of the other groups: 1/2
    batch = with_column([[1, 1], [1, 0]], "prior_R", [NAN] * 4)
    assert shrunk(batch, kappa=1).tolist() == pytest.approx(
        [1 - 1.5 / 2, 1 - 1.5 / 2, 1 - 1 / 2, 0 - 2 / 2]
    )


def test_shrunk_has_a_smaller_error_than_the_group_mean_and_is_unbiased() -> None:
    """Two draws of each of 4,000 tasks of rate Beta(2, 2), predicted with noise of 0.1."""
    rng = np.random.default_rng(3)
    p = rng.beta(2, 2, size=4000)
    told = np.clip(p + rng.normal(0, 0.1, size=4000), 0, 1)
    reward = (rng.random((4000, 2)) < p[:, None]).astype(float)
    batch = with_column(reward.tolist(), "prior_R", np.repeat(told, 2).tolist())
    advantage = shrunk(batch).reshape(4000, 2)
    baseline = reward - advantage
    error, plain = (
        ((baseline - p[:, None]) ** 2).mean(),
        ((reward[:, ::-1] - p[:, None]) ** 2).mean(),
    )
    assert error < 0.15 * plain
    # a baseline that holds nothing of its own rollout leaves the mean of (R - b)(R - p) alone
    own = (baseline - p[:, None]) * (reward - p[:, None])
    assert abs(own.mean()) < 3 * own.std() / math.sqrt(own.size)


def test_adora_weighs_tasks_whose_share_rose() -> None:
    batch = with_column([[1, 0, 0, 0]], "past_share_R", [0.0] * 4)
    assert adora(batch, rising=2.0)[0] == pytest.approx(2.9994, abs=2e-4)
    for column, weight in (([0.25] * 4, 0.5), ([NAN] * 4, 1.0), ([0.5] * 4, 0.5)):
        batch = with_column([[1, 0, 0, 0]], "past_share_R", column)
        found = adora(batch, rising=2.0, other=0.5)[0]
        assert found == pytest.approx(1.4997 * weight, abs=2e-4)
    same = adora(with_column([[1, 0, 0, 0]], "past_share_R", [0.0] * 4), rising=1.0)
    assert same.tolist() == pytest.approx([1.4997, -0.4999, -0.4999, -0.4999], abs=2e-4)


def test_adora_may_go_by_the_length_of_right_answers() -> None:
    batch = rewards([1, 0], lengths=[5, 3], extra={"past_share_R": np.array([NAN, NAN])})
    assert adora(batch, rising=2.0, longer=1)[0] == pytest.approx(2 * 0.70701, abs=1e-3)
    assert adora(batch, rising=2.0)[0] == pytest.approx(0.70701, abs=1e-3)


def test_pc_grpo_peaks_at_one_half() -> None:
    quarter, half = rewards([1, 0, 0, 0]), rewards([1, 1, 0, 0])
    # grpo: 1.4997 at a quarter, 0.8659 at one half
    assert pc_grpo(quarter)[0] == pytest.approx(1.4997 * 0.75, abs=2e-4)
    assert pc_grpo(half)[0] == pytest.approx(0.8659 * 1.0, abs=2e-4)


def test_vgpo_keeps_a_signal_in_a_flat_group() -> None:
    assert vgpo(rewards([2, 2, 2]), eps=0).tolist() == pytest.approx([0.1] * 3)
    assert vgpo(rewards([1, 0]), a=0, eps=0).tolist() == pytest.approx([1, -1])
