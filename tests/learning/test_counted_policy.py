"""A function's own calls: an attempt is a call of the run, and what it tells as usage counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.learning.worlds import World, journal, settings
from tfgrpo.context import Context
from tfgrpo.messages import Message
from tfgrpo.policies.chat import FunctionPolicy
from tfgrpo.rollout import Rollout, Step, Usage


def told(prompt: str, context: Context) -> Rollout:
    usage = Usage(uncached_tokens=30, text_tokens=5, calls=2, cost_usd=0.01)
    return Rollout("", "", (Step(Message("assistant", "guess")),), usage=usage)


def run(tmp_path: Path, agent: Any, **sections: Any) -> Any:
    config = settings(tmp_path, learn={"entries": "exemplars"}, **sections)
    return World().learn(config, policy=FunctionPolicy(agent, policy_id="agent-1"))


def test_attempts_of_a_function_stop_at_the_cap_on_calls(tmp_path: Path) -> None:
    attempts: list[str] = []

    def agent(prompt: str, context: Context) -> str:
        attempts.append(prompt)
        return "guess"

    result = run(tmp_path, agent, budget={"calls": 20})
    assert result.exit_code == 4 and len(attempts) == 20
    again = run(tmp_path, agent, budget={"calls": 26})
    assert again.exit_code == 4 and len(attempts) == 26


def test_what_a_function_tells_of_its_calls_is_in_the_books(tmp_path: Path) -> None:
    result = run(tmp_path, told)
    rollouts = sum(sum(row.values()) for row in result.outcomes.values())
    used = sum((row.usage for row in result.spend), Usage())
    assert (used.calls, used.prompt_tokens) == (2 * rollouts, 30 * rollouts)
    assert used.cost_usd is not None and abs(used.cost_usd - 0.01 * rollouts) < 1e-9
    with journal(tmp_path) as store:
        assert store.ledger.spent["calls"] == 2 * rollouts


def test_money_that_a_function_does_not_tell_is_unknown_and_not_zero(tmp_path: Path) -> None:
    result = run(tmp_path, lambda prompt, context: "guess")
    assert result.spend and all(row.usage.cost_usd is None for row in result.spend)
    rollouts = sum(sum(row.values()) for row in result.outcomes.values())
    assert sum(row.usage.calls for row in result.spend) == rollouts
