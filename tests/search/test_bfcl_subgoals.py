"""The sub-goals of the benchmark can be reached: the recorded calls of a turn end in its goal."""

from __future__ import annotations

import pytest

from tests.benchmarks.environments import bfcl

REASON = bfcl.is_available()


@pytest.mark.skipif(bool(REASON), reason=REASON or "available")
async def test_the_recorded_calls_reach_the_goal_of_every_sub_goal_in_any_second() -> None:
    """A state that held the wall clock made thirteen of them impossible."""
    goals = bfcl.read_subgoals(72)
    assert len(goals) == 72
    for goal in goals:
        world = await goal.start()
        steps = []
        for _, action in goal.truth:
            outcome = await goal.apply(world, action)
            assert not outcome.error, (goal.goal_id, action, outcome.error)
            world = outcome.state
            steps.append(outcome.is_goal)
        assert steps[-1], goal.goal_id


@pytest.mark.skipif(bool(REASON), reason=REASON or "available")
async def test_the_same_call_in_the_same_state_gives_the_same_state() -> None:
    for goal in bfcl.read_subgoals(20):
        start = await goal.start()
        for _, action in goal.pool:
            first = await goal.apply(start, action)
            goal.transitions.clear()
            second = await goal.apply(start, action)
            assert first.state_key == second.state_key and first.error == second.error
