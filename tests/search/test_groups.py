"""A search as a group: shared prefixes, usage once, advantages relative to the forks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task, Usage
from tfgrpo.search import (
    BestOfN,
    FunctionExpander,
    ImmutableEnvironment,
    Node,
    SearchContext,
    SearchSettings,
    StepResult,
    UnitScorer,
    fork_advantages,
    group_of,
    search_tree,
    tree_advantages,
)
from tfgrpo.search.groups import advantage_rows, step_values
from tfgrpo.store.budget import Budget


def rollout(name: str, path: list[int], reward: float, observation: str = "ok") -> Rollout:
    steps = tuple(
        Step(Message("assistant", f"s{i}"), (Message("user", observation),)) for i in path[1:]
    )
    metadata = {"node_path": path, "shared_steps": 0}
    return Rollout(name, "t", steps, metadata=metadata).graded(Score(reward))


def tree_group() -> RolloutGroup:
    """The root forks into 1 and 2; 1 into 3 (reward 1) and 4 (0); 2 ends in 5 (0)."""
    rollouts = (
        rollout("a", [0, 1, 3], 1.0),
        rollout("b", [0, 1, 4], 0.0),
        rollout("c", [0, 2, 5], 0.0),
    )
    return RolloutGroup("g", Task("t", "x"), rollouts)


def test_a_step_is_worth_the_mean_of_the_leaves_below_it() -> None:
    assert step_values(tree_group()) == {0: 1 / 3, 1: 0.5, 2: 0.0, 3: 1.0, 4: 0.0, 5: 0.0}
    halved = step_values(tree_group(), discount=0.5)
    assert halved[1] == 0.25 and halved[0] == pytest.approx(0.25 / 3)


def test_fork_advantages_by_hand() -> None:
    found = fork_advantages(tree_group(), blend=0.5)
    # node 1: 0.5 against the mean 0.25 of {0.5, 0}; rollout a: 1 against 1/3
    assert found["a"] == pytest.approx([0.5 * 0.25 + 0.5 * 2 / 3, 0.5 * 0.5 + 0.5 * 2 / 3])
    assert found["b"] == pytest.approx([0.5 * 0.25 - 0.5 / 3, -0.5 * 0.5 - 0.5 / 3])
    # node 5 has no sibling: only the path part
    assert found["c"] == pytest.approx([-0.5 * 0.25 - 0.5 / 3, -0.5 / 3])


def test_the_fork_part_of_a_shared_step_is_equal_in_all_its_rollouts() -> None:
    found = fork_advantages(tree_group(), blend=1.0)
    assert found["a"][0] == found["b"][0]
    assert fork_advantages(tree_group(), blend=1.0)["c"][1] == 0.0


def test_a_failed_call_earns_no_bonus() -> None:
    group = tree_group()
    failed = rollout("b", [0, 1, 4], 0.0, observation="Error: no")
    group = RolloutGroup("g", group.task, (group.rollouts[0], failed, group.rollouts[2]))
    plain = fork_advantages(group, blend=1.0)
    bonus = fork_advantages(group, blend=1.0, call_bonus=0.2)
    assert bonus["a"][1] - plain["a"][1] == pytest.approx(0.1)


def test_tree_advantages_by_hand() -> None:
    found = tree_advantages(tree_group())
    assert found["a"][0] == pytest.approx((0.5 - 1 / 3 + 0.5 - 1 / 3) / math.sqrt(2))
    assert found["a"][1] == pytest.approx((1 - 1 / 3) + (1 - 0.5))


def test_groups_that_no_search_made_are_refused() -> None:
    plain = Rollout("r", "t", (Step(Message("assistant", "x")),)).graded(Score(1.0))
    with pytest.raises(ConfigError, match="a search made"):
        fork_advantages(RolloutGroup("g", Task("t", "x"), (plain,)))
    with pytest.raises(ConfigError, match="blend"):
        fork_advantages(tree_group(), blend=2.0)


async def found_group(**options: Any) -> tuple[Any, RolloutGroup]:
    async def offer(ctx: SearchContext, node: Node, k: int) -> list[str]:
        ctx.spend("propose", Usage(uncached_tokens=10, text_tokens=k, calls=1))
        return ["a", "b"]

    def step(state: str, action: str) -> StepResult:
        text = state + action
        if text == "ab":
            raise RuntimeError("closed")
        return StepResult(text, f"at {text}", is_terminal=len(text) == 3, is_goal=text == "bba")

    result = await search_tree(
        Task("t", "go"),
        FunctionExpander(offer),
        ImmutableEnvironment("", step),
        scorer=UnitScorer(),
        algorithm=options.pop("algorithm", "breadth_first"),
        settings=SearchSettings(samples=2),
        budget=Budget(expansions=options.pop("expansions", 50)),
    )
    return result, await group_of(result, **options)


async def test_finished_paths_are_rollouts_with_equal_prefixes_and_rewards_of_the_world() -> None:
    result, group = await found_group()
    texts = ["".join(s.action.content for s in r.steps) for r in group.rollouts]
    assert texts == ["aaa", "aab", "baa", "bab", "bba", "bbb"]
    assert group.rewards_G == (0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    assert [r.metadata["shared_steps"] for r in group.rollouts] == [0, 2, 0, 2, 1, 2]
    first, second = group.rollouts[0], group.rollouts[1]
    assert first.steps[:2] == second.steps[:2]
    best = next(r for r in group.rollouts if r.rollout_id == group.metadata["best_rollout"])
    assert best.reward == 1.0
    assert RolloutGroup.from_dict(group.to_dict()) == group
    rows = advantage_rows(RolloutGroup.from_dict(group.to_dict()))
    assert rows[4]["step_advantages"][0] > 0 > rows[0]["step_advantages"][0]
    assert result.stop_reason == "goal"


async def test_what_was_paid_stands_in_the_group_once() -> None:
    result, group = await found_group()
    off_path = Usage.from_dict(group.metadata["off_path_usage"])
    assert group.usage + off_path == result.usage
    assert off_path == Usage()


async def test_failed_paths_are_kept_as_failures_where_asked() -> None:
    _, group = await found_group(include_failed=True)
    counts = group.outcome_counts()
    assert counts == {"graded": 6, "policy_failed": 1}
    failed = next(r for r in group.rollouts if r.outcome == "policy_failed")
    assert "closed" in failed.error and failed.steps[-1].observations[0].content.startswith("Error")


async def test_a_search_without_a_finished_path_gives_its_best_as_cut_short() -> None:
    _, group = await found_group(expansions=1)
    assert group.outcome_counts() == {"truncated": 1}


async def test_independent_chains_of_the_same_words_stay_separate_rollouts() -> None:
    _, group = await found_group(algorithm=BestOfN(3))
    assert len(group.rollouts) == 3
    assert len({r.rollout_id for r in group.rollouts}) == 3
