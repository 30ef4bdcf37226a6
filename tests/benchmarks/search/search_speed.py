"""What the core itself costs: microseconds a node, beside TreeQuest, and slots against waiting.

`us_per_node_100k` is select and commit through tree and algorithm with a trivial expander and no
log; `us_per_node_driver` the same through the asynchronous driver. TreeQuest 0.3.3 runs its own
`StandardMCTS.step` in place, with its default of two samples an action, in the same process; ours
is `MCTS` with as many children a visit. The ratio is of the best of three runs of theirs (of two
at 5,000 nodes, which take seconds) to the best of ours, thirty a turn: together still less time
than one run of theirs, over which a disturbance of milliseconds evens out as it does not over one
of ours. All of these are CPU time, so that other work counts little. Name the folder that holds
`treequest` in `TFGRPO_TREEQUEST` where it is not importable.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import math
import os
import random
import sys
import time
from typing import Any

from tfgrpo.rollout import Task
from tfgrpo.search import (
    MCTS,
    BestFirst,
    FunctionExpander,
    FunctionScorer,
    Node,
    NodeScore,
    Proposal,
    SearchContext,
    SearchSettings,
    SearchState,
    TextEnvironment,
    UnitScorer,
    search_tree,
)
from tfgrpo.search.algorithms.protocol import Algorithm
from tfgrpo.search.state import VisitResult
from tfgrpo.store.budget import Budget

NAMES = [f"a{i}" for i in range(8)]


def core_us_per_node(algorithm: Algorithm, nodes: int) -> float:
    """Grow a tree to `nodes` nodes, four a visit, and return microseconds a node."""
    fold, rng = SearchState(algorithm), random.Random(0)
    proposals = [Proposal(name) for name in NAMES[:4]]
    start = time.process_time()
    while len(fold.tree) < nodes:
        work = fold.select()
        assert work is not None
        scores = [NodeScore(rng.random(), 1.0, rng.random()) for _ in proposals]
        fold.commit(work, VisitResult(proposals=proposals, scores=scores))
    return (time.process_time() - start) / len(fold.tree) * 1e6


def core_figures() -> dict[str, Any]:
    """Cost a node at three sizes; the best of some runs each, as other work disturbs a run."""
    figures: dict[str, Any] = {}
    for name, make in (("astar", BestFirst.astar), ("mcts", MCTS)):
        figures[name] = {
            str(size): round(min(core_us_per_node(make(), size) for _ in range(runs)), 2)
            for size, runs in ((1_000, 30), (10_000, 10), (100_000, 5))
        }
    return {
        "us_per_node_100k": figures["astar"]["100000"],
        "us_per_node": figures,
        "us_per_node_slope": round(figures["astar"]["100000"] / figures["astar"]["1000"], 2),
    }


async def _driver_us(nodes: int, width: int = 4) -> tuple[float, float]:
    names = NAMES[:width]

    async def propose(ctx: SearchContext, node: Node, k: int) -> list[Proposal]:
        return [Proposal(name) for name in names]

    start = time.process_time()
    result = await search_tree(
        Task("speed", "speed"),
        FunctionExpander(propose),
        TextEnvironment(),
        algorithm=BestFirst.uniform_cost(),
        scorer=UnitScorer(),
        settings=SearchSettings(samples=width),
        budget=Budget(nodes=nodes),
    )
    spent = time.process_time() - start
    return spent / len(result.fold.tree) * 1e6, spent / result.counters["visits"] * 1e6


def driver_figures(nodes: int = 10_000) -> dict[str, Any]:
    """Cost a node of the driver, log off, best of three; one visit makes four nodes."""
    runs = [asyncio.run(_driver_us(nodes)) for _ in range(3)]
    return {
        "us_per_node_driver": round(min(r[0] for r in runs), 1),
        "us_per_visit_driver": round(min(r[1] for r in runs), 1),
    }


# --- beside TreeQuest ---------------------------------------------------------------------------


def treequest_us_per_node(nodes: int) -> float:
    """Run TreeQuest's StandardMCTS in place and return microseconds a node."""
    treequest = importlib.import_module("treequest")
    algorithm, rng = treequest.StandardMCTS(samples_per_action=2), random.Random(0)
    state = algorithm.init_tree()
    answer = {"a": lambda parent: ("x", rng.random())}
    start = time.process_time()
    for _ in range(nodes):
        state = algorithm.step(state, answer, inplace=True)
    return (time.process_time() - start) / nodes * 1e6


