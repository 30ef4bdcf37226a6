"""Token-level credit against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.rl.formulas.batches import rewards
from tfgrpo.errors import ConfigError
from tfgrpo.rl.formulas.advantages.group import grpo, reinforce_pp
from tfgrpo.rl.formulas.credit import rows_of
from tfgrpo.rl.formulas.credit.tokens import (
    d3s_dual,
    dcpo_distribution,
    discounted,
    gtpo_trajectory,
    hicra,
    largest_signal,
    optimal_token_baseline,
    temporal,
    top_entropy,
)
from tfgrpo.rl.formulas.inputs import RewardBatch


def test_discounted_whitens_the_discounted_return() -> None:
    batch = rewards([1.0, 0.5], lengths=[3, 1])
    returns = np.array([0.25, 0.5, 1.0, 0.5])
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    assert discounted(batch, gamma=0.5).tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    undiscounted = discounted(batch, gamma=1.0)
    assert undiscounted.tolist() == pytest.approx(np.repeat(reinforce_pp(batch), [3, 1]).tolist())


def test_optimal_token_baseline_weighs_by_realised_energy() -> None:
    prob, square = np.array([0.5, 0.8, 0.9]), np.array([0.4, 0.7, 0.85])
    batch = rewards([1.0, 0.0], lengths=[2, 1], logp_D=np.log(prob), extra={"sum_square_D": square})
    energy = 1 - 2 * prob + square
    w_0, w_1 = energy[0], energy[2]  # token 0 of each row; token 1 is row 0's alone
    base = w_0 * 1.0 / (w_0 + w_1)
    assert optimal_token_baseline(batch, eps=0).tolist() == pytest.approx([1 - base, 1.0, -base])
    own_tail = optimal_token_baseline(batch, zero_tail=0, eps=0)
    assert own_tail.tolist() == pytest.approx([1 - base, 0.0, -base], abs=1e-12)
    with pytest.raises(ConfigError, match="sum_square_D"):
        optimal_token_baseline(rewards([1, 0], logp_D=np.zeros(2)))


def test_optimal_token_baseline_has_the_least_weighted_error_at_each_token() -> None:
    draw = np.random.default_rng(0)
    lengths = [4, 4, 4]
    prob = draw.uniform(0.2, 0.9, size=12)
    square = np.minimum(1.0, prob**2 + (1 - prob) ** 2)
    batch = rewards(
        [1.0, 0.2, 0.0], lengths=lengths, logp_D=np.log(prob), extra={"sum_square_D": square}
    )
    found = np.array(rows_of(batch, optimal_token_baseline(batch)))
    energy = np.cumsum((1 - 2 * prob + square).reshape(3, 4), axis=1)
    for t in range(4):
        least = (energy[:, t] * found[:, t] ** 2).sum()
        for shift in (-0.01, 0.01):
            assert least < (energy[:, t] * (found[:, t] + shift) ** 2).sum()


def test_gtpo_trajectory_spares_tokens_that_both_kinds_share() -> None:
    """Both open with 7 and close with 9; the middle differs. The third is too uncertain."""
    ids = [[7, 1, 2, 9], [7, 3, 9], [7, 9]]
    entropy = [[0.1] * 4, [0.2] * 3, [1.5] * 2]
    batch = rewards(
        [1.0, 0.0, 0.0],
        lengths=[4, 3, 2],
        token_D=np.array([i for row in ids for i in row]),
        entropy_D=np.array([h for row in entropy for h in row]),
    )
    up, down, _ = grpo(batch)
    good, bad = up - 0.5 * 0.1, down - 0.5 * 0.2
    found = rows_of(batch, gtpo_trajectory(batch, gamma=0.5))
    # two shared tokens in each row, which divide it
    assert found[0] == pytest.approx((good, good / 2, good / 2, good))
    assert found[1] == pytest.approx((0.0, bad / 2, 0.0))
    assert found[2] == (0.0, 0.0)


def gtpo_weights(*ids: list[int], right: int = 1) -> list[tuple[float, ...]]:
    """What each token is multiplied by, times the row's shared tokens; `right` rows are right."""
    sizes = [len(row) for row in ids]
    batch = rewards(
        [1.0] * right + [0.0] * (len(ids) - right),
        lengths=sizes,
        token_D=np.array([i for row in ids for i in row]),
        entropy_D=np.full(sum(sizes), 0.1),
    )
    found = rows_of(batch, gtpo_trajectory(batch, gamma=0.0))
    return [tuple(x / a for x in row) for row, a in zip(found, grpo(batch), strict=True)]


def test_gtpo_shared_tokens_are_unbroken_runs_from_either_end() -> None:
    """An equal token in the middle is no conflict; 2 of 5 tokens are, so each weight is halved."""
    right, wrong = gtpo_weights([7, 1, 5, 2, 9], [7, 3, 5, 4, 9])
    assert [2 * w for w in right] == pytest.approx([2, 1, 1, 1, 2])
    assert [2 * w for w in wrong] == pytest.approx([0, 1, 1, 1, 0])


