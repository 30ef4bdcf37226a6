"""Score-function losses against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.rl.formulas.batches import slopes, tokens, values
from tfgrpo.rl.formulas.losses.clip import clip
from tfgrpo.rl.formulas.losses.score import (
    asymre,
    cispo,
    dispo,
    dppo_kl,
    dppo_tv,
    importance_sampling,
    minpro,
    opmd,
    rec_k2,
    rec_one_side,
    rec_ring,
    rec_two_side,
    reinforce,
    sapo,
    topr,
)

RATIOS = [0.1, 0.3, 0.9, 1.1, 2.0, 7.0]
GAPS = [math.log(r) for r in RATIOS]


def both_signs() -> object:
    """Each ratio once with A = 1 and once with A = -1."""
    return tokens([GAPS, GAPS], [1.0, -1.0])


def test_reinforce_matches_the_closed_form() -> None:
    batch = tokens([[0.5, 0.0], [0.0]], [2.0, -3.0])
    assert values(reinforce, batch) == pytest.approx([1.0, 2.0, -3.0])
    assert slopes(reinforce, batch) == pytest.approx([-2.0, -2.0, 3.0])


def test_importance_sampling_has_the_gradient_of_the_ratio() -> None:
    batch = both_signs()
    (direct,) = torch.autograd.grad(
        (-(batch.logp_D - batch.old_logp_D).exp() * batch.advantage_D).sum(), batch.logp_D
    )
    assert slopes(importance_sampling, batch) == pytest.approx(direct.tolist())
    assert slopes(importance_sampling, batch)[:6] == pytest.approx([-r for r in RATIOS])


def test_cispo_and_dispo_match_their_four_regimes() -> None:
    batch = both_signs()
    capped = [min(r, 5.0) for r in RATIOS]
    assert slopes(cispo, batch) == pytest.approx([-r for r in capped] + capped)
    right = [min(max(r, 0.5), 3.0) for r in RATIOS]
    wrong = [min(max(r, 0.2), 1.5) for r in RATIOS]
    bounds = {"low_right": 0.5, "high_right": 3.0, "low_wrong": 0.2, "high_wrong": 1.5}
    assert slopes(dispo, batch, **bounds) == pytest.approx([-r for r in right] + wrong)
    assert all(s != 0 for s in slopes(dispo, batch, **bounds))
    same = {"low_right": 0.0, "high_right": 5.0, "low_wrong": 0.0, "high_wrong": 5.0}
    assert slopes(dispo, batch, **same) == pytest.approx(slopes(cispo, batch))


def test_sapo_has_slope_one_on_policy_and_matches_the_sigmoid() -> None:
    on_policy = tokens([[0.0], [0.0]], [2.0, -2.0])
    assert slopes(sapo, on_policy) == pytest.approx([-2.0, 2.0])
    assert values(sapo, on_policy) == pytest.approx([-4.0, 4.0 / 1.05])
    off = tokens([[math.log(2.0)], [math.log(2.0)]], [1.0, -1.0])
    expected = [-4 / (1 + math.exp(-1.0)), 4 / 1.05 / (1 + math.exp(-1.05))]
    assert values(sapo, off) == pytest.approx(expected)


def test_topr_tapers_negatives_only() -> None:
    tapered = [min(r, 1.0) for r in RATIOS]
    assert slopes(topr, both_signs()) == pytest.approx([-1.0] * 6 + tapered)
    low = tokens([[GAPS[0]]], [0.2])
    assert slopes(topr, low, threshold=0.5) == pytest.approx([-0.2 * 0.1])


def test_opmd_divides_reinforce_by_one_plus_tau() -> None:
    batch = tokens([[0.5, 0.0]], [2.0])
    assert values(opmd, batch, tau=3.0) == pytest.approx([0.25, 0.5])
    assert slopes(opmd, batch, tau=0.0) == pytest.approx([-2.0, -2.0])


def test_asymre_equals_reinforce_with_a_shifted_advantage() -> None:
    plain = tokens([[0.2, 0.0], [0.1]], [1.0, -1.0])
    shifted = tokens([[0.2, 0.0], [0.1]], [1.1, -0.9])
    assert values(asymre, plain, coef=0.1) == pytest.approx(values(reinforce, shifted))
    assert slopes(asymre, tokens([[0.0]], [0.0]), coef=0.1) == pytest.approx([-0.1])


def test_rec_one_side_has_the_gradient_of_clip() -> None:
    batch = both_signs()
    assert slopes(rec_one_side, batch) == pytest.approx(slopes(clip, batch))
    kept = [s / -a for s, a in zip(slopes(rec_one_side, batch, importance=0.0), [1] * 6 + [-1] * 6)]
    assert kept == pytest.approx([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1])


def test_rec_two_side_and_ring_keep_the_stated_tokens() -> None:
    batch = both_signs()
    two = [abs(s) for s in slopes(rec_two_side, batch)]
    assert two == pytest.approx([0, 0, 0.9, 1.1, 0, 0] * 2)
    # outer bounds 1 - 0.6 and 1 + 2: 0.1 and 0.3 return for A > 0, 7 for A < 0
    ring = [abs(s) for s in slopes(rec_ring, batch)]
    assert ring == pytest.approx([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1])


def test_rec_k2_pulls_back_to_the_old_policy() -> None:
    batch = tokens([[0.5, -0.5]], [0.0])
    assert values(rec_k2, batch, coef=0.1) == pytest.approx([0.025, 0.025])
    assert slopes(rec_k2, batch, coef=0.1) == pytest.approx([0.1, -0.1])


def test_dppo_masks_match_the_closed_forms() -> None:
    """π_old 0.5 moves to 0.9, 0.6 and 0.1: by +0.4, +0.1 and −0.4."""
    new = [0.9, 0.6, 0.1]
    gaps = [math.log(p / 0.5) for p in new]
    old = [[math.log(0.5)] * 3] * 2
    batch = tokens([gaps, gaps], [1.0, -1.0], old=old)
    ratio = [p / 0.5 for p in new]
    assert slopes(dppo_tv, batch) == pytest.approx([0, -ratio[1], -ratio[2], ratio[0], ratio[1], 0])

    def divergence(p: float) -> float:
        return 0.5 * math.log(0.5 / p) + 0.5 * math.log(0.5 / (1 - p))

    limit = divergence(0.6) + 1e-6
    assert divergence(0.9) > limit and divergence(0.1) > limit
    found = slopes(dppo_kl, batch, d_low=limit, d_high=limit)
    # too far but against the advantage is allowed
    assert found == pytest.approx([0, -ratio[1], -ratio[2], ratio[0], ratio[1], 0])
    tight = slopes(dppo_kl, batch, d_low=1e-9, d_high=1e-9)
    assert tight == pytest.approx([0, 0, -ratio[2], ratio[0], ratio[1], 0])


def test_minpro_uses_the_smallest_earlier_ratio() -> None:
    batch = tokens([[math.log(2.0), math.log(0.5), math.log(3.0)], [0.0]], [1.0, 1.0])
    assert slopes(minpro, batch) == pytest.approx([-2.0, -1.0, -1.5, -1.0])
    assert slopes(minpro, batch, cap=1.2) == pytest.approx([-1.2, -1.0, -1.2, -1.0])