def our_us_per_node(nodes: int) -> float:
    """Run our MCTS on the same task: one random value a node, two nodes a visit."""
    fold, rng = SearchState(MCTS()), random.Random(0)
    proposals = [Proposal(name) for name in NAMES[:2]]
    start = time.process_time()
    while len(fold.tree) < nodes:
        work = fold.select()
        assert work is not None
        scores = [NodeScore(0.0, 0.0, rng.random()) for _ in proposals]
        fold.commit(work, VisitResult(proposals=proposals, scores=scores))
    return (time.process_time() - start) / len(fold.tree) * 1e6


def treequest_figures() -> dict[str, Any]:
    """The ratio at 1,000 and 5,000 nodes, in one process and turn by turn."""
    folder = os.environ.get("TFGRPO_TREEQUEST", "")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    try:
        importlib.import_module("treequest")
    except ImportError as exc:
        return {"treequest_skipped": f"treequest is not importable ({exc}); see TFGRPO_TREEQUEST"}
    figures: dict[str, Any] = {}
    for size, turns in ((1_000, 3), (5_000, 2)):
        theirs = ours = math.inf
        for _ in range(turns):
            gc.collect()
            theirs = min(theirs, treequest_us_per_node(size))
            ours = min(ours, *(our_us_per_node(size) for _ in range(30)))
        figures[f"treequest_ratio_{size}"] = round(theirs / ours, 1)
        figures[f"treequest_us_{size}"] = {"treequest": round(theirs, 1), "ours": round(ours, 2)}
    return figures


# --- waiting ------------------------------------------------------------------------------------


async def _waiting_run(slots: int, latency_s: float) -> tuple[float, int]:
    """Search a uniform tree for one leaf with a stub model that takes `latency_s` a call."""
    goal = ("a3", "a1", "a2", "a0", "a3")

    async def propose(ctx: SearchContext, node: Node, k: int) -> list[str]:
        await asyncio.sleep(latency_s)
        return NAMES[:4]

    def cost(ctx: SearchContext, parent: Node, node: Node) -> NodeScore:
        depth, plan = node.depth, ctx.tree.plan(parent)
        plan.append(node.action)
        misses = sum(a != b for a, b in zip(plan, goal, strict=False))
        return NodeScore(1.0 + 0.35 * (node.action != goal[(depth - 1) % 5]), 0.1 * misses)

    def is_finish(action: Any) -> bool:
        return False

    start = time.perf_counter()
    result = await search_tree(
        Task("wait", "wait"),
        FunctionExpander(propose, calls=1),
        TextEnvironment(is_finish),
        algorithm=BestFirst.astar(),
        scorer=FunctionScorer(cost),
        settings=SearchSettings(samples=4, mode="fast", concurrency=slots),
        budget=Budget(expansions=200),
    )
    return time.perf_counter() - start, result.counters["expansions"]


async def _extra_run(slots: int) -> int:
    """Return the expansions to the first goal of a search with one leaf at depth 5."""
    goal = ("a3", "a1", "a2", "a0", "a3")

    async def propose(ctx: SearchContext, node: Node, k: int) -> list[str]:
        await asyncio.sleep(0.001)
        return NAMES[:4]

    def cost(ctx: SearchContext, parent: Node, node: Node) -> NodeScore:
        return NodeScore(1.0 + 0.2 * (node.action != goal[(node.depth - 1) % 5]), 0.0)

    from tfgrpo.search import ImmutableEnvironment

    environment = ImmutableEnvironment((), lambda s, a: (*s, a), goal=lambda s: s == goal)
    result = await search_tree(
        Task("extra", "extra"),
        FunctionExpander(propose, calls=1),
        environment,
        algorithm=BestFirst.astar(),
        scorer=FunctionScorer(cost),
        settings=SearchSettings(samples=4, mode="fast", concurrency=slots),
        budget=Budget(expansions=2_000, depth=5),
    )
    return result.counters["expansions"]


def waiting_figures(latency_s: float = 0.05) -> dict[str, Any]:
    """200 expansions one after another and on 8 slots, fast mode."""
    alone, expansions_1 = asyncio.run(_waiting_run(1, latency_s))
    together, expansions_8 = asyncio.run(_waiting_run(8, latency_s))
    first, parallel = asyncio.run(_extra_run(1)), asyncio.run(_extra_run(8))
    return {
        "speedup_8_slots": round(alone / together, 2),
        "speedup_runs": {
            "seconds_1": round(alone, 2),
            "seconds_8": round(together, 2),
            "expansions_1": expansions_1,
            "expansions_8": expansions_8,
        },
        "extra_expansions_8_slots": {"sequential": first, "parallel": parallel},
    }
