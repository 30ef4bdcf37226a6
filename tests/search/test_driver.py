"""The driver's promises: budgets, cancellation, failures, effects, resume."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.search import search_properties as properties
from tfgrpo.errors import BudgetError, ConfigError, PolicyError, ProviderError, StoreError
from tfgrpo.rollout import Rollout, Score, Task, Usage
from tfgrpo.search import (
    BestFirst,
    BestOfN,
    FileLog,
    FunctionExpander,
    FunctionScorer,
    ImmutableEnvironment,
    MemoryLog,
    Node,
    NodeScore,
    SearchContext,
    SearchResult,
    SearchSettings,
    SearchState,
    StepResult,
    TextEnvironment,
    ToolChainScorer,
    UnitScorer,
    search,
    search_tree,
)
from tfgrpo.search.views import tree_rows
from tfgrpo.store.budget import Budget, Ledger

TASK = Task("t", "spell cab")
GOAL = ("c", "a", "b")


def letters(ctx: SearchContext, node: Node, k: int) -> list[str]:
    return ["a", "b", "c", "a"][:k]


def world(**options: Any) -> ImmutableEnvironment:
    return ImmutableEnvironment((), lambda s, a: (*s, a), goal=lambda s: s == GOAL, **options)


async def run(expander: Any = None, environment: Any = None, **options: Any) -> SearchResult:
    options.setdefault("scorer", UnitScorer())
    options.setdefault("budget", Budget(expansions=100, depth=4))
    options.setdefault("settings", SearchSettings(samples=4))
    return await search_tree(
        TASK, expander or FunctionExpander(letters, calls=1), environment or world(), **options
    )


async def test_lazy_runs_a_tool_only_when_its_node_is_visited_and_eager_all_of_them() -> None:
    lazy = await run()
    eager = await run(settings=SearchSettings(samples=4, execution="eager"))
    assert lazy.is_solved and eager.is_solved
    assert lazy.plan == eager.plan == list(GOAL)
    assert lazy.counters["tool_calls"] == lazy.counters["visits"] - 1
    assert eager.counters["tool_calls"] == eager.counters["nodes"] - 1
    assert lazy.counters["tool_calls"] < eager.counters["tool_calls"]


async def test_duplicate_samples_become_one_node_with_a_count_and_a_share() -> None:
    result = await run(budget=Budget(expansions=1))
    first = result.fold.tree[1]
    assert (first.action, first.count, first.prior) == ("a", 2, 0.5)
    assert result.counters["merged_siblings"] == 1


@pytest.mark.parametrize("seed", range(0, 1000, 8))
async def test_no_budget_is_passed_and_nothing_stays_reserved(seed: int) -> None:
    passed, _ = await properties.one_budget_run(seed)
    assert passed == []


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (Budget(expansions=3), "budget: expansions"),
        (Budget(calls=3), "budget: calls"),
        (Budget(tool_calls=2), "budget: tool_calls"),
        (Budget(nodes=7), "budget: nodes"),
    ],
)
async def test_a_spent_budget_gives_the_best_so_far_and_the_reason(
    budget: Budget, reason: str
) -> None:
    result = await run(budget=budget)
    assert result.stop_reason == reason
    assert result.best.id > 0 and result.frontier
    assert not result.is_solved


async def test_a_fuller_budget_continues_a_log_that_a_smaller_one_stopped() -> None:
    log = MemoryLog()
    stopped = await run(budget=Budget(expansions=5, depth=4), log=log)
    assert stopped.stop_reason == "budget: expansions"
    calls = 0

    def counting(ctx: SearchContext, node: Node, k: int) -> list[str]:
        nonlocal calls
        calls += 1
        return letters(ctx, node, k)

    again = await run(FunctionExpander(counting, calls=1), log=log)
    whole = await run()
    assert again.is_solved
    assert tree_rows(again.fold.tree) == tree_rows(whole.fold.tree)
    assert calls == whole.counters["expansions"] - 5
    assert again.spent["calls"] == whole.spent["calls"]


@pytest.mark.parametrize("execution", ["lazy", "eager"])
@pytest.mark.parametrize("mode", ["deterministic", "fast"])
async def test_a_run_killed_after_any_event_continues_to_the_same_result(
    mode: str, execution: str
) -> None:
    options: dict[str, Any] = {"mode": mode, "execution": execution, "expansions": 10}
    log = MemoryLog()
    whole = await properties.one_full_run(3, log=log, **options)
    events = log.events()
    assert len(events) > 30
    for cut in range(1, len(events) + 1):
        again = await properties.one_full_run(3, log=MemoryLog(events[:cut]), **options)
        assert properties.signature(again) == properties.signature(whole), cut


async def test_a_log_file_with_a_torn_last_line_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    log = FileLog(path)
    whole = await run(log=log)
    log.close()
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:20]) + lines[20][:7])
    again = await run(log=FileLog(path))
    assert tree_rows(again.fold.tree) == tree_rows(whole.fold.tree)
    path.write_bytes(b"not json\n")
    with pytest.raises(StoreError, match="no JSON"):
        FileLog(path)


async def test_a_log_of_other_settings_is_refused_with_the_difference() -> None:
    log = MemoryLog()
    await run(log=log)
    with pytest.raises(ConfigError, match="settings="):
        await run(log=log, settings=SearchSettings(samples=3))
    with pytest.raises(ConfigError, match="version 7"):
        await run(log=MemoryLog([{"event": "created", "version": 7}]))


async def test_a_dead_provider_stops_the_search_and_is_raised_by_the_verb() -> None:
    def fail(ctx: SearchContext, node: Node, k: int) -> list[str]:
        raise ProviderError("no key", kind="auth")

    result = await run(FunctionExpander(fail))
    assert result.stop_reason == "provider: auth"
    assert result.error is not None
    with pytest.raises(ProviderError, match="no key"):
        await search(TASK, FunctionExpander(fail), world(), scorer=UnitScorer())


async def test_one_failing_visit_changes_nothing_for_the_others() -> None:
    def sometimes(ctx: SearchContext, node: Node, k: int) -> list[str]:
        if node.action_key == "b" and node.depth == 1:
            raise ProviderError("cut off", kind="refused")
        if node.action_key == "a" and node.depth == 1:
            raise KeyError("a bug")
        return letters(ctx, node, k)

    result = await run(FunctionExpander(sometimes))
    assert result.is_solved
    failed = {n.action_key: n.error for n in result.fold.tree.with_status("dead") if n.depth == 1}
    assert "refused" in failed["b"] and "KeyError" in failed["a"]


async def test_only_failing_calls_stop_the_search_soon() -> None:
    calls = 0

    async def fail(ctx: SearchContext, node: Node, k: int) -> list[str]:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)
        raise ProviderError("busy", kind="overloaded")

    settings = SearchSettings(samples=1, max_failures=3)
    result = await run(FunctionExpander(fail), algorithm=BestOfN(50), settings=settings)
    assert calls < 20
    assert result.stop_reason == "provider: failing"


async def test_a_failing_scorer_leaves_paid_children_in_the_tree() -> None:
    def fail(ctx: SearchContext, parent: Node, node: Node) -> float:
        raise ValueError("a bug in the scorer")

    result = await run(scorer=FunctionScorer(fail))
    assert result.is_solved
    assert result.counters["unscored_visits"] == result.counters["expansions"]


async def test_cancel_keeps_what_was_paid_and_returns_every_reservation() -> None:
    cancel, ledger = asyncio.Event(), Ledger(Budget())

    async def slow(ctx: SearchContext, node: Node, k: int) -> list[str]:
        ctx.spend("propose", Usage(calls=1, text_tokens=5))
        if node.depth == 2:
            cancel.set()
            await asyncio.sleep(30)
        return letters(ctx, node, k)

    result = await run(FunctionExpander(slow), cancel=cancel, budget=ledger)
    assert result.stop_reason == "cancelled"
    assert not any(ledger.reserved.values())
    assert ledger.spent["calls"] == result.usage.calls > 0
    assert len(result.fold.tree) > 4


async def test_cancelling_from_outside_stops_all_visits_first() -> None:
    running, ledger = 0, Ledger(Budget())
    deep = asyncio.Event()

    async def slow(ctx: SearchContext, node: Node, k: int) -> list[str]:
        nonlocal running
        running += 1
        try:
            if node.depth:
                deep.set()
                await asyncio.Event().wait()
        finally:
            running -= 1
        return letters(ctx, node, k)

    settings = SearchSettings(samples=4, mode="fast")
    job = asyncio.create_task(run(FunctionExpander(slow), settings=settings, budget=ledger))
    await deep.wait()
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert running == 0
    assert not any(ledger.reserved.values())


async def test_a_deadline_stops_a_hanging_model_with_the_best_so_far() -> None:
    async def hang(ctx: SearchContext, node: Node, k: int) -> list[str]:
        if node.depth:
            await asyncio.sleep(60)
        return letters(ctx, node, k)

    async with asyncio.timeout(5):
        result = await run(FunctionExpander(hang), budget=Budget(seconds=0.2))
    assert result.stop_reason == "budget: seconds"
    assert len(result.fold.tree) == 4


async def test_an_irreversible_tool_never_runs_in_search_unless_the_world_is_a_simulator() -> None:
    ran: list[str] = []

    def step(state: tuple[str, ...], action: str) -> tuple[str, ...]:
        ran.append(action)
        return (*state, action)

    def effect(action: str) -> Any:
        return "irreversible" if action == "b" else "reversible"

    def environment(is_simulator: bool) -> ImmutableEnvironment:
        return ImmutableEnvironment(
            (), step, goal=lambda s: s == GOAL, effect=effect, is_simulator=is_simulator
        )

    live = await run(environment=environment(False))
    assert "b" not in ran
    waiting = [n for n in live.fold.tree.with_status("terminal") if n.action == "b"]
    assert waiting and all("not run" in n.observation for n in waiting)
    await run(environment=environment(True))
    assert "b" in ran


async def test_patience_stops_a_search_that_no_longer_improves() -> None:
    settings = SearchSettings(samples=4, patience=5)
    scorer = FunctionScorer(lambda ctx, parent, node: NodeScore(1.0, 0.0, 0.5 - node.depth))
    result = await run(settings=settings, scorer=scorer, budget=Budget(expansions=90))
    assert result.stop_reason == "patience"
    assert result.counters["expansions"] < 20


class Reward:
    """A verifier that likes one plan; it fails on another."""

    verifier_id = "reward"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        pass

    async def score(self, rollout: Rollout, task: Task) -> Score:
        text = "".join(s.action.content for s in rollout.steps)
        if "aa" in text:
            raise PolicyError("no idea")
        return Score(1.0 if text == "bcAnswer" else 0.0)


async def test_a_verifier_steers_only_where_the_settings_say_so() -> None:
    def offer(ctx: SearchContext, node: Node, k: int) -> list[str]:
        return ["Answer"] if node.depth == 2 else ["a", "b", "c"]

    async def goals(verify: Any) -> list[str]:
        result = await run(
            FunctionExpander(offer),
            TextEnvironment(),
            algorithm=BestFirst.astar(),
            verifier=Reward(),
            settings=SearchSettings(samples=3, verify=verify),
        )
        return ["".join(result.plan), result.stop_reason]

    assert await goals("during") == ["bcAnswer", "goal"]
    assert (await goals("after"))[0] != "bcAnswer"


async def test_merging_is_refused_where_costs_depend_on_the_path() -> None:
    eager: dict[str, Any] = {"samples": 4, "execution": "eager"}
    with pytest.raises(ConfigError, match="whole path"):
        await run(scorer=ToolChainScorer(), settings=SearchSettings(**eager, merge="sound"))
    with pytest.raises(ConfigError, match="eager"):
        SearchSettings(merge="sound")
    settings = SearchSettings(**eager, merge="any")
    assert (await run(scorer=ToolChainScorer(), settings=settings)).is_solved


async def test_merged_states_are_expanded_once() -> None:
    counter = ImmutableEnvironment(0, lambda s, a: s + int(a), goal=lambda s: s == 7)
    offer = FunctionExpander(lambda ctx, node, k: ["1", "2", "3"])
    settings = SearchSettings(samples=3, execution="eager", merge="sound")
    result = await run(offer, counter, settings=settings, budget=Budget(expansions=100))
    assert result.best.g == 3.0
    keys = [n.state_key for n in result.fold.tree]
    assert len(keys) == len(set(keys))
    assert result.counters["merged_states"] > 0


async def test_a_budget_error_of_the_model_s_own_journal_stops_the_search() -> None:
    def refuse(ctx: SearchContext, node: Node, k: int) -> list[str]:
        if node.depth:
            raise BudgetError("the run has no money left", resource="cost_usd")
        return letters(ctx, node, k)

    result = await run(FunctionExpander(refuse))
    assert result.stop_reason == "budget: cost_usd"
    assert len(result.fold.tree) == 4


async def test_extra_proposals_are_cut_to_the_samples_that_were_reserved() -> None:
    offer = FunctionExpander(lambda ctx, node, k: list("abcdefgh"))
    result = await run(offer, budget=Budget(expansions=1), settings=SearchSettings(samples=3))
    assert len(result.fold.tree) == 4
    assert result.counters["cut_proposals"] == 5


async def test_the_live_hook_sees_every_commit() -> None:
    sizes: list[int] = []

    def watch(fold: SearchState) -> None:
        sizes.append(len(fold.tree))

    result = await run(on_commit=watch)
    assert len(sizes) == result.counters["visits"]
    assert sizes == sorted(sizes)


async def test_a_failed_outcome_keeps_its_reason_on_the_node() -> None:
    def step(state: Any, action: str) -> Any:
        if action == "a":
            raise RuntimeError("door is locked")
        return StepResult((*state, action), f"took {action}")

    environment = ImmutableEnvironment((), step, goal=lambda s: s == ("c", "b"))
    result = await run(environment=environment)
    assert result.plan == ["c", "b"]
    dead = result.fold.tree.with_status("dead")
    assert any("door is locked" in n.error for n in dead)
    assert result.best.observation == "took b"
    json.dumps(tree_rows(result.fold.tree))
