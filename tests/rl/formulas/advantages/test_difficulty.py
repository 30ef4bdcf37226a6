"""Advantages weighted by difficulty and uncertainty."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.rl.formulas.batches import rewards
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.advantages.difficulty import (
    DIFFICULTY_ADVANTAGES,
    a_grae,
    dgpo,
    riskpo,
    seed_exponential,
    seed_focal,
    seed_linear,
)
from tfgrpo.rl.formulas.advantages.group import dr_grpo, grpo


def test_dgpo_gives_every_mixed_group_the_same_total() -> None:
    """p = 1/4 of 8 gives +2 and −2/3, before weights that average 1 over mixed groups."""
    quarter = rewards([1, 1, 0, 0, 0, 0, 0, 0])
    assert dgpo(quarter, eps=0).tolist() == pytest.approx([2, 2] + [-2 / 3] * 6)
    both = rewards([1, 1, 0, 0, 0, 0, 0, 0], [1] * 6 + [0] * 2, [1] * 8)
    found = dgpo(both, eps=0, temperature=2.0) * 2 / 3  # one of three groups is flat
    hard, easy = math.exp(-0.25 / 2), math.exp(-0.75 / 2)
    total = [np.abs(found[i : i + 8]).sum() for i in (0, 8, 16)]
    assert total == pytest.approx([8 * 2 * hard / (hard + easy), 8 * 2 * easy / (hard + easy), 0])
    assert total[0] + total[1] == pytest.approx(16)
    plain = [np.abs(grpo(rewards([1] * k + [0] * (8 - k)), eps=0, ddof=0)).sum() for k in (1, 4)]
    assert plain == pytest.approx([5.29, 8.0], abs=5e-3)  # what GRPO gives instead


def test_dgpo_makes_up_for_the_tokens_of_flat_groups() -> None:
    """One mixed group of two of equal length: all advantages are doubled."""
    found = dgpo(rewards([1, 0, 0, 0], [1, 1, 1, 1]), eps=0)
    assert found.tolist() == pytest.approx([4.0, *[-1.3333] * 3, *[0.0] * 4], abs=5e-5)


def test_seed_shrinks_uncertain_groups() -> None:
    group = [1.0, 0.0, 1.0, 0.0]
    same = rewards(group, answer_R=["a"] * 4)
    mixed = rewards(group, answer_R=["a", "b", "a", "c"])
    every = rewards(group, answer_R=["a", "b", "c", "d"])
    plain = dr_grpo(same)
    # three clusters of shares 1/2, 1/4, 1/4: mean of log 2, log 4, log 4 over log 4
    x = (math.log(2) + 2 * math.log(4)) / 3 / math.log(4)
    shapes = {
        seed_linear: lambda x: 1 - x,
        seed_exponential: lambda x: math.exp(-x),
        seed_focal: lambda x: (1 - x) ** 2,
    }
    for estimator, shape in shapes.items():
        assert estimator(same).tolist() == pytest.approx(plain.tolist())
        assert estimator(mixed).tolist() == pytest.approx((plain * shape(x)).tolist())
        assert estimator(every).tolist() == pytest.approx((plain * shape(1.0)).tolist())
        assert estimator(mixed, alpha=0.0).tolist() == pytest.approx(plain.tolist())
    with pytest.raises(ConfigError, match="answer_R"):
        seed_linear(rewards(group))


def test_a_grae_damps_positives_and_crosses_over() -> None:
    batch = rewards([1, 1, 1, 0], [1, 0, 0, 0])
    plain = grpo(batch, eps=0)
    early = a_grae(batch, factor=0.5, progress=0.0, eps=0)
    late = a_grae(batch, factor=0.5, progress=1.0, eps=0)
    assert early[3] == pytest.approx(plain[3] * 2 * 0.75)
    assert early[0] == pytest.approx(0.5 * plain[0] * 2 * 0.75)
    assert late[3] == pytest.approx(plain[3] * 2 * 0.25)
    assert late[4] == pytest.approx(0.5 * plain[4] * 2 * 0.75)
    halfway = a_grae(batch, factor=1.0, progress=0.5, eps=0)
    assert halfway.tolist() == pytest.approx(plain.tolist())


def test_riskpo_matches_the_mixed_value_at_risk() -> None:
    """Two bundles of two questions, two responses each: papers of score 2, 0, 1 and 1."""
    batch = rewards([1, 0], [1, 0], [1, 0], [0, 1])
    low, high, d, u, w = 0.5, 1.5, 0.2, 0.8, 1.5

    def risk(s: float, natural: bool) -> float:
        band = max(s - low, 0) - max(s - high, 0) + (low - high if natural else 0.0)
        tail = -max(low - s, 0) / d
        return (w * tail + band / (u - d)) / (w + 1)

    fixed = {"bundle": 2, "d": d, "u": u, "w": w, "q_low": low, "q_high": high}
    for natural in (True, False):
        expected = [risk(s, natural) for s in (2, 0, 2, 0, 1, 1, 1, 1)]
        found = riskpo(batch, natural_baseline=natural, **fixed)
        assert found.tolist() == pytest.approx(expected)


ONE_BUNDLE = ([1, 0, 0, 0], [1, 1, 1, 0])
"""Paper scores 2, 1, 1, 0 of sample deviation .8165; risks 0, −.2667, −.2667, −2.3333."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, -0.2667, -0.2667, -2.3333] * 2),
        ({"scaled": 1}, [0, -0.3266, -0.3266, -2.8577] * 2),
        ({"scaled": 1, "credit": "std"}, [0, -0.6532, -0.6532, -5.7155] * 2),
        # R − mean: .75 and .25 (sum 1), −.25 and .25 (sum 0: halves), …, −.25 and −.75 (sum −1)
        ({"credit": "share"}, [0, -0.1333, -0.1333, -0.5833, 0, -0.1333, -0.1333, -1.75]),
    ],
)
def test_riskpo_spreads_a_papers_risk_on_its_questions(
    options: dict[str, Any], expected: list[float]
) -> None:
    found = riskpo(rewards(*ONE_BUNDLE), bundle=2, **options)
    assert found.tolist() == pytest.approx(expected, abs=5e-5)


