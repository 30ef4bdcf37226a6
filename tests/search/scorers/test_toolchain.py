"""ToolChain*'s four parts by hand, plan memory, and what a solved plan changes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message, ToolCall
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task
from tfgrpo.search import (
    PAPER,
    ROBUST,
    BestFirst,
    FunctionExpander,
    ImmutableEnvironment,
    Node,
    PlanMemory,
    SearchContext,
    SearchSettings,
    ToolChainScorer,
    Tree,
    call,
    search,
    search_tree,
)
from tfgrpo.search.plan_memory import shared_length
from tfgrpo.search.scorers.toolchain import cost_preset
from tfgrpo.store.budget import Budget


def memory_of(*plans: list[str], min_length: int = 1) -> PlanMemory:
    memory = PlanMemory(min_length=min_length)
    for i, plan in enumerate(plans):
        memory.add(plan, task_id=f"other-{i}")
    return memory


async def score(scorer: ToolChainScorer, path: list[str], name: str, prior: float) -> Any:
    """Return the score of `name` proposed after `path`."""
    tree = Tree()
    parent = tree.root
    for step in path:
        parent = tree.add(Node(-1, parent.id, parent.depth + 1, step, step))
    child = Node(-1, parent.id, parent.depth + 1, name, name, prior=prior)
    ctx = SearchContext(Task("mine", "x"), tree)
    return (await scorer.score(ctx, parent, [child]))[0]


async def test_paper_step_cost_and_future_cost_by_hand() -> None:
    # plan (a, x): LCS with (a, b, c, d) = 1, over min(2, 4) = 2: g1 = 1/2
    scorer = ToolChainScorer(memory_of(["a", "b", "c", "d"]), preset=PAPER)
    found = await score(scorer, ["a"], "x", prior=0.25)
    assert found.parts["g1"] == 0.5
    assert found.step_cost == pytest.approx((0.5 * 0.75) ** 0.5)
    # x never occurs: the nearest name decides; h2 = 1 ancestor / 4 steps of the best match
    assert found.parts["h2"] == 0.25
    # c stands third of four
    found = await score(scorer, ["a", "b"], "c", prior=0.5)
    assert found.parts["h1"] == 0.75
    assert found.to_go == pytest.approx((0.25 * (1 - 2 / 4)) ** 0.5)


async def test_paper_annihilates_one_perfect_part_makes_a_step_free() -> None:
    scorer = ToolChainScorer(memory_of(["a"]), preset=PAPER)
    assert (await score(scorer, [], "a", prior=0.1)).step_cost == 0.0


async def test_paper_saturates_on_a_plan_of_one_call_that_occurs_anywhere() -> None:
    scorer = ToolChainScorer(memory_of(["a"]), preset=PAPER)
    found = await score(scorer, ["a", "z", "z"], "wrong", prior=0.1)
    assert found.parts["g1"] == 1.0


async def test_robust_neither_annihilates_nor_saturates_and_ignores_short_plans() -> None:
    product = replace(ROBUST, combine="product")
    short = ToolChainScorer(memory_of(["a"]), preset=product)
    assert (await score(short, [], "a", prior=0.2)).parts["g1"] == 0.0
    scorer = ToolChainScorer(memory_of(["a", "b"]), preset=product)
    sure = await score(scorer, ["a"], "b", prior=1.0)
    assert sure.parts["g1"] == 1.0
    assert sure.step_cost == pytest.approx(0.1)  # both factors at the floor
    long = await score(scorer, ["a", "z", "z"], "b", prior=0.5)
    assert long.parts["g1"] == 2 / 4


async def test_robust_counts_the_steps_to_go_weighted_by_the_match() -> None:
    scorer = ToolChainScorer(memory_of(["a", "b"], ["c", "d", "e", "f"]), preset=ROBUST)
    found = await score(scorer, [], "a", prior=0.5)
    # shares: 1/2 and 0, so weights 1 and 0.5; one and three steps left
    assert found.parts["total"] == pytest.approx(1 + (1 * 1 + 0.5 * 3) / 1.5)
    assert found.to_go == pytest.approx((1 + 1.5) / 1.5 * ROBUST.step_estimate)
    assert found.step_cost == pytest.approx(0.3 * 0.5 + 0.7 * 0.5)


@pytest.mark.parametrize("preset", [PAPER, ROBUST])
async def test_an_empty_memory_leaves_the_frequency(preset: Any) -> None:
    found = await score(ToolChainScorer(preset=preset), ["a"], "b", prior=0.75)
    assert found.step_cost == pytest.approx(0.25)


async def test_the_task_s_own_plan_never_helps_itself() -> None:
    memory = PlanMemory()
    memory.add(["a", "b"], task_id="mine")
    scorer = ToolChainScorer(memory)
    assert (await score(scorer, ["a"], "b", 0.5)).parts["g1"] == 0.0
    memory.add(["a", "b"], task_id="other")
    memory.add(["x", "y"], task_id="other")
    assert (await score(scorer, ["a"], "b", 0.5)).parts["g1"] == 1.0


def brute(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    subsequences = {
        tuple(c) for n in range(len(first) + 1) for c in itertools.combinations(first, n)
    }
    return max(
        n
        for n in range(len(second) + 1)
        for c in itertools.combinations(second, n)
        if tuple(c) in subsequences
    )


def test_the_longest_common_subsequence_is_that_of_brute_force() -> None:
    for first in itertools.product("ab", repeat=4):
        for second in itertools.product("abc", repeat=3):
            assert shared_length(first, second) == brute(first, second)


def group(task_id: str, names: list[str], reward: float | None) -> RolloutGroup:
    steps = tuple(
        Step(Message("assistant", "", (ToolCall(f"c{i}", n, '{"x": 1}'),)))
        for i, n in enumerate(names)
    )
    rollout = Rollout("r", task_id, steps)
    if reward is not None:
        rollout = rollout.graded(Score(reward))
    return RolloutGroup("g", Task(task_id, "t"), (rollout,))


def test_only_verified_plans_enter_the_memory() -> None:
    memory = PlanMemory()
    assert memory.add_group(group("t", ["a", "b"], 0.5)) == 0
    assert memory.add_group(group("t", ["a", "b"], None)) == 0
    assert memory.add_group(group("t", ["a", "b"], 1.0)) == 1
    assert memory.add_group(group("u", ["a", "b"], 1.0)) == 1
    assert [(p.names, p.task_ids) for p in memory] == [(("a", "b"), ("t", "u"))]


def test_memory_is_bounded_and_survives_a_file(tmp_path: Path) -> None:
    memory = PlanMemory(max_plans=2)
    for i in range(4):
        memory.add([f"a{i}", "b"], task_id=f"t{i}")
    memory.save(tmp_path / "plans.json")
    again = PlanMemory.load(tmp_path / "plans.json")
    assert [p.names for p in again] == [("a2", "b"), ("a3", "b")]
    (tmp_path / "plans.json").write_text(json.dumps({"version": 9}))
    with pytest.raises(ConfigError, match="version 9"):
        PlanMemory.load(tmp_path / "plans.json")
    with pytest.raises(ConfigError, match="task_id"):
        memory.add(["a", "b"], task_id="")


async def test_a_solved_plan_enters_the_memory_and_lowers_the_next_cost_and_effort() -> None:
    def offer(ctx: SearchContext, node: Node, k: int) -> list[Any]:
        return [call(n) for n in ("up", "left", "right", "down")]

    def world() -> ImmutableEnvironment:
        return ImmutableEnvironment(
            (), lambda s, a: (*s, a["name"]), goal=lambda s: s == ("right", "down", "left")
        )

    memory, options = PlanMemory(), {"budget": Budget(expansions=200, depth=3)}
    settings = SearchSettings(samples=4)

    async def effort(task_id: str) -> tuple[int, float]:
        scorer = ToolChainScorer(memory)
        result = await search_tree(
            Task(task_id, "x"),
            FunctionExpander(offer, calls=1),
            world(),
            algorithm=BestFirst.astar(),
            scorer=scorer,
            settings=settings,
            **options,
        )
        assert result.is_solved
        # one LLM call an expansion
        assert result.usage_by_role["propose"].calls == result.counters["expansions"]
        return result.counters["expansions"], result.best.g

    before = await effort("second")
    found = await search(
        Task("first", "x"),
        FunctionExpander(offer, calls=1),
        world(),
        memory=memory,
        settings=settings,
        **options,
    )
    assert found.rewards_G == (1.0,)
    assert [p.names for p in memory] == [("right", "down", "left")]
    after = await effort("second")
    assert after[0] < before[0]
    assert after[1] < before[1]


def test_a_knob_outside_its_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="alpha=2"):
        replace(ROBUST, alpha=2)
    with pytest.raises(ConfigError, match="paper, robust"):
        ToolChainScorer(preset="other")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"alpha": "much"}, "alpha='much'"),
        ({"beta": True}, "beta=True"),
        ({"step_estimate": -1.0}, "step_estimate=-1.0"),
        ({"min_plan": 1.5}, "min_plan=1.5"),
        ({"combine": "sum"}, "combine='sum': product or mean"),
        ({"horizon": None}, "horizon=None: fraction or steps"),
        ({"gamma": 0.5}, "no knob 'gamma'"),
        ({"name": "mine"}, "no knob 'name'"),
    ],
)
def test_a_knob_that_is_no_knob_or_has_no_such_value_is_named(
    knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cost_preset("robust", knobs)


async def test_turned_knobs_change_the_costs_by_the_formula() -> None:
    preset = cost_preset("paper", {"alpha": 0.8, "beta": 0.1})
    scorer = ToolChainScorer(memory_of(["a", "b", "c", "d"]), preset=preset)
    found = await score(scorer, ["a"], "x", prior=0.25)  # g1 = 1/2, g2 = 1/4
    assert found.step_cost == pytest.approx(0.5**0.8 * 0.75**0.2)
    found = await score(scorer, ["a", "b"], "c", prior=0.5)  # h1 = 3/4, h2 = 2/4
    assert found.to_go == pytest.approx(0.25**0.1 * 0.5**0.9)
