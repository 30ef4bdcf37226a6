"""The core records: what can be built, what is refused, and that JSON gives them back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.context import Context, ContextPart
from tfgrpo.messages import Message, ToolCall
from tfgrpo.rollout import (
    OUTCOMES,
    Rollout,
    RolloutGroup,
    Score,
    Step,
    Task,
    Usage,
    group_id_of,
)
from tfgrpo.runtime.canonical import canonical_json, derive_seed, digest

texts = st.text(max_size=30)
counts = st.integers(0, 10**9)
usages = st.builds(
    Usage,
    counts,
    counts,
    counts,
    counts,
    counts,
    counts,
    st.none() | st.floats(0, 1e6),
    st.booleans(),
)
messages = st.builds(
    Message,
    st.sampled_from(["user", "assistant", "tool"]),
    texts,
    st.lists(st.builds(ToolCall, texts, texts, texts), max_size=2).map(tuple),
    texts,
    texts,
)
token_lists = st.none() | st.lists(st.integers(0, 2**20), max_size=4).map(tuple)
steps = st.builds(Step, messages, st.lists(messages, max_size=2).map(tuple), token_lists)
scores = st.builds(Score, st.floats(allow_nan=False, allow_infinity=False), texts)


@st.composite
def rollouts(draw: st.DrawFn, task_id: str) -> Rollout:
    outcome = draw(st.sampled_from(OUTCOMES))
    return Rollout(
        rollout_id=draw(texts),
        task_id=task_id,
        steps=tuple(draw(st.lists(steps, max_size=2))),
        outcome=outcome,
        score=draw(scores) if outcome == "graded" else None,
        usage=draw(usages),
        sample_index=draw(counts),
        seed=draw(st.none() | counts),
        error=draw(texts),
        is_truncated=draw(st.booleans()),
        metadata=draw(st.dictionaries(texts, counts, max_size=2)),
    )


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    task_id = draw(st.text(min_size=1, max_size=8))
    prompt = draw(texts | st.lists(messages, min_size=1, max_size=2).map(tuple))
    parts = st.builds(ContextPart, st.sampled_from(["lesson", "hint"]), texts, source=texts)
    return RolloutGroup(
        group_id=draw(texts),
        task=Task(task_id, prompt, draw(st.none() | counts | texts)),
        rollouts=tuple(draw(st.lists(rollouts(task_id), max_size=3))),
        context=Context(tuple(draw(st.lists(parts, max_size=2)))),
        policy_id=draw(texts),
    )


@given(groups())
def test_json_gives_every_group_back(group: RolloutGroup) -> None:
    assert RolloutGroup.from_dict(group.to_dict()) == group


@given(usages, usages, usages)
def test_usage_adds_class_by_class_and_unknown_cost_stays_unknown(
    a: Usage, b: Usage, c: Usage
) -> None:
    total = a + b
    assert total.total_tokens == a.total_tokens + b.total_tokens
    assert total.prompt_tokens == a.prompt_tokens + b.prompt_tokens
    assert (total.cost_usd is None) == (a.cost_usd is None or b.cost_usd is None)
    assert ((a + b) + c).completion_tokens == (a + (b + c)).completion_tokens


def graded(reward: float, index: int) -> Rollout:
    return Rollout(f"r{index}", "t", outcome="graded", score=Score(reward), sample_index=index)


@pytest.mark.parametrize(
    ("rewards", "informative"),
    [
        ([0.5, 0.5, 0.5], False),
        ([2.0, 0.0, 2.0], True),
        ([-1.0, 1.0, -1.0], True),
        ([1.0, 1.0], False),
        ([0.3, 0.3 + 1e-12], False),
        ([1.0], False),
        ([], False),
    ],
)
def test_spread_and_not_the_mean_says_whether_a_group_teaches(
    rewards: list[float], informative: bool
) -> None:
    group = RolloutGroup("g", Task("t", "x"), tuple(graded(r, i) for i, r in enumerate(rewards)))
    assert group.is_informative() is informative


def test_failures_never_enter_the_rewards() -> None:
    failures = [
        Rollout(f"f{o}", "t", outcome=o) for o in OUTCOMES if o not in ("graded", "ungraded")
    ]
    group = RolloutGroup("g", Task("t", "x"), (graded(1.0, 0), *failures, graded(0.0, 1)))
    assert group.rewards_G == (1.0, 0.0)
    assert group.mean_reward == 0.5
    assert sum(group.outcome_counts().values()) == len(group.rollouts)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_is_finite(reward: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Score(reward)


@pytest.mark.parametrize("outcome", [o for o in OUTCOMES if o != "graded"])
def test_only_graded_rollouts_carry_a_score(outcome: str) -> None:
    with pytest.raises(ValueError, match="belongs to 'graded'"):
        Rollout("r", "t", outcome=outcome, score=Score(0.0))  # type: ignore[arg-type]


def test_a_group_refuses_the_rollout_of_another_task() -> None:
    with pytest.raises(ValueError, match="'t2'"):
        RolloutGroup("g", Task("t1", "same"), (Rollout("r", "t2"),))


def test_equal_texts_under_two_ids_are_two_groups() -> None:
    ids = {group_id_of(Task(i, "same"), Context(), "p") for i in ("a", "b")}
    assert len(ids) == 2


@given(st.dictionaries(texts, st.lists(st.integers() | texts), max_size=4))
def test_canonical_json_ignores_key_order_and_nothing_else(value: dict[str, object]) -> None:
    turned = dict(reversed(value.items()))
    assert canonical_json(turned) == canonical_json(value)
    assert digest(value | {"extra": 1}) != digest(value | {"extra": 2})


@pytest.mark.parametrize("value", [math.nan, {1: 2}, object(), b"x"])
def test_what_json_cannot_carry_is_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        canonical_json(value)


def test_seeds_are_fixed_by_their_parts_and_fit_31_bits() -> None:
    seeds = {derive_seed(0, "t", i) for i in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= s < 2**31 for s in seeds)
