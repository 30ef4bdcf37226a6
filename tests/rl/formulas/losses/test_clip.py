"""Clipped losses against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.rl.formulas.batches import flat, slopes, tokens, values
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.losses.clip import (
    clip,
    clip_cov,
    dapo,
    decoupled_clip,
    delta_clip,
    dhpo,
    dual_clip,
    etr,
    kl_cov,
    llds,
)
from tfgrpo.rl.formulas.losses.sequence import gspo

UP, DOWN = math.log(1.25), math.log(0.5)


def test_clip_and_dapo_match_hand_computed_cases() -> None:
    """r = 1.25, 0.5, 1 with A = 2 and A = -2."""
    batch = tokens([[UP, DOWN, 0.0], [UP, DOWN, 0.0]], [2.0, -2.0])
    assert values(clip, batch) == pytest.approx([-2.4, -1.0, -2.0, 2.5, 1.6, 2.0])
    # silent where the clip bites: r > 1.2 with A > 0, r < 0.8 with A < 0
    assert slopes(clip, batch) == pytest.approx([0.0, -1.0, -2.0, 2.5, 0.0, 2.0])
    # 1.25 is inside DAPO's upper bound of 1.28
    assert values(dapo, batch) == pytest.approx([-2.5, -1.0, -2.0, 2.5, 1.6, 2.0])
    assert slopes(dapo, batch)[0] == pytest.approx(-2.5)


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    batch = tokens([[math.log(5.0), math.log(2.0)], [math.log(5.0), 0.0]], [-2.0, 2.0])
    # plain loss of the first token is 10; three times |A| is the ceiling, and it is flat there
    assert values(dual_clip, batch, c=3.0) == pytest.approx([6.0, 4.0, -2.4, -2.0])
    assert slopes(dual_clip, batch, c=3.0) == pytest.approx([0.0, 4.0, 0.0, -2.0])


def test_delta_clip_caps_the_ratio_in_the_plain_arm() -> None:
    batch = tokens([[math.log(5.0), math.log(3.0)], [math.log(5.0), 0.0]], [-2.0, 2.0])
    assert values(delta_clip, batch, delta=4.0) == pytest.approx([8.0, 6.0, -2.4, -2.0])
    assert slopes(delta_clip, batch, delta=4.0) == pytest.approx([0.0, 6.0, 0.0, -2.0])


def test_decoupled_clip_weighs_by_the_capped_behaviour_ratio() -> None:
    """π_old is e^0.5 and e^2 times the engine's; the second is capped at 2."""
    batch = tokens([[0.1, 0.0]], [1.0], behaviour_logp_D=flat([[-1.5, -3.0]]))
    expected = [-math.exp(0.5) * math.exp(0.1), -2.0]
    assert values(decoupled_clip, batch, cap=2.0) == pytest.approx(expected)
    assert slopes(decoupled_clip, batch, cap=2.0) == pytest.approx(expected)
    with pytest.raises(ConfigError, match="behaviour_logp_D"):
        decoupled_clip(tokens([[0.0]], [1.0]))


def etr_batch(gap: float, advantage: float, rewards: list[float]) -> object:
    return tokens(
        [[gap]] * len(rewards),
        [advantage] * len(rewards),
        group_R=torch.zeros(len(rewards), dtype=torch.int64),
        reward_R=torch.tensor(rewards, dtype=torch.float64),
    )


def bound_of(advantage: float, rewards: list[float], **options: float) -> float:
    """Where the surrogate of a far larger ratio is cut: 1 + width."""
    batch = etr_batch(math.log(10.0), advantage, rewards)
    return -values(etr, batch, **options)[0] / advantage


def test_etr_widens_with_advantage_and_group_variance() -> None:
    half, quarter = [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]
    # A = 1: g = 1/2; variance 1/4 of a maximum of 1/4: h = 1
    assert bound_of(1.0, half) == pytest.approx(1 + 0.2 * 1.25 * 1.5)
    assert bound_of(3.0, half) == pytest.approx(1 + 0.2 * (1 + 0.5 * 0.75) * 1.5)
    assert bound_of(1.0, quarter) == pytest.approx(1 + 0.2 * 1.25 * (1 + 0.5 * 0.75))
    assert bound_of(1.0, quarter) < bound_of(1.0, half) < bound_of(3.0, half)
    plain = etr_batch(UP, 2.0, half)
    assert values(etr, plain, k1=0.0, k2=0.0) == pytest.approx(values(clip, plain))


def test_dhpo_is_clip_at_weight_one_and_gspo_at_weight_zero() -> None:
    batch = tokens([[0.3, -0.1], [-0.5, 0.1, 0.0]], [1.5, -1.0])
    as_token = {"eps_low": 0.2, "eps_high": 0.28}
    assert values(dhpo, batch, weight=1.0) == pytest.approx(values(clip, batch, **as_token))
    assert values(dhpo, batch, weight=0.0) == pytest.approx(values(gspo, batch))
    # both parts are clipped before they are mixed: an outlier token is bounded by both ceilings
    outlier = tokens([[5.0]], [1.0])
    assert values(dhpo, outlier, weight=0.5) == pytest.approx([-(0.5 * 1.28 + 0.5 * 1.0004)])


