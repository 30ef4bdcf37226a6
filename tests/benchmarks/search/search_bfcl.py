"""The BFCL sub-goals under the scorer's presets, with the cheap baselines beside them.

Same simulated proposer outputs for every variant (keyed by path and draw), same goal test, same
cap; equal states are merged in every variant, which is an approximation for the path-dependent
costs. `solved` counts searches that chose a goal within the cap, as the algorithm's own rule says;
`found` also those whose tree held a goal, not yet chosen, when the cap was reached (the product
returns it as the best so far). `not_behind` is whether the paired interval of solved tasks against
frequency-only A* reaches 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from statistics import fmean, stdev
from typing import Any

from tests.benchmarks.environments import bfcl
from tfgrpo.rollout import Task
from tfgrpo.search import (
    MCTS,
    PAPER,
    ROBUST,
    BestFirst,
    DepthFirst,
    FrequencyScorer,
    SearchSettings,
    ToolChainScorer,
    search_tree,
)
from tfgrpo.search.algorithms.protocol import Algorithm
from tfgrpo.search.scorers.scorer import Scorer
from tfgrpo.search.scorers.toolchain import CostPreset
from tfgrpo.store.budget import Budget

Q, K, CAP, SEEDS, COUNT = 0.25, 10, 60, (0, 1, 2, 3), 60
VARIANTS = ("robust", "paper", "frequency", "greedy", "mcts", "dfsdt", "dfsdt_draws")
ALGORITHMS: Mapping[str, Callable[[], Algorithm]] = {
    "frequency": BestFirst.uniform_cost,
    "greedy": BestFirst.greedy,
    "mcts": MCTS,
    "dfsdt": DepthFirst.dfsdt,
    "dfsdt_draws": DepthFirst.dfsdt,
}
"""Those that are not A*; MCTS takes 1 − step cost for a node's value."""


def scorers(preset: CostPreset) -> dict[tuple[str, ...], ToolChainScorer]:
    """Return one scorer an API set over its memory."""
    memories = bfcl.memories(min_length=preset.min_plan)
    return {classes: ToolChainScorer(m, preset=preset) for classes, m in memories.items()}


async def run_one(
    goal: bfcl.SubGoal, algorithm: Algorithm, scorer: Scorer, seed: int, q: float, cap: int
) -> tuple[bool, int, int, bool]:
    """Return solved, expansions, tool executions and found of one search."""
    result = await search_tree(
        Task(goal.task_id, goal.goal_id),
        bfcl.SimulatedProposer(goal, q, seed),
        goal,
        algorithm=algorithm,
        scorer=scorer,
        settings=SearchSettings(samples=K, execution="eager", merge="any", seed=seed),
        budget=Budget(expansions=cap),
    )
    counters, is_chosen = result.counters, result.stop_reason == "goal"
    return is_chosen, counters["expansions"], counters["tool_calls"], result.is_solved


async def run_variant(name: str, goals: list[bfcl.SubGoal], q: float = Q) -> list[list[Any]]:
    """Return, for each seed, the runs of all sub-goals."""
    presets = {"robust": ROBUST, "paper": PAPER}
    by_api = scorers(presets[name]) if name in presets else {}
    rows = []
    for seed in SEEDS:
        row = []
        for goal in goals:
            scorer: Scorer = by_api[goal.classes] if by_api else FrequencyScorer()
            algorithm = ALGORITHMS.get(name, BestFirst.astar)()
            # an expansion draws K samples in one call, but DFSDT's one
            cap = CAP * K if name == "dfsdt_draws" else CAP
            row.append(await run_one(goal, algorithm, scorer, seed, q, cap))
        rows.append(row)
    return rows


def summary(rows: list[list[Any]]) -> dict[str, float]:
    """Return means over seeds with their spread."""
    solved = [sum(r[0] for r in row) for row in rows]
    expansions = [fmean(r[1] for r in row) for row in rows]
    return {
        "solved": round(fmean(solved), 2),
        "solved_sd": round(stdev(solved), 2),
        "expansions": round(fmean(expansions), 2),
        "expansions_sd": round(stdev(expansions), 2),
        "found": round(fmean(sum(r[3] for r in row) for row in rows), 2),
        "tool_executions": round(fmean(r[2] for row in rows for r in row), 1),
    }


def paired(
    goals: list[bfcl.SubGoal], base: list[list[Any]], other: list[list[Any]], column: int
) -> dict[str, float]:
    """Return the paired difference a sub-goal, bootstrapped over sub-goals."""
    from tfgrpo.statistics import paired_difference

    def by_goal(rows: list[list[Any]]) -> dict[str, list[float]]:
        return {g.goal_id: [float(row[i][column]) for row in rows] for i, g in enumerate(goals)}

    interval = paired_difference(by_goal(base), by_goal(other))
    return {n: round(float(getattr(interval, n)), 4) for n in ("estimate", "low", "high")}


def bfcl_figures() -> dict[str, Any]:
    """Every variant on the first 60 sub-goals."""
    reason = bfcl.is_available()
    if reason:
        return {"bfcl": None, "bfcl_skipped": reason}
    goals = bfcl.read_subgoals(COUNT)
    runs = {name: asyncio.run(run_variant(name, goals)) for name in VARIANTS}
    figures: dict[str, Any] = {name: summary(rows) for name, rows in runs.items()}
    for name in ("robust", "paper"):
        difference = paired(goals, runs["frequency"], runs[name], 0)
        figures[name]["solved_minus_frequency"] = difference
        figures[name]["not_behind"] = difference["high"] >= 0
        against_greedy = paired(goals, runs["greedy"], runs[name], 0)
        figures[name]["solved_minus_greedy"] = against_greedy
    return {"bfcl": figures}
