"""Promises of the driver, counted: nothing dropped, no budget passed, resume at every event.

The world is random but fixed by a seed: expanders, tools and scorers fail, wait and cost at random,
and some runs are cancelled in the middle.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any

from tfgrpo.errors import PolicyError, ProviderError
from tfgrpo.rollout import Task, Usage
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.search import (
    ALGORITHMS,
    FunctionScorer,
    MemoryLog,
    Node,
    NodeScore,
    Proposal,
    SearchContext,
    SearchResult,
    SearchSettings,
    StepResult,
    make_algorithm,
    search_tree,
)
from tfgrpo.search.views import tree_rows
from tfgrpo.store.budget import ADDITIVE, Budget, Ledger


class RandomWorld:
    """Expander and environment in one; everything is drawn from the path and the seed."""

    is_simulator = True

    def __init__(self, seed: int, *, failing: float = 0.1, waits: bool = True) -> None:
        self.seed, self.failing, self.waits = seed, failing, waits
        self.paid_calls = 0
        self.paid_samples = 0
        self.tool_runs = 0
        self.finished_calls: list[tuple[int, int]] = []

    def _rng(self, *parts: Any) -> random.Random:
        return random.Random(derive_seed(self.seed, *parts))

    async def _wait(self, rng: random.Random) -> None:
        if self.waits:
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)

    def estimate(self, ctx: SearchContext, node: Node, k: int) -> dict[str, float]:
        return {
            "calls": 1.0,
            "prompt_tokens": 60.0,
            "completion_tokens": 12.0 * k,
            "cost_usd": 0.001 * (60 + 12 * k),
        }

    async def propose(self, ctx: SearchContext, node: Node, k: int) -> list[Proposal]:
        path = [n.action_key for n in ctx.tree.path(node)[1:]]
        rng = self._rng("propose", path, ctx.first_sample)
        await self._wait(rng)
        self.paid_calls += 1
        used = Usage(
            uncached_tokens=rng.randrange(10, 60), text_tokens=rng.randrange(1, 12 * k + 1), calls=1
        )
        cost = 0.001 * used.total_tokens
        ctx.spend("propose", Usage(**{**_plain(used), "cost_usd": cost}))
        if rng.random() < self.failing:
            kind = rng.choice(["timeout", "refused", "bad_reply"])
            raise ProviderError("a failing call", kind=kind)  # type: ignore[arg-type]
        if rng.random() < self.failing / 2:
            raise KeyError("a bug of the user's expander")
        await self._wait(rng)
        self.paid_samples += k
        return [Proposal(rng.choice("abcde")) for _ in range(k)]

    async def start(self) -> str:
        return ""

    async def apply(self, handle: str, action: Any) -> StepResult:
        rng = self._rng("apply", handle, action)
        await self._wait(rng)
        self.tool_runs += 1
        if rng.random() < self.failing:
            return StepResult(error="the tool failed")
        if rng.random() < self.failing / 2:
            raise ValueError("a bug of the user's environment")
        state = handle + action
        done = len(state) >= 6 or rng.random() < 0.08
        goal = done and rng.random() < 0.3
        return StepResult(state, f"at {state}", state, done, goal if done else None)

    def fork(self, handle: str) -> str:
        return handle

    def release(self, handle: str) -> None:
        pass

    def key(self, handle: str) -> str:
        return handle

    def effects(self, action: Any) -> str:
        return "reversible"


def _plain(usage: Usage) -> dict[str, Any]:
    return {"uncached_tokens": usage.uncached_tokens, "text_tokens": usage.text_tokens, "calls": 1}


def scorer(seed: int, failing: float = 0.05) -> FunctionScorer:
    """Return a scorer that fails at random."""

    def score(ctx: SearchContext, parent: Node, node: Node) -> NodeScore:
        path = [n.action_key for n in ctx.tree.path(parent)[1:]]
        rng = random.Random(derive_seed(seed, "score", path, node.action_key))
        if rng.random() < failing:
            raise PolicyError("the scorer failed")
        return NodeScore(rng.random(), rng.random(), rng.random(), {"drawn": rng.random()})

    return FunctionScorer(score)


def random_budget(rng: random.Random) -> Budget:
    """Return a budget with one to three limits."""
    choices = {
        "calls": rng.randrange(1, 15),
        "prompt_tokens": rng.randrange(60, 900),
        "completion_tokens": rng.randrange(60, 600),
        "tool_calls": rng.randrange(1, 25),
        "expansions": rng.randrange(1, 15),
        "nodes": rng.randrange(1, 40),
        "cost_usd": rng.uniform(0.1, 1.0),
        "depth": rng.randrange(1, 5),
    }
    names = rng.sample(sorted(choices), rng.randrange(1, 4))
    limits = {name: choices[name] for name in names}
    limits.setdefault("expansions", 40)
    return Budget(**limits)


async def one_budget_run(seed: int) -> tuple[list[str], str]:
    """Search under a random budget; return the limits that were passed, and the stop reason."""
    rng = random.Random(derive_seed(seed, "budget"))
    budget = random_budget(rng)
    ledger = Ledger(budget)
    world, cancel = RandomWorld(seed), asyncio.Event()
    settings = SearchSettings(
        samples=rng.randrange(1, 6),
        mode=rng.choice(["deterministic", "fast"]),  # type: ignore[arg-type]
        concurrency=rng.choice([1, 2, 8]),
        lookahead=rng.choice([0, 1, 4]),
        execution=rng.choice(["lazy", "eager"]),  # type: ignore[arg-type]
        max_failures=rng.choice([2, 8]),
        seed=seed,
    )
    search = asyncio.create_task(
        search_tree(
            Task(f"t{seed}", "t"),
            world,
            world,
            algorithm=make_algorithm(rng.choice(sorted(ALGORITHMS))),
            scorer=scorer(seed),
            settings=settings,
            budget=ledger,
            cancel=cancel,
        )
    )
    ending = rng.random()
    if ending < 0.3:
        for _ in range(rng.randrange(1, 60)):
            await asyncio.sleep(0)
        if ending < 0.15:
            cancel.set()
        else:
            search.cancel()
    reason = "cancelled from outside"
    with contextlib.suppress(asyncio.CancelledError):
        reason = (await search).stop_reason
    return _passed(budget, ledger, world), reason


def _passed(budget: Budget, ledger: Ledger, world: RandomWorld) -> list[str]:
    """Return every limit that the ledger or the world itself says was passed, and what leaked."""
    found = []
    spent = ledger.spent
    for name in (*ADDITIVE, "depth"):
        limit = getattr(budget, name)
        if limit is not None and spent[name] > limit + 1e-9:
            found.append(name)
    if any(ledger.reserved.values()):
        found.append("reserved")
    if budget.calls is not None and world.paid_calls > budget.calls:
        found.append("calls made")
    if budget.tool_calls is not None and world.tool_runs > budget.tool_calls:
        found.append("tools run")
    return found


def budget_figures(runs: int = 1_000) -> dict[str, Any]:
    """Run random searches; count those that passed a limit or left something reserved."""

    async def everything() -> tuple[int, dict[str, int]]:
        violations, reasons = 0, {}
        for seed in range(runs):
            passed, reason = await one_budget_run(seed)
            violations += bool(passed)
            reasons[reason] = reasons.get(reason, 0) + 1
        return violations, reasons

    violations, reasons = asyncio.run(everything())
    return {"budget_violations": violations, "budget_runs": runs, "budget_stop_reasons": reasons}


# --- nothing dropped ----------------------------------------------------------------------------


async def one_full_run(
    seed: int,
    *,
    algorithm: str = "astar",
    mode: str = "deterministic",
    concurrency: int = 1,
    lookahead: int = 4,
    expansions: int = 60,
    execution: str = "lazy",
    log: MemoryLog | None = None,
    world: RandomWorld | None = None,
) -> SearchResult:
    """Search a random world to its end or a cap."""
    world = world or RandomWorld(seed, failing=0.05)
    return await search_tree(
        Task(f"t{seed}", "t"),
        world,
        world,
        algorithm=make_algorithm(algorithm),
        scorer=scorer(seed, 0.0),
        settings=SearchSettings(
            samples=4,
            mode=mode,  # type: ignore[arg-type]
            concurrency=concurrency,
            lookahead=lookahead,
            execution=execution,  # type: ignore[arg-type]
            seed=seed,
            max_failures=1_000,
        ),
        budget=Budget(expansions=expansions),
        log=log,
    )


def samples_in(result: SearchResult) -> int:
    """Return how many samples the tree holds."""
    return sum(node.count for node in result.fold.tree) - 1


def dropped_figures() -> dict[str, Any]:
    """Count paid samples that are not in the tree, at concurrency 1 to 64 in both modes."""
    dropped = different = runs = 0
    for algorithm in sorted(ALGORITHMS):
        for seed in range(3):
            trees = []
            for concurrency in (1, 2, 4, 8, 16, 32, 64):
                for mode in ("deterministic", "fast"):
                    world = RandomWorld(seed, failing=0.05)
                    result = asyncio.run(
                        one_full_run(
                            seed,
                            algorithm=algorithm,
                            mode=mode,
                            concurrency=concurrency,
                            world=world,
                        )
                    )
                    runs += 1
                    dropped += world.paid_samples - samples_in(result)
                    if mode == "deterministic":
                        trees.append(json.dumps(tree_rows(result.fold.tree)))
            different += len(set(trees)) - 1
    return {
        "dropped": dropped,
        "dropped_runs": runs,
        "deterministic_trees_that_differ": different,
    }


# --- resume -------------------------------------------------------------------------------------


def signature(result: SearchResult) -> str:
    """Return the whole result as text, without what depends on the number of sessions."""
    row = [tree_rows(result.fold.tree), result.stop_reason, result.plan]
    usage = {role: u.to_dict() for role, u in sorted(result.usage_by_role.items())}
    counters = {k: v for k, v in result.counters.items() if k != "replayed_steps"}
    spent = {k: v for k, v in result.spent.items() if k != "seconds"}
    return json.dumps([row, usage, counters, spent], sort_keys=True)


RESUME_SEED = 49
"""A world whose search takes more than 300 events with A*."""


def resume_figures(events_wanted: int = 300, algorithm: str = "astar") -> dict[str, Any]:
    """Cut the log of a run after every event, continue, and compare tree and result."""

    async def one(expansions: int, log: MemoryLog) -> SearchResult:
        return await one_full_run(
            RESUME_SEED,
            algorithm=algorithm,
            expansions=expansions,
            concurrency=4,
            execution="eager",
            log=log,
        )

    async def everything() -> tuple[int, int]:
        expansions, log = 10, MemoryLog()
        whole = await one(expansions, log)
        while len(log.events()) < events_wanted and expansions < 400:
            expansions, log = expansions + 5, MemoryLog()
            whole = await one(expansions, log)
        events, wanted, mismatches = log.events(), signature(whole), 0
        for cut in range(1, len(events) + 1):
            again = await one(expansions, MemoryLog(events[:cut]))
            mismatches += signature(again) != wanted
        return mismatches, len(events)

    mismatches, events = asyncio.run(everything())
    return {"resume_mismatches": mismatches, "resume_events": events}
