"""What every advantage, reward and credit of the registries has in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tfgrpo.rl.formulas.advantages import ADVANTAGES
from tfgrpo.rl.formulas.credit import CREDIT, rows_of
from tfgrpo.rl.formulas.inputs import RewardBatch
from tfgrpo.rl.formulas.rewards import REWARDS

OPTIONS: dict[str, dict[str, float]] = {
    "overlong_soft": {"max_tokens": 8, "buffer": 4},
    "length_cosine": {"max_tokens": 8},
    "structure_to_content": {"step": 1, "steps": 4},
    "riskpo": {"bundle": 1},
}
"""Options without a default, and riskpo's bundles that do not depend on the order of rows."""

NOT_ZERO_WHEN_FLAT = {
    "asymre_baseline",  # the shift
    "ngrpo",  # virtual best sibling
    "remax",  # greedy reward
    "gdpo",  # whitened over the batch; parts vary
    "dvao",  # parts vary
    "unlikeliness_grpo",  # all-right groups become informative
    "arena_rank",  # rounds, not rewards
    "shrunk",  # leans on a prior
    "vgpo",  # absolute values
    "progrpo",  # likelihoods
}
NOT_SHIFT_INVARIANT = {
    "maxrl", "bnpo", "ngrpo", "remax", "gpg", "a_grae", "r3l", "unlikeliness_grpo",
    "shrunk", "vgpo", "pc_grpo", "adora",
}  # fmt: skip


def whole_batch(seed: int = 0) -> RewardBatch:
    """Three groups of 4, 5 and 1 rollouts and an empty one, with everything that may be asked."""
    draw = np.random.default_rng(seed)
    group_R = np.array([0] * 4 + [2] * 5 + [3])
    n = len(group_R)
    length_R = draw.integers(1, 7, size=n)
    n_tokens = int(length_R.sum())
    part_RM = draw.integers(0, 3, size=(n, 2)) / 2
    part_RM[:, 0] += np.arange(n) / 100
    columns = {
        name: draw.uniform(0.1, 1.0, size=n)
        for name in (
            "statistic_R", "metric_R", "score_R", "ratio_R", "score_norm_R", "target_R", "budget_R",
            "think_entropy_R", "answer_entropy_R", "overlap_R", "prompt_confidence_R",
        )
    } | {
        name: draw.integers(0, 3, size=n).astype(float)
        for name in (
            "context_R", "round_R", "class_R", "tool_calls_R", "invalid_R", "flawed_R",
            "trigger_count_R",
        )
    } | {
        "prior_R": 0.2 + group_R / 10,  # one value a group
        "past_share_R": np.full(n, 0.7),
    } | {
        "planning_D": draw.integers(0, 2, size=n_tokens).astype(float),
        "reasoning_D": draw.integers(0, 2, size=n_tokens).astype(float),
        "sum_square_D": draw.uniform(0.5, 0.9, size=n_tokens),
        "tempered_logp_D": -draw.uniform(0.1, 2.0, size=n_tokens),
    }  # fmt: skip
    step_R = [np.sort(draw.integers(0, 2, size=k)) for k in length_R]
    step_R = [np.unique(s, return_inverse=True)[1] for s in step_R]
    n_steps = [int(s.max()) + 1 for s in step_R]
    return RewardBatch(
        reward_R=np.array([1, 0, 0.25, 0, 1, 1, 0, 0.5, 0, 1.0]),
        group_R=group_R,
        length_R=length_R,
        part_RM=part_RM,
        part_names=("structure", "content"),
        logp_R=-draw.uniform(1, 9, size=n),
        logp_D=-draw.uniform(0.1, 2.0, size=n_tokens),
        entropy_D=draw.uniform(0.0, 1.0, size=n_tokens),
        token_D=draw.integers(0, 4, size=n_tokens),
        step_R=step_R,
        state_keys_R=[tuple(draw.integers(0, 2, size=k).tolist()) for k in n_steps],
        step_reward_R=[draw.uniform(size=k) for k in n_steps],
        answer_R=draw.integers(0, 3, size=n).tolist(),
        baseline_R=draw.uniform(size=n),
        extra=columns,
    )


def permuted(batch: RewardBatch, order: np.ndarray[Any, Any]) -> RewardBatch:
    """The same rollouts in another order."""
    starts = np.cumsum([0, *batch.length_R])[:-1]
    tokens = np.concatenate([np.arange(starts[r], starts[r] + batch.length_R[r]) for r in order])

    def move(name: str, value: Any) -> Any:
        if value is None or name == "part_names":
            return value
        if name == "extra":
            return {k: v[tokens if k.endswith("_D") else order] for k, v in value.items()}
        if isinstance(value, bool):
            return value
        if isinstance(value, list):
            return [value[i] for i in order]
        return value[tokens] if name.endswith("_D") else value[order]

    return RewardBatch(**{f: move(f, getattr(batch, f)) for f in RewardBatch.__slots__})


