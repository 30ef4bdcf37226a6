"""Rewards from parts, siblings, tools and steps, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.rl.formulas.batches import rewards
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.advantages.group import grpo
from tfgrpo.rl.formulas.inputs import RewardBatch
from tfgrpo.rl.formulas.rewards.group import (
    ares,
    entropy_rank,
    fapo,
    gated_steps,
    invalid_actions,
    otc,
    pear,
    staged,
    structure_to_content,
    tool_cost,
    unlikeliness,
    weighted_sum,
)


def test_unlikeliness_scales_by_rank_of_likelihood() -> None:
    """log π per token −3, −1, −2, −2: ranks 0, 3 and twice 1.5."""
    logp = np.array([-6.0, -4.0, -2.0, -4.0])
    batch = rewards([1, 1, 1, 0], lengths=[2, 4, 1, 2], logp_R=logp)
    found = unlikeliness(batch, beta=0.25)
    assert found.tolist() == pytest.approx([1.0, 1 - 0.1875, 1 - 0.25 * 1.5 / 4, 0.0])
    assert batch.reward_R.tolist() == [1, 1, 1, 0]  # never overwritten


def test_weighted_sum_and_staged_combine_parts() -> None:
    part_RM = np.array([[1.0, 1.0, 0.5], [1.0, 0.4, 1.0], [0.2, 1.0, 1.0]])
    batch = rewards([0, 0, 0], part_RM=part_RM, part_names=("parses", "facts", "style"))
    found = weighted_sum(batch, weight_style=2.0, weight_parses=0.0)
    assert found.tolist() == pytest.approx([2.0, 2.4, 3.0])
    # the third never opens its second stage, the second never its third
    assert staged(batch).tolist() == pytest.approx([2.5, 1.4, 0.2])
    with pytest.raises(ConfigError, match="weight_facts"):
        weighted_sum(batch, weight_fact=1.0)


def test_structure_to_content_moves_from_one_part_to_the_other() -> None:
    part_RM = np.array([[0.0, 1.0], [1.0, 0.0]])
    batch = rewards([0, 0], part_RM=part_RM, part_names=("content", "structure"))
    begin = structure_to_content(batch, step=0, steps=10)
    assert begin.tolist() == pytest.approx([1.0, 0.0])
    middle = structure_to_content(batch, step=5, steps=10, floor=0.0)
    assert middle.tolist() == pytest.approx([0.5, 0.5])
    end = structure_to_content(batch, step=99, steps=10, floor=0.1)
    assert end.tolist() == pytest.approx([0.1, 0.9])
    other = rewards([0], part_RM=np.ones((1, 1)), part_names=("tags",))
    with pytest.raises(ConfigError, match="structure"):
        structure_to_content(other, step=0, steps=1)


def test_tool_cost_and_invalid_actions_subtract_their_counts() -> None:
    columns = {"tool_calls_R": np.array([0.0, 2.0, 5.0]), "invalid_R": np.array([0.0, 1.0, 3.0])}
    batch = rewards([1, 1, 0], extra=columns)
    assert tool_cost(batch, cost=0.1, free=1.0).tolist() == pytest.approx([1.0, 0.9, -0.4])
    assert invalid_actions(batch).tolist() == pytest.approx([1.0, 0.9, -0.3])
    with pytest.raises(ConfigError, match="tool_calls_R"):
        tool_cost(rewards([1]))


def test_otc_is_largest_at_the_least_number_of_calls() -> None:
    """The right answers' least is 2; a wrong answer with 1 call does not count."""
    calls = np.array([2.0, 6.0, 1.0, 0.0, 3.0])
    batch = rewards([1, 1, 0], [1, 1], extra={"tool_calls_R": calls})
    found = otc(batch)
    f = 2 * 6 * 2 / (6 + 2)
    expected = [1.0, math.sin(math.pi * f / 4), 0.0, 1.0, math.cos(math.pi * 3 / 7)]
    assert found.tolist() == pytest.approx(expected)
    none_right = rewards([0.0, 0.5], extra={"tool_calls_R": np.array([1.0, 2.0])})
    assert otc(none_right).tolist() == [0.0, 0.5]