def covariance_batch() -> object:
    """Two groups; token 3 of the first and token 4 of the second have the largest covariance."""
    return tokens(
        [[0.0, 0.1], [0.0, 0.05], [0.1, 0.0], [0.0, 0.0]],
        [1.0, -1.0, 1.0, -1.0],
        old=[[-2.0, -2.0], [-2.0, -6.0], [-0.1, -3.0], [-3.0, -3.0]],
        group_R=torch.tensor([0, 0, 1, 1]),
    )


def brute_covariance(batch: object, members: list[int]) -> list[float]:
    a = [batch.advantage_D[i].item() for i in members]
    p = [batch.logp_D[i].item() for i in members]
    return [(x - sum(a) / len(a)) * (y - sum(p) / len(p)) for x, y in zip(a, p, strict=True)]


def test_kl_cov_penalises_the_tokens_of_largest_covariance() -> None:
    batch = covariance_batch()
    expected = [
        -math.exp(g) * a for g, a in zip([0, 0.1, 0, 0.05, 0.1, 0, 0, 0], [1, 1, -1, -1] * 2)
    ]
    for members in ([0, 1, 2, 3], [4, 5, 6, 7]):
        cov = brute_covariance(batch, members)
        worst = members[cov.index(max(cov))]
        gap = (batch.logp_D[worst] - batch.old_logp_D[worst]).item()
        assert gap > 0  # so that the penalty shows
        expected[worst] += 2.0 * abs(gap)
    assert values(kl_cov, batch, coef=2.0) == pytest.approx(expected)


def test_clip_cov_silences_tokens_inside_the_bounds_only() -> None:
    batch = covariance_batch()
    plain = values(clip, batch)
    # bounds that only token 3 of the first group and token 4 of the second meet
    silenced = values(clip_cov, batch, cov_low=1.5, cov_high=5.0)
    inside = []
    for members in ([0, 1, 2, 3], [4, 5, 6, 7]):
        cov = brute_covariance(batch, members)
        inside += [m for m, c in zip(members, cov, strict=True) if 1.5 < c < 5.0]
    assert inside == [3, 4]
    assert silenced == pytest.approx([0.0 if i in inside else v for i, v in enumerate(plain)])
    assert values(clip_cov, batch, cov_low=50.0, cov_high=60.0) == pytest.approx(plain)
    # token 1 lies above 1 too: of two candidates one is drawn, the same one each time
    drawn = [values(clip_cov, batch, cov_low=1.0, seed=3) for _ in range(2)]
    assert drawn[0] == drawn[1] and sum(drawn[0][i] == 0 for i in (1, 3)) == 1


def test_clip_cov_and_kl_cov_do_not_depend_on_which_groups_share_a_batch() -> None:
    both = covariance_batch()
    first = tokens(
        [[0.0, 0.1], [0.0, 0.05]],
        [1.0, -1.0],
        old=[[-2.0, -2.0], [-2.0, -6.0]],
        group_R=torch.tensor([0, 0]),
    )
    for loss in (clip_cov, kl_cov):
        assert values(loss, both)[:4] == pytest.approx(values(loss, first))


def test_llds_adds_nothing_unless_the_rows_likelihood_fell() -> None:
    """Row 0 fell by 0.2 in sum, row 1 rose though a token fell, row 2 fell with A < 0."""
    batch = tokens([[-0.3, 0.1], [-0.1, 0.3], [-0.3, 0.0]], [1.0, 1.0, -1.0])
    plain = values(clip, batch)
    added = [x - y for x, y in zip(values(llds, batch, lam=0.5), plain, strict=True)]
    assert added == pytest.approx([0.15, 0.0, 0.0, 0.0, 0.0, 0.0])
    steeper = [x - y for x, y in zip(slopes(llds, batch, lam=0.5), slopes(clip, batch))]
    assert steeper == pytest.approx([-0.5, 0.0, 0.0, 0.0, 0.0, 0.0])
    shut = values(llds, batch, lam=0.5, threshold=0.25)
    assert shut == pytest.approx(plain)
    # a row of advantage 0 is held too
    assert values(llds, tokens([[-0.4]], [0.0]), lam=0.5) == pytest.approx([0.2])


def test_llds_by_turn_penalises_the_turns_that_fell() -> None:
    """Turns (−.2, +.1) and (+.3, −.1) of a right row: the row rose, its first turn fell."""
    turn_D = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    batch = tokens([[-0.2, 0.1, 0.3, -0.1]], [0.0], columns={"segment": turn_D})
    assert values(llds, batch, lam=0.2, gate="turn") == pytest.approx([0.04, 0.0, 0.0, 0.0])
    assert values(llds, batch, lam=0.2) == [0.0] * 4
    fallen = tokens([[-0.2, 0.1, -0.3, -0.1]], [0.0], columns={"segment": turn_D})
    found = values(llds, fallen, lam=0.2, gate="turn", lam_last=0.1)
    assert found == pytest.approx([0.04, 0.0, 0.03, 0.01])


def test_a_column_of_widths_widens_and_narrows_the_clip_a_token() -> None:
    width_D = torch.tensor([1.5, 1.0, 0.5, 9.0], dtype=torch.float64)
    batch = tokens([[UP, UP, math.log(1.15), math.log(1e-3)]], [1.0], columns={"width": width_D})
    assert slopes(clip, batch) == pytest.approx([-1.25, 0.0, 0.0, -1e-3])
    assert slopes(dapo, batch)[1] == pytest.approx(-1.25)
