"""Advantages moved by likelihood, behaviour, context or staleness."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests.rl.formulas.batches import rewards
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.advantages.group import dr_grpo, grpo
from tfgrpo.rl.formulas.advantages.weighted import (
    WEIGHTED_ADVANTAGES,
    aspo,
    asymre_baseline,
    canon,
    d3s,
    dagrpo,
    grounded,
    nudge,
    opmd_soft,
    r3l,
    unlikeliness_grpo,
    vcpo,
    xrpo,
)


def test_unlikeliness_prefers_the_rare_right_answer() -> None:
    """All right; log π per token −3, −1, −2: ranks 0, 2, 1, rewards 1, 5/6, 11/12."""
    batch = rewards([1, 1, 1], lengths=[2, 4, 1], logp_R=np.array([-6.0, -4.0, -2.0]))
    scaled = np.array([1, 1 - 0.25 * 2 / 3, 1 - 0.25 / 3])
    expected = (scaled - scaled.mean()) / scaled.std(ddof=1)
    found = unlikeliness_grpo(batch, eps=0)
    assert found.tolist() == pytest.approx(expected.tolist())
    assert found.argmax() == 0
    with pytest.raises(ConfigError, match="logp_R"):
        unlikeliness_grpo(rewards([1, 0]))


def test_xrpo_sharpens_right_answers_only() -> None:
    batch = rewards([1, 1, 0, 0], lengths=[1, 2, 1, 1], logp_R=np.array([-3.0, -2.0, -1.0, -3.0]))
    plain = grpo(batch, eps=0)
    found = xrpo(batch, lam=0.1, cap=0.5, eps=0)
    novelty = np.exp(-2.0 - np.array([-3.0, -1.0, -1.0, -3.0]))
    assert found[:2].tolist() == pytest.approx((plain[:2] + 0.1 * novelty[:2]).tolist())
    assert found[2:].tolist() == plain[2:].tolist()
    assert xrpo(batch, lam=100.0, eps=0)[:2].tolist() == pytest.approx((1.5 * plain[:2]).tolist())


def test_aspo_never_flips_a_sign_and_leaves_wrong_answers() -> None:
    batch = rewards([1, 1, 0, 0], extra={"statistic_R": np.array([0.0, 90.0, 20.0, 30.0])})
    plain = grpo(batch, eps=0)
    found = aspo(batch, delta=1.0, scale=1.0, k=0.5, eps=0)
    assert found.tolist() == pytest.approx([1.5 * plain[0], 0.5 * plain[1], plain[2], plain[3]])
    small = aspo(batch, delta=0.001, eps=0)
    assert small[0] == pytest.approx(plain[0] + 0.035)
    assert (np.sign(found) == np.sign(plain)).all()
    with pytest.raises(ConfigError, match="statistic_R"):
        aspo(rewards([1, 0]))


def test_canon_ignores_the_direction_of_its_metric() -> None:
    metric = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    batch = rewards([1, 0, 1, 1, 0], extra={"metric_R": metric})
    found = canon(batch, mu=0.25)
    low, high = 0.5, 0.5
    expected = [
        1 - (0.25 * high + 0.75 * low),
        0 - (0.25 * high + 0.75 * low),
        1 - 0.6,  # the middle one is compared with the whole group
        1 - (0.25 * low + 0.75 * high),
        0 - (0.25 * low + 0.75 * high),
    ]
    assert found.tolist() == pytest.approx(expected)
    turned = rewards([1, 0, 1, 1, 0], extra={"metric_R": -metric})
    assert canon(turned, mu=0.25).tolist() == pytest.approx(found.tolist())
    inter = canon(rewards([1, 1, 0, 0], extra={"metric_R": metric[:4]}), mu=1.0)
    assert inter.tolist() == [1, 1, -1, -1]  # the low half pays
    intra = canon(rewards([1, 1, 0, 0], extra={"metric_R": metric[:4]}), mu=0.0)
    assert intra.tolist() == [0, 0, 0, 0]


def test_dagrpo_silences_near_duplicates_of_opposite_label() -> None:
    batch = rewards([1, 0, 1, 0], extra={"score_R": np.array([0.50, 0.52, 0.58, 0.45])})
    plain = grpo(batch, eps=0)
    found = dagrpo(batch, delta=0.1, eps=0)
    assert found.tolist() == [0.0, 0.0, plain[2], plain[3]]
    assert dagrpo(batch, delta=0.0, eps=0).tolist() == plain.tolist()


def test_d3s_keeps_the_subset_of_largest_variance() -> None:
    group = [0.1, 0.9, 0.5, 0.4, 1.0, 0.2, 0.45]
    batch = rewards(group)
    plain, found = grpo(batch), d3s(batch, keep=4)
    kept = np.flatnonzero(found)
    best = max(itertools.combinations(range(7), 4), key=lambda s: np.var(plain[list(s)]))
    assert sorted(kept) == sorted(best)
    assert found[kept].tolist() == plain[kept].tolist()
    assert d3s(batch, keep=7).tolist() == plain.tolist()
    binary = d3s(rewards([1, 1, 1, 1, 1, 1, 0, 0]), keep=4)
    assert (np.sign(binary) > 0).sum() == (np.sign(binary) < 0).sum() == 2


def test_nudge_matches_its_two_levels() -> None:
    batch = rewards([1, 0, 1, 1, 0, 1], extra={"context_R": np.array([0, 0, 1, 1, -1, -1])})
    whole = 4 / 6
    raw = np.array([0.5 + 0.1 * (0.5 - whole)] * 2 + [0.1 * (1 - whole)] * 2 + [-whole, 1 - whole])
    raw[1] -= 1
    expected = (raw - raw.mean()) / raw.std()
    assert nudge(batch, lam=0.1, eps=0).tolist() == pytest.approx(expected.tolist())
    in_context = rewards([1, 0, 1, 1], extra={"context_R": np.array([0, 0, 1, 1])})
    assert nudge(in_context, lam=1.0, eps=0).tolist() == pytest.approx(
        grpo(in_context, eps=0, ddof=0).tolist()
    )
    within = nudge(in_context, lam=0.0, eps=0)
    assert within[2:].tolist() == [0.0, 0.0]  # no credit between contexts


def test_opmd_soft_and_asymre_move_the_baseline() -> None:
    batch = rewards([1.0, 0.0, 0.0], [0.5, 0.5])
    soft = 0.5 * math.log((math.exp(2.0) + 2) / 3)
    assert opmd_soft(batch, tau=0.5).tolist() == pytest.approx([1 - soft, -soft, -soft, 0, 0])
    assert opmd_soft(batch, tau=1e6)[:3].tolist() == pytest.approx(
        [2 / 3, -1 / 3, -1 / 3], abs=1e-5
    )
    shifted = asymre_baseline(batch, shift=-0.1)
    assert shifted.tolist() == pytest.approx([2 / 3 + 0.1, -1 / 3 + 0.1, -1 / 3 + 0.1, 0.1, 0.1])
    assert (shifted > dr_grpo(batch)).all()


def test_r3l_amplifies_positives() -> None:
    batch = rewards([1.0, 0.6, 0.2, 0.2], [1.0, 1.0])
    assert r3l(batch).tolist() == pytest.approx([1.0, 0.3, -0.3, -0.3, 1.0, 1.0])


def test_vcpo_baseline_has_the_least_variance() -> None:
    """Of all constant baselines, it minimises Σ w² g² (R − b)²."""
    ratio, norm = np.array([1.0, 0.5, 2.0, 1.0]), np.array([1.0, 2.0, 1.0, 3.0])
    batch = rewards([1, 0, 1, 0], extra={"ratio_R": ratio, "score_norm_R": norm})
    energy = (ratio * norm) ** 2
    base = (energy * batch.reward_R).sum() / energy.sum()
    found = vcpo(batch, scaled=0)
    assert found.tolist() == pytest.approx((batch.reward_R - base).tolist())
    for other in (base - 0.01, base + 0.01, 0.5):
        assert (energy * found**2).sum() < (energy * (batch.reward_R - other) ** 2).sum()
    typed = {"ratio_R": np.ones(4), "score_norm_R": np.ones(4)}
    # b = .25, population deviation .4330
    assert vcpo(rewards([1, 0, 0, 0], extra=typed)).tolist() == pytest.approx(
        [1.7321, *[-0.5774] * 3], abs=5e-5
    )


def test_vcpo_asks_for_shorter_steps_where_few_rollouts_carry_the_weight() -> None:
    step = WEIGHTED_ADVANTAGES["vcpo"].after_step
    cases = [
        ([1, 0, 0, 0], 1.0, 0.5),
        ([1, 1, 1, 1], 1.0, 1.0),
        ([2, *[0] * 8], 1.0, 1 / 3),
        ([1, 1], 0.5, 1.0),
    ]
    for ratio, base, expected in cases:
        batch = rewards([0] * len(ratio), extra={"ratio_R": np.array(ratio, dtype=float)})
        assert step({}, batch, {"base": base}) == {"lr_scale": pytest.approx(expected)}


def test_grounded_raises_right_answers_by_their_evidence() -> None:
    overlap_R = np.array([1.0, 0.0, 0.5, 1.0])
    batch = rewards([1.0, 1.0, 0.0, 0.0], extra={"overlap_R": overlap_R})
    plain = grpo(batch)
    expected = [1.5 * plain[0], plain[1], plain[2], plain[3]]
    assert grounded(batch, c=0.5).tolist() == pytest.approx(expected)
    none = rewards([1.0, 0.0], extra={"overlap_R": np.zeros(2)})
    assert grounded(none).tolist() == grpo(none).tolist()
