"""Advantages by tokens of a rollout against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.rl.formulas.batches import rewards
from tfgrpo.rl.formulas.advantages.group import grpo
from tfgrpo.rl.formulas.advantages.tokens import progrpo, token_average


def test_token_average_weighs_rewards_by_length() -> None:
    """Lengths 1 and 3: the mean is .25, the deviation √(3/16)."""
    batch = rewards([1.0, 0.0], lengths=[1, 3])
    root = math.sqrt(3) / 4
    expected = [0.75 / (root + 1e-6), -0.25 / (root + 1e-6)]
    assert token_average(batch).tolist() == pytest.approx(expected)
    assert token_average(rewards([1.0, 1.0], lengths=[1, 3])).tolist() == [0.0, 0.0]


def test_token_average_falls_back_where_an_advantage_is_large() -> None:
    batch = rewards([1.0, 0.0], lengths=[1, 99])
    assert token_average(batch).tolist() == pytest.approx(grpo(batch, eps=1e-6).tolist())
    assert token_average(batch, most=99.0)[0] == pytest.approx(math.sqrt(99), rel=1e-4)


def test_progrpo_gives_more_to_the_less_likely_of_two_right_answers() -> None:
    """Lowest log-probs −.1 and −1: e^−.1 − e^−1 = .537 apart, times the weight."""
    batch = rewards(
        [1.0, 1.0, 0.0],
        [0.0, 0.0],
        lengths=[5, 5, 5, 1, 1],
        logp_D=np.array([-0.1, 0, 0, 0, 0, -1.0, 0, 0, 0, 0, -2.0, 0, 0, 0, 0, -1.0, -3.0]),
        extra={"prompt_confidence_R": np.full(5, 0.5)},
    )
    found, plain = progrpo(batch, weight=1.0), grpo(batch)
    assert (found - plain)[:2].tolist() == pytest.approx([0.5 - 0.904837, 0.5 - 0.367879], abs=1e-6)
    assert found[1] - found[0] == pytest.approx(0.536958, abs=1e-6)
    assert found[3:].tolist() == [0.0, 0.0]  # nothing succeeded
    assert progrpo(batch, weight=0.0).tolist() == plain.tolist()
