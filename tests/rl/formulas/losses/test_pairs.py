"""Losses on pairs of a group against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.rl.formulas.batches import flat, slopes, tokens, values
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.inputs import TokenBatch
from tfgrpo.rl.formulas.losses.pairs import (
    inpo,
    moved_labels,
    on_rows,
    pair_shares,
    power_dl,
    rpo,
)


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


@pytest.mark.parametrize("loss", [rpo, inpo, power_dl])
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
    bare = grouped([0.0, 1.0], [0, 0])
    with pytest.raises(ConfigError, match="'inpo' needs ref_logp_D"):
        inpo(replace(bare, ref_logp_D=None))
    for eta, tau in ((0.0, 0.0), (1.0, 2.0), (1.0, -0.1)):
        with pytest.raises(ConfigError, match=r"(eta|tau) is .* and must be"):
            inpo(batch, eta=eta, tau=tau)


def against(label: float) -> TokenBatch:
    """The policy gives the better row of two tokens −4 a token, the worse of four tokens −1."""
    return tokens(
        [[-3.0] * 2, [0.0] * 4],
        [0.0] * 2,
        group_R=torch.zeros(2, dtype=torch.int64),
        reward_R=torch.tensor([1.0, 0.0], dtype=torch.float64),
        columns={"label": torch.full((6,), label, dtype=torch.float64)},
    )


def test_power_dl_matches_the_hand_value() -> None:
    """m = 2 (-4 + 1/2 + 1 - 1/4) = -5.5: softplus(5.5) = 5.504078; a label of 1/2 halves both."""
    assert values(power_dl, against(1.0), eta=0.0)[0] == pytest.approx(5.504078, abs=1e-6)
    half = (5.504078 + 0.004078) / 2
    assert values(power_dl, against(0.5), eta=0.0)[0] == pytest.approx(half, abs=1e-6)
    # eta beta times the better row's mean, -4
    assert values(power_dl, against(0.5), eta=0.1)[0] == pytest.approx(half + 0.8, abs=1e-6)


def test_power_dl_lets_go_of_a_pair_that_the_policy_holds_for_wrong() -> None:
    """Its slope, (1 - sigmoid(m)) beta = 1.9919 a row at first, is under 1e-3 after 100 passes."""

    def felt(label: float, **options: float) -> float:
        """∂ loss / ∂ mean log π of the better row, both rows' shares summed as row_mean does."""
        batch = against(label)
        loss = power_dl(batch, eta=0.0, **options)
        share = torch.tensor([1 / 2] * 2 + [1 / 4] * 4, dtype=torch.float64) / 2
        (slope,) = torch.autograd.grad((loss * share).sum(), batch.logp_D)
        return abs(float(slope[:2].sum()))

    assert felt(1.0) == pytest.approx(1.9919, abs=1e-3)
    label = 1.0
    for _ in range(100):
        label = float(moved_labels(against(label))["label"][0])
    assert felt(label) < 1e-3
    assert label == pytest.approx(0.0040701 + 0.9959299 * 0.9**100, abs=1e-6)
    kept = moved_labels(against(0.7), gamma=0.0)["label"]
    assert kept.tolist() == pytest.approx([0.7, 0.7])


def test_labels_of_rows_outside_a_pair_stay() -> None:
    batch = grouped([1.0, 0.5, 0.0, 0.2, 0.2], [0, 0, 0, 1, 1])
    label = moved_labels(batch, gamma=0.5)["label"].tolist()
    assert label == pytest.approx([0.75, 1.0, 0.75, 1.0, 1.0])  # margin 0: half-way to 1/2