def test_factors_refuse_rewards_below_zero_which_they_would_raise() -> None:
    """otc on 1, −1, −1, −1 with 1, 1, 4, 9 calls would pay needless calls; pear, uncertainty."""
    columns = {
        "tool_calls_R": np.array([1.0, 1, 4, 9]),
        "think_entropy_R": np.array([0.1, 0.1, 0.5, 0.9]),
        "answer_entropy_R": np.zeros(4),
    }
    batch = rewards([1, -1, -1, -1], extra=columns)
    for reward in (otc, pear):
        with pytest.raises(ConfigError, match="would raise the reward -1 of a wrong answer"):
            reward(batch)
        assert reward(rewards([1, 0, 0, 0], extra=columns))[1:].tolist() == [0, 0, 0]


def test_gated_steps_open_with_the_outcome() -> None:
    steps = [np.array([0.1, 0.2]), np.array([0.5]), np.array([])]
    batch = rewards([1.0, 0.0, 1.0], step_reward_R=steps)
    assert gated_steps(batch, scale=2.0).tolist() == pytest.approx([1.6, 0.0, 1.0])


def test_pear_falls_with_the_entropy_of_thinking() -> None:
    columns = {
        "think_entropy_R": np.array([0.2, 0.5, 3.0, 0.0]),
        "answer_entropy_R": np.array([0.1, 0.1, 0.1, 0.1]),
    }
    batch = rewards([1, 1, 1, 0], extra=columns)
    assert pear(batch, alpha=1.0).tolist() == pytest.approx([0.9, 0.6, 0.0, 0.0])


def test_fapo_turns_against_flawed_answers_as_sound_ones_spread() -> None:
    def advantage_of_flawed(n_sound: int, n_wrong: int) -> float:
        flawed = np.array([1.0] + [0.0] * (n_sound + n_wrong))
        batch = rewards([1] * (1 + n_sound) + [0] * n_wrong, extra={"flawed_R": flawed})
        shaped = fapo(batch)
        assert shaped.tolist() == [0.0] + [1.0] * n_sound + [-1.0] * n_wrong
        return float(grpo(rewards(shaped.tolist()))[0])

    assert advantage_of_flawed(1, 6) > 0 > advantage_of_flawed(6, 1)


def test_ares_matches_the_hand_computed_buckets() -> None:
    """Each bucket spans counts 0 to 20: targets 7, 10 and 13, margins 1.05, 2.5 and 4.55."""
    easy, medium, hard = [1, 1, 0], [1, 0], [1, 0, 0, 0]
    counts = np.array([20.0, 0, 20, 20, 0, 20, 0, 10, 0])
    batch = rewards(easy, medium, hard, extra={"trigger_count_R": counts})
    found = ares(batch, cap=0.5) - batch.reward_R

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    over = 13 - 1.05
    expected = [
        -min(0.5, (over - 1.0) / (1.05 + 2) * 0.5),  # far over: capped
        0.0,  # right and short: no penalty when easy
        sigmoid(over / 2.0) * 0.5 * 0.6,
        -min(0.5, (7.5 - 1.5) / (2.5 + 3) * 0.5),
        sigmoid(0.0) * 0.5 * 0.8,
        sigmoid((7 + 4.55) / 3.0) * 0.6,  # the cap is 1.2 times larger when hard
        sigmoid(0.0) * 0.6,
        sigmoid(0.0) * 0.6,
        sigmoid(0.0) * 0.6,
    ]
    assert found.tolist() == pytest.approx(expected)
    below = rewards([1, 0, 0, 0], extra={"trigger_count_R": np.array([0.0, 20, 20, 20])})
    x = 13 - 4.55
    assert ares(below, cap=0.5)[0] - 1 == pytest.approx(-min(0.6, 0.5 * (x - 2) / (4.55 + 4) * 0.6))


def test_entropy_rank_stays_below_every_success() -> None:
    """Rows of four tokens; the last one's entropy ranks the two failures of the first group."""
    batch = RewardBatch(
        np.array([1.0, 0, 0, 0.2, 0]),
        np.array([0, 0, 0, 1, 1]),
        np.full(5, 4, dtype=np.int64),
        entropy_D=np.array([1, 1, 1, 1, 9, 9, 9, 0.5, 0, 0, 0, 2, 1, 1, 1, 1, 1, 1, 1, 1.0]),
    )
    found = entropy_rank(batch, top=0.5)
    # the smallest success lies 0.2 above: s = 0.1; ranks 1 and 0 of two, 0 of one
    assert found.tolist() == pytest.approx([1.0, 0.075, 0.025, 0.2, 0.05])
    assert found[[1, 2, 4]].max() < 0.2
    assert entropy_rank(batch, top=0.01).tolist() == pytest.approx(
        [1.0, 0.0075, 0.0025, 0.2, 0.005]
    )
