"""Losses on whole groups against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.rl.formulas.batches import rewards, slopes, tokens, values
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.inputs import TokenBatch
from tfgrpo.rl.formulas.losses.groups import (
    drpo,
    grao,
    length_weights,
    nash_mp,
    reg_grpo,
    verdict_columns,
)
from tfgrpo.rl.formulas.losses.pairs import inpo, power_dl, rpo


def group(
    gaps: list[list[float]], advantage: list[float], reward: list[float] | None = None
) -> TokenBatch:
    """One group of rows."""
    return tokens(
        gaps,
        advantage,
        group_R=torch.zeros(len(gaps), dtype=torch.int64),
        reward_R=torch.tensor(reward or advantage, dtype=torch.float64),
    )


def test_reg_grpo_rests_where_the_implied_advantage_is_the_advantage() -> None:
    """Log-ratios in proportion to the advantages, whatever the factor; nothing is clipped."""
    advantage = [1.5, -0.5, -0.5, -0.5]  # of rewards 1, 0, 0, 0
    for factor in (0.01, 1.0, 7.0):
        gaps = [[factor * a / 2] * 2 for a in advantage]
        rest = group(gaps, advantage)
        assert values(reg_grpo, rest, eps=1e-12) == pytest.approx([0.0] * 8, abs=1e-12)
        assert slopes(reg_grpo, rest, eps=1e-12) == pytest.approx([0.0] * 8, abs=1e-6)
    # rows of log-ratio 1 and 0: implied +-0.7071 (sample deviation), wanted the other way round
    off = group([[1.0], [0.0]], [-0.7071068, 0.7071068])
    assert values(reg_grpo, off, eps=1e-12) == pytest.approx([2.0, 2.0], abs=1e-5)


def test_reg_grpo_begins_as_policy_gradient() -> None:
    """At ratio 1: -2 A / eps a row, since the implied advantage is its centred log-ratio / eps."""
    start = group([[0.0], [0.0]], [0.7, -0.7])
    assert slopes(reg_grpo, start, eps=0.1) == pytest.approx([-14.0, 14.0])
    alone = tokens(
        [[0.4]], [0.0], group_R=torch.tensor([3]), reward_R=torch.ones(1, dtype=torch.float64)
    )
    assert values(reg_grpo, alone) == [0.0]


def test_drpo_weighs_right_answers_by_length_against_the_hardest_wrong_ones() -> None:
    """Rewards of length 0.75 and 0.5 at lambda 0.1: 0.9241 and 0.0759."""
    # of 8 tokens at most: two rows right of 2 and 4 tokens, two wrong of one token
    batch = group([[0.0] * 2, [0.0] * 4, [0.0], [0.0]], [0.0] * 4, [1.0, 1.0, 0.0, 0.5])
    batch.logp_D.data[6:] = torch.tensor([-1.0, -3.0], dtype=torch.float64)
    options = {"max_tokens": 8, "tau": 2.0}
    hard = 2 * math.log((math.exp(-0.5) + math.exp(-1.5)) / 2)
    value = values(drpo, batch, lam=0.1, **options, delta=9.0)
    assert value[0] == pytest.approx(4 * 0.9241 * (hard + 1), abs=1e-3)
    assert value[2] == pytest.approx(4 * 0.0759 * (hard + 1), abs=1e-3)
    assert value[6:] == [0.0, 0.0]
    row_mean = torch.tensor([1 / 2] * 2 + [1 / 4] * 4 + [1.0] * 2, dtype=torch.float64) / 4
    (slope,) = torch.autograd.grad(
        (drpo(batch, lam=0.1, **options, delta=9.0) * row_mean).sum(), batch.logp_D
    )
    # right rows by weight, wrong ones by softmax of score / tau: 1 / (1 + e^-1) = 0.7311
    by_row = [float(slope[a:b].sum()) for a, b in ((0, 2), (2, 6), (6, 7), (7, 8))]
    assert by_row == pytest.approx([-0.9241, -0.0759, 0.7311, 0.2689], abs=1e-4)


def test_drpo_never_pushes_a_right_answer_down_and_large_lambda_is_uniform() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        lengths = draw.integers(1, 9, size=6)
        right = (draw.random(6) < 0.5).astype(float)
        batch = group([[0.0] * n for n in lengths], [0.0] * 6, right.tolist())
        slope = slopes(drpo, batch, max_tokens=8, lam=float(draw.uniform(0.01, 1)))
        first = np.cumsum([0, *lengths[:-1]])
        assert all(slope[f] <= 0 for f, is_right in zip(first, right, strict=True) if is_right)
        if right.all() or not right.any():
            assert not any(slope)
    is_right = torch.tensor([1.0, 1.0, 0.0, 1.0])
    one = torch.ones(4, 4)
    even = length_weights(is_right, torch.tensor([1.0, 900.0, 5.0, 3.0]), one, 1e9)
    assert even.tolist() == pytest.approx([1 / 3, 1 / 3, 0.0, 1 / 3], abs=1e-5)


def test_drpo_holds_a_group_near_its_start_beyond_the_free_kl() -> None:
    """r = e^0.1: k3 is 0.0051709; beta 2 over delta 0.001 weighs it 2 * 0.0041709."""
    batch = group([[0.1], [0.1]], [0.0, 0.0], [1.0, 1.0])
    weight = 2 * 0.0041709
    assert values(drpo, batch, beta=2.0, delta=0.001) == pytest.approx(
        [weight * 0.0051709] * 2, rel=1e-3
    )
    assert slopes(drpo, batch, beta=2.0, delta=0.001) == pytest.approx(
        [weight * (math.exp(0.1) - 1)] * 2, rel=1e-3
    )
    assert values(drpo, batch, beta=2.0, delta=0.01) == [0.0, 0.0]


def with_reference(advantage: list[float]) -> TokenBatch:
    """A group of two drawn rows and the reference of two tokens, and a group without one."""
    return tokens(
        [[0.0], [0.0] * 2, [0.0] * 2, [0.0]],
        [*advantage, 3.0],
        group_R=torch.tensor([0, 0, 0, 1]),
        columns={"given": torch.tensor([0, 0, 0, 1, 1, 0], dtype=torch.float64)},
    )


def pull(batch: TokenBatch, **options: float) -> list[float]:
    """∂ loss / ∂ log π of each token by row_mean over the first group's three rows."""
    share = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5, 0.0], dtype=torch.float64) / 3
    (slope,) = torch.autograd.grad((grao(batch, **options) * share).sum(), batch.logp_D)
    return slope.tolist()