def test_riskpo_without_a_history_takes_each_bundles_own_quantiles() -> None:
    """Bundles of scores 2, 0, 0, 0 and 2, 2, 2, 0 give a failing paper −.5333 and −4.1333."""
    batch = rewards([1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0])
    found = riskpo(batch, bundle=2)
    assert found[3] == pytest.approx(-0.5333, abs=5e-5)
    assert found[11] == pytest.approx(-4.1333, abs=5e-5)
    tracked = {"q_low": 0.0, "q_high": 2.0}
    both = riskpo(batch, bundle=2, quantiles="mix", **tracked)
    assert both[3] == pytest.approx((-(0.8 + 2) / 2 / 0.6) / 2.5)  # q 0 and 1.4, their own: 0, .8
    assert riskpo(batch, bundle=2, quantiles="batch", **tracked).tolist() == found.tolist()
    with pytest.raises(ConfigError, match="allowed are uniform, std, share and track, batch, mix"):
        riskpo(batch, credit="score")


def test_riskpo_without_tail_over_all_levels_is_affine_in_the_score() -> None:
    batch = rewards([0.1, 0.9, 0.4], [0.3, 0.2, 0.8])
    found = riskpo(batch, bundle=2, d=0.0, u=1.0, w=0.0)
    scores = np.array([0.4, 1.1, 1.2])
    assert found.tolist() == pytest.approx([*(scores - scores.max())] * 2)


def test_riskpo_gives_all_wrong_questions_a_signal_through_their_bundle() -> None:
    """Question 0 is always wrong; its rollouts are paid with question 1's. Surplus gets 0."""
    found = riskpo(rewards([0, 0], [1, 0, 1]), bundle=2)
    assert found[0] == found[2] != found[1] == found[3]
    assert found[4] == 0.0


def test_a_tracked_quantile_converges_on_a_known_distribution() -> None:
    """Level .8 of a standard normal is .8416."""
    draw, state, seen = np.random.default_rng(1), {}, []
    track = DIFFICULTY_ADVANTAGES["riskpo"].after_step
    for _ in range(4000):
        state = track(state, rewards(draw.normal(size=64)), {"bundle": 1, "lr": 0.05})
        seen.append(state["q_high"])
    assert np.mean(seen[500:]) == pytest.approx(0.8416, abs=0.05)
    assert min(seen[500:]) > 0.6 and max(seen[500:]) < 1.1
