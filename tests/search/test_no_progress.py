"""Steps that add nothing are closed or merged; what a read says is part of the state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.rollout import Task
from tfgrpo.runtime.texts.repetition import goes_round
from tfgrpo.search import FunctionExpander, SearchSettings, UnitScorer, call, search_tree
from tfgrpo.search.algorithms.depth_first import DepthFirst
from tfgrpo.search.environments.tools import ToolEnvironment
from tfgrpo.search.state import NO_PROGRESS
from tfgrpo.store.budget import Budget


def read(state: dict[str, Any]) -> str:
    """Read the note."""
    return "the code is 7"


def move(state: dict[str, Any], by: int) -> str:
    """Move."""
    state["at"] = (state["at"] + by) % 5
    return "moved"


def enter(state: dict[str, Any], code: int) -> str:
    """Enter a code."""
    state["open"] = code == 7
    return "done"


def world() -> ToolEnvironment:
    return ToolEnvironment(
        [read, move, enter],
        state={"at": 0, "open": False},
        goal=lambda s: s["open"],
        effects={"read": "read"},
        finish=False,
    )


def plans_by(next_steps: Any) -> FunctionExpander:
    return FunctionExpander(lambda ctx, node, k: next_steps(ctx.tree.path(node)[1:]))


async def search(next_steps: Any, algorithm: Any, **settings: Any) -> Any:
    return await search_tree(
        Task("t", "Open it."),
        plans_by(next_steps),
        world(),
        scorer=UnitScorer(),
        algorithm=algorithm,
        settings=SearchSettings(**settings),
        budget=Budget(nodes=400, depth=30),
    )


@pytest.mark.parametrize("execution", ["lazy", "eager"])
async def test_a_chain_does_not_repeat_a_read_to_the_depth_limit(execution: str) -> None:
    result = await search(lambda path: [call("read")], DepthFirst(), execution=execution)
    nodes = list(result.fold.tree)
    assert max(n.depth for n in nodes) == 2
    assert [n.error for n in nodes if n.depth == 2] == [NO_PROGRESS]


async def test_a_cycle_of_states_is_closed() -> None:
    result = await search(
        lambda path: [call("move", by=1 if len(path) % 2 == 0 else -1)], DepthFirst()
    )
    assert max(n.depth for n in result.fold.tree) == 6


async def test_a_plan_that_needs_what_a_read_said_is_found_where_states_merge() -> None:
    def next_steps(path: list[Any]) -> list[Any]:
        knows = any("code is 7" in n.observation for n in path)
        return [call("read"), call("move", by=1), *([call("enter", code=7)] if knows else [])]

    for merge in ("sound", "any"):
        result = await search(next_steps, DepthFirst(), execution="eager", merge=merge)
        assert result.best.is_goal
        assert [s["name"] for s in result.plan][-1] == "enter"


async def test_equal_states_with_equal_knowledge_still_merge() -> None:
    def next_steps(path: list[Any]) -> list[Any]:
        return [call("read"), call("move", by=1)]

    result = await search(next_steps, DepthFirst(), execution="eager", merge="any")
    # Five places; the note is read at none or at any of them on the way.
    assert result.stop_reason == "exhausted"
    assert len({(n.state_key) for n in result.fold.tree}) == 5
    assert len(list(result.fold.tree)) <= 5 * 2**5


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_what_goes_round_is_a_sequence_that_ends_in_repetitions(marks: list[str]) -> None:
    text = "".join(marks)
    lengths = range(1, min(8, len(text)) + 1)
    ends = any(text.endswith(text[-n:] * (5 if n == 1 else 3)) for n in lengths)
    assert goes_round(marks) == ends
