"""Row-level losses against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.rl.formulas.batches import slopes, tokens, values
from tfgrpo.rl.formulas.losses.sequence import gmpo, gspo, gspo_token, luspo, p3o, vespo


def test_gspo_matches_hand_computed_rows() -> None:
    """Mean log-ratios 0.0002 (inside), 0.01 (above) and -0.01 (below the band)."""
    batch = tokens([[0.0004, 0.0], [0.03, -0.01], [-0.01]], [2.0, 1.0, -1.0])
    inside = -2.0 * math.exp(0.0002)
    assert values(gspo, batch) == pytest.approx([inside, inside, -1.0004, -1.0004, 1 - 3e-4])
    # each of two tokens carries the row's value, so its slope is twice half of it
    assert slopes(gspo, batch) == pytest.approx([inside, inside, 0.0, 0.0, 0.0])


def test_gspo_token_has_the_values_of_gspo_and_token_gradients() -> None:
    batch = tokens([[0.0004, 0.0], [0.03, -0.01], [-0.0001]], [2.0, 1.0, -1.0])
    assert values(gspo_token, batch) == pytest.approx(values(gspo, batch))
    ones = [-2.0 * math.exp(0.0002)] * 2 + [0.0, 0.0] + [math.exp(-0.0001)]
    assert slopes(gspo_token, batch) == pytest.approx(ones)
    # unlike gspo, one token's advantage moves that token only
    mixed = tokens([[0.0, 0.0]], [[1.0, -3.0]])
    assert slopes(gspo_token, mixed) == pytest.approx([-1.0, 3.0])
    assert slopes(gspo, mixed) == pytest.approx([1.0, 1.0])


def test_gmpo_matches_the_clipped_geometric_mean() -> None:
    batch = tokens([[0.6, -0.8], [0.6, -0.8], [0.1]], [2.0, -2.0, 0.0])
    good = -2.0 * math.exp((0.4 - 0.8) / 2)  # only the upper side is clipped
    bad = 2.0 * math.exp((0.6 - 0.4) / 2)  # only the lower side
    assert values(gmpo, batch) == pytest.approx([good, good, bad, bad, 0.0])
    assert slopes(gmpo, batch) == pytest.approx([0.0, good, bad, 0.0, 0.0])


def test_luspo_is_gspo_times_length() -> None:
    batch = tokens([[0.001, 0.002, 0.0], [0.01]], [1.0, -2.0])
    wide = {"eps_low": 2e-3, "eps_high": 2.5e-3}
    plain = values(gspo, batch, **wide)
    assert values(luspo, batch, **wide) == pytest.approx([3 * v for v in plain[:3]] + plain[3:])
    assert plain[0] == pytest.approx(-math.exp(0.001))
    assert plain[3] == pytest.approx(2 * math.exp(0.01))  # A < 0 above the band: not clipped


def test_vespo_weight_is_one_on_policy_and_follows_the_closed_form() -> None:
    on_policy = tokens([[0.0, 0.0], [0.0]], [1.0, -2.0])
    assert slopes(vespo, on_policy) == pytest.approx([-1.0, -1.0, 2.0])
    w = math.exp(0.3)
    off = tokens([[0.1, 0.2], [0.3]], [1.0, -1.0])
    positive = math.exp(3) * w**2 * math.exp(-3 * w)
    negative = math.exp(2) * w**3 * math.exp(-2 * w)
    assert slopes(vespo, off) == pytest.approx([-positive, -positive, negative])


def p3o_batch(shift: float) -> object:
    return tokens(
        [[0.05, 0.1], [-0.1], [0.02], [0.3]],
        [0.0] * 4,
        group_R=torch.tensor([0, 0, 0, 1]),
        reward_R=torch.tensor([1.0, 0.0, 0.5, 9.0], dtype=torch.float64) + shift,
    )


def test_p3o_matches_the_sum_over_pairs_and_ignores_a_reward_shift() -> None:
    batch = p3o_batch(0.0)
    row_value = dict(zip(batch.row_D.tolist(), values(p3o, batch, eps=0.2), strict=True))
    lr, reward = [0.15, -0.1, 0.02], [1.0, 0.0, 0.5]
    pairs = []
    for i, j in ((0, 1), (0, 2), (1, 2)):
        gap, gain = lr[i] - lr[j], reward[i] - reward[j]
        pairs.append(-0.5 * min(gain * gap, gain * max(-0.2, min(0.2, gap))))
    assert sum(row_value[i] for i in range(3)) / 3 == pytest.approx(sum(pairs) / 3)
    assert row_value[3] == 0.0  # nobody to compare with
    assert values(p3o, p3o_batch(5.0)) == pytest.approx(values(p3o, batch))
    free = p3o_batch(0.0)
    (whole,) = torch.autograd.grad(
        (p3o(free, eps=9.0) / torch.tensor([2.0, 2.0, 1, 1, 1])).sum(), free.logp_D
    )
    # unclipped, each pair counted from both sides: minus the RLOO advantage
    rloo = [r - (1.5 - r) / 2 for r in reward]
    assert whole[[0, 2, 3]].tolist() == pytest.approx([-a for a in rloo])