def call(registry: Any, name: str, batch: RewardBatch) -> np.ndarray[Any, Any]:
    return registry[name].fn(batch, **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_permutation_of_rollouts_permutes_the_advantages_exactly(name: str) -> None:
    batch = whole_batch()
    if name in {"pass_at_k", "d3s", "riskpo"}:  # ties and pairings go by order
        batch = replace(batch, reward_R=np.linspace(0, 1, 10)[[3, 1, 4, 9, 5, 2, 6, 8, 7, 0]])
    if name == "riskpo":  # one rollout a paper: bundles of one group
        batch = replace(batch, group_R=np.arange(10))
    order = np.random.default_rng(1).permutation(10)
    moved = permuted(batch, order)
    if name == "riskpo":
        moved = replace(moved, group_R=np.arange(10))
    found, expected = call(ADVANTAGES, name, moved), call(ADVANTAGES, name, batch)[order]
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_equal_rewards_everywhere_give_exactly_zero_unless_stated(name: str) -> None:
    batch = replace(whole_batch(), reward_R=np.full(10, 0.1 + 0.2))
    found = call(ADVANTAGES, name, batch)
    assert np.isfinite(found).all()
    assert (found == 0).all() != (name in NOT_ZERO_WHEN_FLAT)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_shift_of_all_rewards_changes_nothing_unless_stated(name: str) -> None:
    batch = whole_batch()
    part_RM = batch.part_RM
    assert part_RM is not None and batch.baseline_R is not None
    shifted = replace(batch, reward_R=batch.reward_R + 0.5, part_RM=part_RM + 0.5)
    if name == "bnpo":  # rewards must stay in [0, 1]
        batch = replace(batch, reward_R=batch.reward_R / 2)
        shifted = replace(batch, reward_R=batch.reward_R + 0.25)
    same = np.allclose(call(ADVANTAGES, name, shifted), call(ADVANTAGES, name, batch), atol=1e-9)
    assert same != (name in NOT_SHIFT_INVARIANT)


@pytest.mark.parametrize("name", ["grpo", "batch_std", "rank", "rank_normal", "dvao", "win_rate"])
def test_a_scale_of_all_rewards_changes_nothing_in_the_normalised_ones(name: str) -> None:
    batch = whole_batch()
    assert batch.part_RM is not None
    options = {"eps": 0.0} if name in {"grpo", "batch_std"} else {}
    scaled = replace(batch, reward_R=batch.reward_R * 7, part_RM=batch.part_RM * 7)
    fn = ADVANTAGES[name].fn
    assert fn(scaled, **options).tolist() == pytest.approx(fn(batch, **options).tolist())


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "bnpo", "mc_grpo"])
def test_a_scale_shows_where_nothing_normalises(name: str) -> None:
    batch = replace(whole_batch(), reward_R=whole_batch().reward_R / 2)
    options = {"mc_grpo": {"scaled": 0}, "bnpo": {"alpha": 1, "beta": 1}}.get(name, {})
    fn = ADVANTAGES[name].fn
    doubled = fn(replace(batch, reward_R=batch.reward_R * 2), **options)
    assert doubled.tolist() == pytest.approx((2 * fn(batch, **options)).tolist())


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_advantage_leaves_its_batch_alone_and_fills_every_row(name: str) -> None:
    batch, untouched = whole_batch(), whole_batch()
    found = call(ADVANTAGES, name, batch)
    assert found.shape == (10,) and found.dtype == np.float64 and np.isfinite(found).all()
    assert batch.reward_R.tolist() == untouched.reward_R.tolist()


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_a_reward_is_new_finite_and_follows_a_permutation(name: str) -> None:
    batch, untouched = whole_batch(), whole_batch()
    found = call(REWARDS, name, batch)
    assert found.shape == (10,) and np.isfinite(found).all()
    assert batch.reward_R.tolist() == untouched.reward_R.tolist()
    assert not np.shares_memory(found, batch.reward_R)
    order = np.random.default_rng(2).permutation(10)
    moved = call(REWARDS, name, permuted(batch, order))
    assert moved.tolist() == pytest.approx(found[order].tolist(), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", sorted(CREDIT))
def test_credit_fills_every_token_and_follows_a_permutation(name: str) -> None:
    batch = whole_batch()
    found = call(CREDIT, name, batch)
    assert found.shape == (int(batch.length_R.sum()),) and np.isfinite(found).all()
    assert found.any()
    order = np.random.default_rng(3).permutation(10)
    moved = permuted(batch, order)
    expected = [rows_of(batch, found)[i] for i in order]
    for ours, theirs in zip(rows_of(moved, call(CREDIT, name, moved)), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("registry", [ADVANTAGES, REWARDS, CREDIT], ids=["adv", "reward", "credit"])
def test_an_empty_batch_gives_an_empty_result(registry: Any) -> None:
    """A step in which nothing could be graded on this process."""
    nothing = np.zeros(0)
    empty = RewardBatch(
        reward_R=nothing,
        group_R=np.zeros(0, dtype=np.int64),
        length_R=np.zeros(0, dtype=np.int64),
        part_RM=np.zeros((0, 2)),
        part_names=("structure", "content"),
        logp_R=nothing,
        logp_D=nothing,
        entropy_D=nothing,
        token_D=np.zeros(0, dtype=np.int64),
        step_R=[],
        state_keys_R=[],
        step_reward_R=[],
        answer_R=[],
        baseline_R=nothing,
        extra=dict.fromkeys(whole_batch().extra, nothing),
    )
    for name in registry:
        assert call(registry, name, empty).shape == (0,), name
