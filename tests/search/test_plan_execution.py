"""Carrying out a plan: order, confirmation, budget, and the stop at the first surprise."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tfgrpo.errors import BudgetError, ConfigError
from tfgrpo.rollout import Task
from tfgrpo.search import (
    FunctionExpander,
    SearchResult,
    SearchSettings,
    StepResult,
    UnitScorer,
    call,
    carry_out,
    search_tree,
)
from tfgrpo.search.environments.tools import ToolEnvironment
from tfgrpo.search.node import Node
from tfgrpo.search.plan_execution import CarriedStep
from tfgrpo.store.budget import Budget, Ledger

PLAN = [call("look"), call("draw", amount=5), call("pay", to="ann")]
EFFECTS: Any = {"look": "read", "draw": "reversible", "pay": "irreversible"}


class Bank:
    """A world outside the process: tools change it for good and count their calls."""

    def __init__(self, account: int = 9) -> None:
        self.account = account
        self.calls: list[str] = []

    def environment(self, **changes: Callable[..., Any]) -> ToolEnvironment:
        def look() -> str:
            """Say what is there."""
            self.calls.append("look")
            return f"{self.account} there"

        def draw(amount: int) -> str:
            """Take money."""
            self.calls.append("draw")
            return f"drew {amount}"

        def pay(to: str) -> str:
            """Pay for good."""
            self.calls.append("pay")
            self.account -= 5
            return f"paid {to}"

        tools: dict[str, Callable[..., Any]] = {"look": look, "draw": draw, "pay": pay}
        tools.update(changes)
        return ToolEnvironment(list(tools.values()), effects=EFFECTS)


async def found(bank: Bank) -> SearchResult:
    """Search for the plan; paying is not run."""
    offer = FunctionExpander(lambda ctx, node, k: [PLAN[node.depth]])
    return await search_tree(
        Task("t", "pay Ann"),
        offer,
        bank.environment(),
        scorer=UnitScorer(),
        settings=SearchSettings(samples=1),
        budget=Budget(expansions=9),
    )


def yes(action: Any, steps: Sequence[CarriedStep]) -> bool:
    return True


async def test_the_search_leaves_the_irreversible_step_and_carrying_out_runs_it_once() -> None:
    bank = Bank()
    result = await found(bank)
    assert result.plan == PLAN and "pay" not in bank.calls and bank.account == 9
    bank.calls.clear()
    asked = []

    async def confirm(action: Any, steps: Sequence[CarriedStep]) -> bool:
        asked.append((action["name"], len(steps), tuple(bank.calls)))
        return True

    ledger = Ledger(Budget(tool_calls=3))
    report = await carry_out(result, bank.environment(), confirm=confirm, budget=ledger)
    assert report.is_done and report.left == () and bank.account == 4
    assert bank.calls == ["look", "draw", "pay"]
    assert asked == [("pay", 2, ("look", "draw"))]  # once, right before it
    assert report.spent["tool_calls"] == 3 and ledger.reserved.get("tool_calls", 0) == 0
    assert "pay(to='ann') [irreversible]" in report.to_text()


@pytest.mark.parametrize("answer", [False, None, "yes", 1])
async def test_anything_but_true_declines_and_nothing_more_runs(answer: Any) -> None:
    bank = Bank()
    result = await found(bank)
    ledger = Ledger(Budget(tool_calls=3))
    report = await carry_out(result, bank.environment(), confirm=lambda *_: answer, budget=ledger)
    assert report.stop_reason == "declined" and bank.account == 9
    assert [s.action["name"] for s in report.steps] == ["look", "draw"]
    assert report.left == (PLAN[2],) and report.spent["tool_calls"] == 2


async def test_without_confirm_or_budget_or_plan_nothing_starts() -> None:
    bank = Bank()
    result = await found(bank)
    bank.calls.clear()
    with pytest.raises(ConfigError, match=r"pay\(to='ann'\) cannot be undone"):
        await carry_out(result, bank.environment())
    with pytest.raises(BudgetError):
        await carry_out(result, bank.environment(), confirm=yes, budget=Budget(tool_calls=2))
    with pytest.raises(ConfigError, match="no finished plan"):
        await carry_out(result, bank.environment(), confirm=yes, node=result.fold.tree.root)
    assert bank.calls == []


def broken(amount: int) -> str:
    """Take money."""
    raise ValueError("the till is shut")


def other(amount: int) -> str:
    """Take money."""
    return "drew nothing"


@pytest.mark.parametrize(
    ("draw", "message"), [(broken, "failed: .*till is shut"), (other, "'drew nothing', the search")]
)
async def test_the_first_surprise_stops_before_the_irreversible_step(
    draw: Callable[..., Any], message: str
) -> None:
    bank = Bank()
    result = await found(bank)
    draw.__name__ = "draw"
    report = await carry_out(result, bank.environment(draw=draw), confirm=yes)
    assert report.stop_reason == "diverged" and bank.account == 9
    assert [s.action["name"] for s in report.steps] == ["look", "draw"]
    assert not report.steps[0].divergence
    assert re.search(message, report.steps[1].divergence)


async def test_a_world_that_has_moved_on_is_a_surprise_that_a_rule_of_ones_own_may_allow() -> None:
    bank = Bank()
    result = await found(bank)
    bank.account = 7
    report = await carry_out(result, bank.environment(), confirm=yes)
    assert report.stop_reason == "diverged" and len(report.steps) == 1
    assert "'7 there', the search saw '9 there'" in report.to_text()

    def lenient(node: Node, outcome: StepResult) -> str:
        return outcome.error

    again = await carry_out(result, bank.environment(), confirm=yes, differ=lenient)
    assert again.is_done and bank.account == 2


async def test_a_cancelled_run_returns_what_it_held() -> None:
    bank = Bank()
    result = await found(bank)
    ledger = Ledger(Budget(tool_calls=3))

    asked = asyncio.Event()

    async def never(action: Any, steps: Sequence[CarriedStep]) -> bool:
        asked.set()
        await asyncio.Event().wait()
        return True

    run = asyncio.create_task(carry_out(result, bank.environment(), confirm=never, budget=ledger))
    while len(bank.calls) < 4:  # two of the search, two of the plan
        await asyncio.sleep(0.001)
    await asked.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert bank.account == 9 and ledger.reserved.get("tool_calls", 0) == 0
    assert ledger.spent["tool_calls"] == 2