def test_gtpo_weights_of_both_runs_multiply_and_a_row_without_a_run_is_whole() -> None:
    """[7, 9] and [7, 9, 4, 7, 9]: both tokens of the first are in its head and in its tail run."""
    right, wrong = gtpo_weights([7, 9], [7, 9, 4, 7, 9])
    assert [2 * w for w in right] == pytest.approx([4, 4])
    assert [4 * w for w in wrong] == pytest.approx([0, 0, 1, 0, 0])
    assert gtpo_weights([1, 2, 3], [4, 5, 6]) == [pytest.approx((1, 1, 1))] * 2


def dcpo_batch(group: list[float], entropy: float) -> object:
    n = len(group)
    return rewards(
        group,
        logp_D=np.full(n, -1.0),
        entropy_D=np.full(n, entropy),
        extra={"tempered_logp_D": np.full(n, -1.2)},
    )


def test_dcpo_distribution_mixes_in_the_tempered_ratio() -> None:
    batch = dcpo_batch([1, 0, 0, 0], 0.45)
    x = 0.05 / 0.25
    a = x / (1 + x)
    plain = grpo(batch)
    expected = (1 - a) * plain + a * np.array([math.exp(-0.2), 0, 0, 0])
    assert dcpo_distribution(batch).tolist() == pytest.approx(expected.tolist())
    at_target = dcpo_batch([1, 0, 0, 0], 0.5)
    assert dcpo_distribution(at_target).tolist() == pytest.approx(plain.tolist())
    far = dcpo_batch([1, 0, 0, 0], 5.0)  # the gap is capped at 0.1
    assert dcpo_distribution(far)[1] == pytest.approx(plain[1] / 1.4)
    none = dcpo_batch([0, 0, 0, 0], 0.1)
    assert dcpo_distribution(none).tolist() == [0.0] * 4


def test_top_entropy_keeps_the_uncertain_share() -> None:
    entropy = np.array([0.1, 0.9, 0.2, 0.3, 0.8, 0.0, 0.4, 0.5, 0.6, 0.7])
    batch = rewards([1, 0], lengths=[5, 5], entropy_D=entropy)
    plain = np.repeat(grpo(batch), 5)
    found = top_entropy(batch, share=0.2)
    assert np.flatnonzero(found).tolist() == [1, 4]
    assert found[[1, 4]].tolist() == plain[[1, 4]].tolist()
    assert top_entropy(batch, share=1.0).tolist() == plain.tolist()


def test_largest_signal_ranks_by_advantage_times_entropy() -> None:
    batch = rewards([1, 0, 0], lengths=[2, 2, 1], entropy_D=np.array([0.5, 0.1, 0.9, 0.3, 0.2]))
    plain = np.repeat(grpo(batch), [2, 2, 1])
    signal = np.abs(plain) * np.array([0.5, 0.1, 0.9, 0.3, 0.2])
    kept = np.argsort(signal)[-2:]
    found = largest_signal(batch, share=0.4)
    assert sorted(np.flatnonzero(found)) == sorted(kept) == [0, 2]
    assert largest_signal(batch, share=1.0).tolist() == plain.tolist()


def test_hicra_moves_planning_tokens_up() -> None:
    batch = rewards([1, 0], lengths=[2, 2], extra={"planning_D": np.array([1.0, 0, 1, 0])})
    up, down = grpo(batch)
    expected = [1.2 * up, up, 0.8 * down, down]
    assert hicra(batch, alpha=0.2).tolist() == pytest.approx(expected)


def test_temporal_fades_to_plain_advantages() -> None:
    batch = rewards([1, 0], lengths=[5, 4])
    up, down = grpo(batch)
    found = rows_of(batch, temporal(batch, k=1.0, head=0.4))
    assert found[0] == pytest.approx(tuple(up * w / 1.4 for w in (2, 2, 1, 1, 1)))
    assert sum(found[1]) == pytest.approx(4 * down)
    late = temporal(batch, progress=1.0)
    assert late.tolist() == pytest.approx(np.repeat([up, down], [5, 4]).tolist())


def test_d3s_dual_grows_to_plain_advantages() -> None:
    """Group [1, 0, 0, 0] of one token each; |A|·H is largest on the first and the surest last."""
    batch = RewardBatch(
        np.array([1.0, 0, 0, 0]),
        np.zeros(4, dtype=np.int64),
        np.ones(4, dtype=np.int64),
        entropy_D=np.array([1.0, 2.0, 3.0, 4.0]),
    )
    plain = grpo(batch)
    assert d3s_dual(batch, progress=1.0).tolist() == plain.tolist()
    first = d3s_dual(batch, keep=0.5, share=1.0, progress=0.0)
    assert np.flatnonzero(first).tolist()[0] == 0 and np.count_nonzero(first) == 2
    halves = d3s_dual(batch, keep=1.0, share=0.5, progress=0.0)
    # signals 1.5, 1.0, 1.5, 2.0: the half of largest ones, ties kept
    assert np.flatnonzero(halves).tolist() == [0, 2, 3]
    rng = np.random.default_rng(1)
    for _ in range(20):
        values = (rng.random(8) < 0.5).astype(float)
        some = RewardBatch(
            values, np.zeros(8, dtype=np.int64), np.ones(8, dtype=np.int64), entropy_D=np.ones(8)
        )
        kept = np.flatnonzero(d3s_dual(some, keep=0.5, share=1.0))
        if values.min() < values.max():
            assert set(values[kept]) == {0.0, 1.0} and len(kept) == 4
            assert values[kept].var() >= values.var() - 1e-12
