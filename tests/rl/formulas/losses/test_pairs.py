"""Losses on pairs of a group against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rl.formulas.batches import flat, slopes, tokens, values
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.inputs import TokenBatch
from tfgrpo.rl.formulas.losses.pairs import inpo, on_rows, pair_shares, rpo


def pair(
    logp: list[list[float]], ref: list[list[float]], old: list[list[float]], reward: list[float]
) -> TokenBatch:
    """One group, everything given outright."""
    gap = [[p - o for p, o in zip(*rows, strict=True)] for rows in zip(logp, old, strict=True)]
    return tokens(
        gap,
        [0.0] * len(logp),
        old=old,
        ref_logp_D=flat(ref),
        group_R=torch.zeros(len(logp), dtype=torch.int64),
        reward_R=torch.tensor(reward, dtype=torch.float64),
    )


def grouped(reward: list[float], group: list[int]) -> TokenBatch:
    return tokens(
        [[0.0]] * len(reward),
        [0.0] * len(reward),
        ref_logp_D=torch.full((len(reward),), -1.0, dtype=torch.float64),
        group_R=torch.tensor(group),
        reward_R=torch.tensor(reward, dtype=torch.float64),
    )


def test_a_groups_pairs_are_its_ends_or_all_that_differ() -> None:
    batch = grouped([0.5, 1.0, 0.0, 1.0, 7.0, 7.0], [0, 0, 0, 0, 1, 1])
    ends = pair_shares(batch, "x", "ends")
    assert ends.nonzero().tolist() == [[1, 2]]  # the first of the best, and no pair of equals
    assert ends[1, 2] == 2.0  # four rows, one pair
    every = pair_shares(batch, "x", "all")
    assert every.nonzero().tolist() == [[0, 2], [1, 0], [1, 2], [3, 0], [3, 2]]
    assert every[1, 0] == pytest.approx(0.4)
    # the mean over a group's rows is the mean over its pairs
    loss_RR = torch.arange(36.0).reshape(6, 6)
    mean = float(on_rows(loss_RR, every)[:4].mean())
    assert mean == pytest.approx((2 + 6 + 8 + 18 + 20) / 5)
    with pytest.raises(ConfigError, match="pairs is 'some'; allowed are 'ends' and 'all'"):
        pair_shares(batch, "rpo", "some")


@pytest.mark.parametrize("loss", [rpo, inpo])
def test_a_group_of_equal_rewards_has_no_pair_and_no_loss(loss: Any) -> None:
    batch = grouped([0.3, 0.3, 0.3], [0, 0, 0])
    assert values(loss, batch) == [0.0] * 3
    assert slopes(loss, batch) == [0.0] * 3


def test_rpo_is_dpo_with_the_better_rows_likelihood() -> None:
    """Margin 0.5, beta 0.1: -log sigmoid(0.05) = 0.66846."""
    batch = pair([[-1.0, -0.5], [-2.0]], [[-1.1, -0.7], [-1.8]], [[-1.0, -0.5], [-2.0]], [1.0, 0.0])
    assert values(rpo, batch, beta=0.1, eta=0.0) == pytest.approx([0.66846] * 3, abs=1e-5)
    # and eta times the mean of -1 and -0.5
    assert values(rpo, batch, beta=0.1, eta=0.2) == pytest.approx([0.66846 + 0.15] * 3, abs=1e-5)
    # beta sigmoid(-0.05) = 0.048750 a token of either row, against the worse; eta / 2 a token.
    # Summed over tokens the value counts three times, by row_mean it counts once.
    assert slopes(rpo, batch, beta=0.1, eta=0.0) == pytest.approx(
        [-3 * 0.048750, -3 * 0.048750, 3 * 0.048750], abs=1e-5
    )
    assert slopes(rpo, batch, beta=0.1, eta=0.2) == pytest.approx(
        [-3 * 0.148750, -3 * 0.148750, 3 * 0.048750], abs=1e-5
    )


def test_inpo_matches_the_hand_value_and_a_swapped_pair_flips_h() -> None:
    """eta 2, tau 1; differences 0.5, 0.2 (reference), 0.1 (old): h = 0.35, loss 0.1^2."""
    rows = [[[-1.0], [-1.5]], [[-1.0], [-1.2]], [[-1.0], [-1.1]]]
    batch = pair(*rows, reward=[1.0, 0.0])
    assert values(inpo, batch, eta=2.0, tau=1.0) == pytest.approx([0.01, 0.01])
    # 2 (h - 0.25), counted on both rows
    assert slopes(inpo, batch, eta=2.0, tau=1.0) == pytest.approx([0.4, -0.4])
    swapped = pair(*rows, reward=[0.0, 1.0])
    assert values(inpo, swapped, eta=2.0, tau=1.0) == pytest.approx([0.36, 0.36])  # (-.35 - .25)^2
    # without tau the reference has no say
    far = pair(rows[0], [[-9.0], [-1.0]], rows[2], reward=[1.0, 0.0])
    assert values(inpo, far, eta=2.0, tau=0.0) == pytest.approx([0.0225] * 2)  # (.4 - .25)^2
    for eta, tau in ((0.0, 0.0), (1.0, 2.0), (1.0, -0.1)):
        with pytest.raises(ConfigError, match=r"tau .* from 0 to eta"):
            inpo(batch, eta=eta, tau=tau)