def test_grao_imitates_explores_and_compares() -> None:
    """Two drawn rows, A = 0.5 and -1.1, the reference's 0.6; beta 0.5, lam 0.6."""
    batch = with_reference([0.5, -1.1, 0.6])
    assert pull(batch, beta=0.5, lam=0.6) == pytest.approx(
        # drawn: -1.6 A / 2 by row; reference: -0.5 * 0.6 + 0.6 * (0.5 - 1.1) / 2
        [-0.4, 0.44, 0.44, -0.24, -0.24, 0.0]
    )
    assert slopes(grao, batch, beta=0.5, lam=0.6)[5] == pytest.approx(-1.6 * 3)


def test_grao_without_its_weights_is_reinforce_on_the_drawn_rows() -> None:
    batch = with_reference([0.5, -1.1, 0.6])
    drawn = [-0.5 / 2, 1.1 / 4, 1.1 / 4]  # reinforce by row_mean over two rows
    assert pull(batch, beta=0.0, lam=0.0) == pytest.approx([*drawn, 0.0, 0.0, 0.0])


BEATS = [[0.5, 0.0, 1.0], [1.0, 0.5, 0.0], [0.0, 1.0, 0.5]]
"""Rock, paper, scissors: row against column."""


Loss = Callable[[TokenBatch], torch.Tensor]


def round_of(loss: Loss, logits: torch.Tensor, opponent: list[float]) -> torch.Tensor:
    """A slope of the logits, each move weighed by its probability.

    Moves stand in the group once each, so an opponent's weight is its probability times three.
    """
    leaf = logits.clone().requires_grad_()
    logp = leaf.log_softmax(-1)
    batch = TokenBatch(
        logp_D=logp,
        old_logp_D=logp.detach(),
        advantage_D=torch.zeros(3, dtype=torch.float64),
        row_D=torch.arange(3),
        n_rows=3,
        group_R=torch.zeros(3, dtype=torch.int64),
        columns={
            "place": torch.arange(3, dtype=torch.float64),
            "half_gap": torch.tensor([math.log(3 * p) for p in opponent], dtype=torch.float64),
            **{
                f"beats_{j}": torch.tensor([row[j] for row in BEATS], dtype=torch.float64)
                for j in range(3)
            },
        },
    )
    drawn = logp.detach().exp()
    kl = (logp.exp() * (logp + math.log(3))).sum()
    (slope,) = torch.autograd.grad((drawn * loss(batch)).sum() + 0.001 * kl, leaf)
    return slope


