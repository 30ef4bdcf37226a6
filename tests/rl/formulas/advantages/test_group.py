"""Advantages from rewards alone, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import beta as beta_distribution

from tests.rl.formulas.batches import rewards
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.advantages.group import (
    batch_std,
    bnpo,
    dr_grpo,
    gpg,
    grpo,
    maxrl,
    mc_grpo,
    median_centred,
    ngrpo,
    opo,
    pass_at_k,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    win_rate,
)


def test_grpo_matches_hand_computed_groups() -> None:
    batch = rewards([1, 0, 1, 0], [0, 0, 0, 0], [3, 0, 0])
    half = 0.5 / math.sqrt(1 / 3)
    expected = [half, -half, half, -half, 0, 0, 0, 0, *(np.array([2, -1, -1]) / math.sqrt(3))]
    assert grpo(batch, eps=0).tolist() == pytest.approx(expected)
    assert grpo(batch, eps=0, ddof=0)[:4].tolist() == pytest.approx([1, -1, 1, -1])
    assert grpo(batch, eps=0.5)[8] == pytest.approx(2 / (math.sqrt(3) + 0.5))


def test_interleaved_prompts_are_grouped_by_identity_and_not_by_position() -> None:
    """P1 P2 P1 P2 …, rewards 1 0 0 0 1 0 0 0: P2 has no signal, P1 has ±0.866."""
    batch = rewards([1, 0, 0, 0, 1, 0, 0, 0])
    batch = type(batch)(batch.reward_R, np.array([0, 1] * 4), batch.length_R)
    found = grpo(batch, eps=0)
    assert found[::2].tolist() == pytest.approx([0.8660254, -0.8660254, 0.8660254, -0.8660254])
    assert found[1::2].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert grpo(batch, eps=0, ddof=0)[::2].tolist() == pytest.approx([1, -1, 1, -1])
    order = np.random.default_rng(0).permutation(8)
    moved = type(batch)(batch.reward_R[order], batch.group_R[order], batch.length_R)
    assert grpo(moved, eps=0).tolist() == found[order].tolist()


def test_dr_grpo_and_rloo_match_their_definitions() -> None:
    batch = rewards([1.0, 0.25, 0.5], [2.0, 0.0])
    assert dr_grpo(batch).tolist() == pytest.approx([5 / 12, -1 / 3, -1 / 12, 1, -1])
    others = [1.0 - 0.375, 0.25 - 0.75, 0.5 - 0.625, 2.0, -2.0]
    assert rloo(batch).tolist() == pytest.approx(others)


def test_batch_std_divides_by_the_deviation_of_all_rewards() -> None:
    batch = rewards([1, 0], [1, 1, 1, 0])
    deviation = np.std([1, 0, 1, 1, 1, 0], ddof=1)
    expected = np.array([0.5, -0.5, 0.25, 0.25, 0.25, -0.75]) / deviation
    assert batch_std(batch, eps=0).tolist() == pytest.approx(expected.tolist())


def test_reinforce_pp_whitens_over_tokens() -> None:
    lengths = [1, 3, 2, 2]
    batch = rewards([1, 0], [1, 1], lengths=lengths)

    def by_tokens(value: list[float]) -> list[float]:
        every = np.repeat(value, lengths)
        return ((np.array(value) - every.mean()) / every.std(ddof=1)).tolist()

    assert reinforce_pp(batch).tolist() == pytest.approx(by_tokens([1, 0, 1, 1]), rel=1e-6)
    centred = by_tokens([0.5, -0.5, 0, 0])
    assert reinforce_pp_baseline(batch).tolist() == pytest.approx(centred, rel=1e-6)
    assert reinforce_pp(rewards([1, 1], lengths=[3, 4])).tolist() == [0.0, 0.0]


def test_remax_subtracts_the_greedy_reward() -> None:
    batch = rewards([1, 0], [1, 1], baseline_R=np.array([1.0, 1.0, 0.25, 0.25]))
    assert remax(batch).tolist() == [0.0, -1.0, 0.75, 0.75]
    with pytest.raises(ConfigError, match="baseline_R"):
        remax(rewards([1, 0]))


def test_opo_weighs_the_baseline_by_length() -> None:
    batch = rewards([1, 0, 1], lengths=[2, 6, 4])
    assert opo(batch).tolist() == pytest.approx([0.5, -0.5, 0.5])
    equal = rewards([1, 0, 0], lengths=[5, 5, 5])
    assert opo(equal).tolist() == pytest.approx(dr_grpo(equal).tolist())


def test_gpg_scales_by_the_share_of_non_zero_rewards() -> None:
    batch = rewards([1, 0, 0, 0], [0, 0, 0, 0])
    assert gpg(batch, f_norm=2.0).tolist() == pytest.approx([3, -1, -1, -1, 0, 0, 0, 0])


def test_maxrl_divides_by_the_success_rate() -> None:
    batch = rewards([1, 0, 0, 0], [0, 0])
    assert maxrl(batch).tolist() == pytest.approx([3, -1, -1, -1, 0, 0])


def test_pass_at_k_credits_the_single_best_rollout() -> None:
    batch = rewards([0.2, 1.0, 0.6], [1.0, 1.0, 0.0])
    lead = 0.4 / np.std([0.2, 1.0, 0.6], ddof=1)
    assert pass_at_k(batch, eps=0).tolist() == pytest.approx([0, lead, 0, 0, 0, 0])


def test_bnpo_matches_the_beta_density() -> None:
    batch = rewards([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1])
    rates = np.array([0.25, 0.5, 0.75, 1.0])
    strength = rates.mean() * (1 - rates.mean()) / rates.var(ddof=1) - 1
    a = max(1, 1 + rates.mean() * strength / 3)
    b = max(1, 1 + (1 - rates.mean()) * strength / 3)
    assert a > 1 and b > 1  # so that the density counts
    expected = [
        (r - p) / beta_distribution.pdf(p, a, b) if p < 1 else 0.0
        for p, group in zip(rates, np.split(batch.reward_R, 4), strict=True)
        for r in group
    ]
    assert bnpo(batch).tolist() == pytest.approx(expected)


def test_bnpo_takes_the_sample_variance_of_the_success_rates() -> None:
    """Rates .25 and .75: variance .125, strength 1, both parameters 1.1667, density 1.0466."""
    found = bnpo(rewards([1, 0, 0, 0], [1, 1, 1, 0])).tolist()
    assert found == pytest.approx([0.7166, *[-0.2389] * 3, *[0.2389] * 3, -0.7166], abs=5e-5)


def test_bnpo_is_reinforce_or_grpo_at_fixed_parameters() -> None:
    batch = rewards([1, 0, 0, 0], [1, 1, 1, 0])
    assert bnpo(batch, alpha=1, beta=1).tolist() == pytest.approx(dr_grpo(batch).tolist())
    ratio = grpo(batch, eps=0, ddof=0) / bnpo(batch, alpha=1.5, beta=1.5)
    assert ratio.tolist() == pytest.approx([8 / math.pi] * 8)
    alone = rewards([1, 0, 0, 0])  # one prompt has no spread of rates
    assert bnpo(alone).tolist() == pytest.approx(dr_grpo(alone).tolist())
    with pytest.raises(ConfigError, match=r"rewards in \[0, 1\]"):
        bnpo(rewards([5, 1], [0, 0]))


def test_ngrpo_matches_the_published_values() -> None:
    wrong, right, half = [0.0] * 8, [1.0] * 8, [1.0] * 4 + [0.0] * 4
    found = ngrpo(rewards(wrong, right, half), eps=0)
    assert found[:8].tolist() == pytest.approx([-1 / 3] * 8)
    assert found[8:16].tolist() == [0.0] * 8
    assert found[16].item() == pytest.approx(0.843, abs=5e-4)
    assert found[20].item() == pytest.approx(-1.054, abs=5e-4)
    assert abs(found[16:].sum()) > 0.1


def test_mc_grpo_keeps_binary_rewards_finite() -> None:
    batch = rewards([1, 1, 0, 0, 0], [0.1, 0.9, 0.5])
    std = np.std([1, 1, 0, 0, 0], ddof=1)
    expected = [1 / std, 1 / std, 0, 0, 0, -1, 1, 0]
    assert mc_grpo(batch, eps=0).tolist() == pytest.approx(expected)
    assert np.abs(mc_grpo(batch)).max() < 3
    assert mc_grpo(batch, scaled=0).tolist() == pytest.approx([1, 1, 0, 0, 0, -0.4, 0.4, 0])
    assert mc_grpo(batch, scaled=0, refill=1)[:2].tolist() == pytest.approx([2.5, 2.5])


def test_mc_grpo_drops_one_of_an_odd_group_and_ignores_an_outliers_size() -> None:
    for outlier in (2.0, 2000.0):
        found = mc_grpo(rewards([0.1, 0.2, 0.3, 0.4, outlier]))
        assert np.sign(found).tolist() == [-1, -1, 0, 1, 1]


def test_median_centred_and_win_rate_match_hand_computed_groups() -> None:
    batch = rewards([0.0, 1.0, 0.25], [1.0, 1.0])
    assert median_centred(batch).tolist() == [-0.25, 0.75, 0.0, 0.0, 0.0]
    assert win_rate(batch).tolist() == pytest.approx([-1 / 3, 1 / 3, 0, 0, 0])
    tie = win_rate(rewards([1.0, 1.0, 0.0, 0.0]))
    assert tie.tolist() == pytest.approx([0.25, 0.25, -0.25, -0.25])
    assert (tie + 0.5).sum() == pytest.approx(2.0)  # half of the group's size
