"""Regression losses: values by hand, and where they come to rest."""

from __future__ import annotations

import math

import pytest
import torch

from tests.rl.formulas.batches import flat, slopes, tokens, values
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.inputs import RatioFacts
from tfgrpo.rl.formulas.losses.regression import (
    REGRESSION_LOSSES,
    dro,
    gbpo,
    prime_default,
    r2vpo,
    rover,
    sppo_square,
)


def test_gbpo_rests_at_the_bound_and_starts_as_policy_gradient() -> None:
    start = tokens([[0.0], [0.0], [0.5]], [2.0, -3.0, 0.0])
    assert slopes(gbpo, start) == pytest.approx([-2.0, 3.0, 0.0])
    rest = tokens([[math.log(1.2)], [math.log(0.8)]], [2.0, -3.0])
    assert values(gbpo, rest) == pytest.approx([0.0, 0.0])
    assert slopes(gbpo, rest) == pytest.approx([0.0, 0.0], abs=1e-12)
    assert values(gbpo, tokens([[math.log(2.0)]], [1.0])) == pytest.approx([0.8**2 / 0.4])


def test_r2vpo_matches_its_lagrangian_and_its_dual_step() -> None:
    batch = tokens([[math.log(3.0)], [0.0]], [5.0, 1.0])
    assert values(r2vpo, batch, eta=2.0, delta=0.5) == pytest.approx([-15 + 2 * 3.5, -1 - 1.0])
    # far from 1 a large advantage still has a gradient, unlike under a clip
    assert slopes(r2vpo, batch, eta=2.0)[0] == pytest.approx(-15 + 2 * 2 * 2 * 3)
    assert slopes(r2vpo, batch, eta=0.0) == pytest.approx([-15.0, -1.0])
    step = REGRESSION_LOSSES["r2vpo"].after_step
    tight = {"delta": 0.01, "lr": 10}
    assert step({}, RatioFacts(0.03, 8), tight) == {"eta": pytest.approx(1.2)}
    assert step({"eta": 1.2}, RatioFacts(0.03, 8), tight) == {"eta": pytest.approx(1.4)}
    assert step({"eta": 0.1}, RatioFacts(0.0, 8), {"delta": 0.5}) == {"eta": 0.0}


def test_dro_rests_where_the_log_ratio_is_the_scaled_advantage() -> None:
    batch = tokens([[0.4], [-0.2]], [0.2, -0.1])
    assert slopes(dro, batch, beta=0.5) == pytest.approx([0.0, 0.0], abs=1e-12)
    one = tokens([[0.5]], [2.0])
    assert values(dro, one, beta=0.1) == pytest.approx([-(2.0 * -0.5 - 0.05 * 0.25)])


def test_prime_default_adds_the_square_to_a_masked_ratio() -> None:
    """π_old 0.5 to 0.9 (masked for A > 0) and to 0.6."""
    gaps = [math.log(1.8), math.log(1.2)]
    batch = tokens([gaps], [2.0], old=[[math.log(0.5)] * 2])
    expected = [0.01 * gaps[0] ** 2, -2.4 + 0.01 * gaps[1] ** 2]
    assert values(prime_default, batch, kappa=0.01) == pytest.approx(expected)


def test_rover_regresses_to_the_next_states_uniform_value() -> None:
    batch = tokens([[0.3, 0.1]], [0.5])
    gap_D = flat([[-0.2, 0.0]]).requires_grad_()
    loss_D = rover(batch, rho=2.0, next_gap_D=gap_D)
    assert loss_D.tolist() == pytest.approx([(0.6 - 0.1) ** 2, (0.2 - 0.5) ** 2])
    grads = torch.autograd.grad(loss_D.sum(), [batch.logp_D, gap_D], allow_unused=True)
    assert grads[0].tolist() == pytest.approx([2 * 2 * 0.5, 2 * 2 * -0.3])
    assert grads[1] is None  # the target has no gradient
    with pytest.raises(ConfigError, match="next_gap_D"):
        rover(batch)


def test_rover_weighs_the_next_states_gap_as_its_own() -> None:
    """rho .5, log r .2, A 1, gap .4: (.1 − 1.2)²."""
    found = rover(tokens([[0.2]], [1.0]), rho=0.5, next_gap_D=flat([[0.4]]))
    assert found.tolist() == pytest.approx([1.21])


def test_rover_makes_the_better_branch_the_greedy_one() -> None:
    """A tree of two moves, reward 1 at one of four leaves: the uniform policy's values, learnt."""
    logits = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)  # root, left, right
    old = torch.full((3, 2), math.log(0.5), dtype=torch.float64)
    optimiser = torch.optim.SGD([logits], lr=0.5)
    for _ in range(120):
        logp = logits.log_softmax(-1)
        gap = (logp - old).mean(-1).detach()
        total = torch.zeros((), dtype=torch.float64)
        for first in (0, 1):
            for second in (0, 1):
                won = 1.0 if (first, second) == (1, 0) else 0.0
                batch = tokens([[0.0, 0.0]], [won - 0.25], old=[[math.log(0.5)] * 2])
                picked = torch.stack([logp[0, first], logp[1 + first, second]])
                batch = type(batch)(
                    logp_D=picked,
                    old_logp_D=batch.old_logp_D,
                    advantage_D=torch.tensor([0.0, won - 0.25], dtype=torch.float64),
                    row_D=batch.row_D,
                    n_rows=1,
                )
                follow = torch.stack([gap[1 + first], torch.zeros((), dtype=torch.float64)])
                total = total + rover(batch, next_gap_D=follow).sum()
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
    assert logits[2].argmax().item() == 0


def test_sppo_square_rests_at_the_scaled_win_rate() -> None:
    rest = tokens([[0.3, -0.1], [0.0]], [0.1, 0.0])
    assert values(sppo_square, rest, eta=2.0) == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)
    batch = tokens([[0.3, -0.1]], [0.25])
    assert sum(values(sppo_square, batch, eta=2.0)) == pytest.approx((0.2 - 0.5) ** 2)