def to_uniform(probabilities: list[float]) -> float:
    """KL to the game's equilibrium."""
    return sum(p * math.log(3 * p) for p in probabilities)


def play(loss: Loss, rounds: int, *, looks_ahead: bool, rate: float = 7.0) -> list[float]:
    """KL to the equilibrium after each round."""
    logits = torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64)
    found = []
    for _ in range(rounds):
        opponent = logits.softmax(-1).tolist()
        if looks_ahead:
            half = logits - rate * round_of(loss, logits, opponent)
            opponent = half.softmax(-1).tolist()
        logits = logits - rate * round_of(loss, logits, opponent)
        found.append(to_uniform(logits.softmax(-1).tolist()))
    return found


def test_nash_mp_settles_rock_paper_scissors_where_one_step_does_not() -> None:
    settled = play(nash_mp, 200, looks_ahead=True)
    assert settled[-1] < 1e-3
    cycling = play(nash_mp, 200, looks_ahead=False)
    assert min(cycling[50:]) > 0.1


def test_nash_mp_counts_opponents_by_what_the_half_step_made_of_them() -> None:
    """Rock against itself, paper and scissors at weights 1, e, 1: (.5 + 0 + 1) / (2 + e)."""
    rows = tokens(
        [[0.0], [0.0, 0.0], [0.0]],
        [0.0] * 3,
        group_R=torch.zeros(3, dtype=torch.int64),
        columns={
            "place": torch.tensor([0.0, 1.0, 1.0, 2.0], dtype=torch.float64),
            "half_gap": torch.tensor([0.0, 0.4, 0.6, 0.0], dtype=torch.float64),
            "beats_0": torch.tensor([0.5, 1.0, 1.0, 0.0], dtype=torch.float64),
            "beats_1": torch.tensor([0.0, 0.5, 0.5, 1.0], dtype=torch.float64),
            "beats_2": torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=torch.float64),
        },
    )
    e = math.e
    rate = [1.5 / (2 + e), (1 + 0.5 * e) / (2 + e), (e + 0.5) / (2 + e)]
    expected = [0.5 - rate[0], 0.5 - rate[1], 0.5 - rate[1], 0.5 - rate[2]]
    assert slopes(nash_mp, rows) == pytest.approx(expected)


def test_verdicts_reach_the_loss_by_place_and_are_asked_for_where_missing() -> None:
    batch = rewards(
        [0.5, 0.5],
        [1.0],
        lengths=[1, 2, 1],
        part_RM=np.array([[0.3, 0.5, 1.0], [0.1, 0.0, 0.5], [0.9, 0.5, 0.0]]),
        part_names=("quick", "beats_0", "beats_1"),
    )
    found = {name: value.tolist() for name, value in verdict_columns(batch, {}).items()}
    assert found == {
        "place": [0, 1, 1, 0],
        "beats_0": [0.5, 0.0, 0.0, 0.5],
        "beats_1": [1.0, 0.5, 0.5, 0.0],
    }
    with pytest.raises(ConfigError, match=r"set verifier\.verdicts = true"):
        verdict_columns(rewards([0.5, 0.5]), {})


def test_a_judged_reply_without_a_row_does_not_shift_the_places_of_the_others() -> None:
    batch = rewards(
        [0.5, 0.5],
        lengths=[1, 2],
        part_RM=np.array([[0.0, 0.5, 1.0, 0.0], [2.0, 1.0, 0.5, 0.5]]),
        part_names=("place", "beats_0", "beats_1", "beats_2"),
    )
    assert verdict_columns(batch, {})["place"].tolist() == [0, 2, 2]


@pytest.mark.parametrize(
    ("loss", "options", "told"),
    [
        (drpo, {"lam": 0.0}, "lam is 0 and must be above 0"),
        (drpo, {"tau": -1.0}, "tau is -1 and must be above 0"),
        (drpo, {"beta": -1.0}, "beta is -1 and must be 0 or more"),
        (reg_grpo, {"eps": 0.0}, "eps is 0 and must be above 0"),
        (grao, {"beta": float("nan")}, "beta is nan and must be 0 or more"),
        (rpo, {"beta": -1.0}, "beta is -1 and must be above 0"),
        (inpo, {"eta": 1.0, "tau": 2.0}, "tau is 2 and must be 0 or more and 1 or less"),
        (power_dl, {"gamma": 1.5}, "gamma is 1.5 and must be 0 or more and 1 or less"),
    ],
)
def test_options_out_of_their_range_are_refused_by_name(
    loss: Any, options: dict[str, float], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        loss(group([[0.0], [0.0]], [0.0] * 2, [1.0, 0.0]), **options)
