"""Optimality against networkx, and the recorded GPT-4 search under other orders."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from tests.benchmarks.environments import blocksworld, game24
from tfgrpo.search import (
    BestFirst,
    DepthFirst,
    Node,
    NodeScore,
    Proposal,
    SearchState,
    Tree,
    explore,
)
from tfgrpo.search.algorithms.protocol import Algorithm, VisitRequest
from tfgrpo.search.environments.protocol import StepResult
from tfgrpo.search.state import VisitResult


def blocksworld_figures() -> dict[str, Any]:
    """A* and uniform-cost search on 150 instances, each against the exact optimum."""
    optimal = 0
    expansions: dict[int, list[tuple[int, int]]] = {}
    for instance in blocksworld.read_instances():
        exact = blocksworld.exact_optimum(instance)
        runs = {}
        for name, algorithm in (("astar", BestFirst.astar()), ("plain", BestFirst.uniform_cost())):
            fold = explore(
                instance.start,
                blocksworld.moves,
                algorithm,
                is_goal=instance.is_goal,
                to_go=instance.to_go if name == "astar" else lambda s: 0.0,
                key=lambda s: s.key,
            )
            runs[name] = (fold.tree[algorithm.best(fold.tree)], fold.expansions)
        ok = all(node.is_goal and node.g == exact for node, _ in runs.values())
        optimal += ok and exact == instance.optimum
        pair = (runs["astar"][1], runs["plain"][1])
        expansions.setdefault(instance.optimum, []).append(pair)
    by_length = {
        str(length): {
            "astar": round(fmean(a for a, _ in pairs), 1),
            "uniform_cost": round(fmean(u for _, u in pairs), 1),
        }
        for length, pairs in sorted(expansions.items())
    }
    ratios = {
        n: round(r["uniform_cost"] / r["astar"], 2) for n, r in by_length.items() if int(n) >= 8
    }
    return {
        "blocksworld_optimal": optimal,
        "blocksworld_expansions": by_length,
        "blocksworld_fewer_expansions": ratios,
    }


def game24_figures(count: int = 200) -> dict[str, Any]:
    """A* on the first puzzles against the exact optimum."""
    optimal, expanded, plain = 0, [], []
    for start in game24.read_puzzles(count):
        exact = game24.exact_optimum(start)
        costs = []
        for algorithm, figures in (
            (BestFirst.astar(), expanded),
            (BestFirst.uniform_cost(), plain),
        ):
            fold = explore(
                start,
                game24.moves,
                algorithm,
                is_goal=game24.is_goal,
                to_go=game24.to_go,
                key=game24.key,
            )
            costs.append(fold.tree[algorithm.best(fold.tree)].g)
            figures.append(fold.expansions)
        optimal += costs == [exact, exact]
    return {
        "game24_optimal": optimal,
        "game24_expansions": {
            "astar": round(fmean(expanded), 1),
            "uniform_cost": round(fmean(plain), 1),
        },
    }


def replay(record: game24.Recorded, algorithm: Algorithm, style: str) -> tuple[bool, int, int]:
    """Search the recorded answers in another order; return solved, proposal calls, scored nodes.

    Only states that were expanded in the recording have children; asking elsewhere costs nothing
    and gives nothing. An answer is judged as soon as it is proposed.
    """
    fold = SearchState(algorithm, Tree(Node(0, -1, 0, state="", is_executed=True)))
    calls = scored = 0
    while (work := fold.select()) is not None:
        node = fold.tree[work.node]
        texts = record.children.get(node.state)
        if texts is None:
            fold.commit(work, VisitResult(error="not in the recording"))
            continue
        calls += 1
        texts = list(dict.fromkeys(texts))
        scored += len(texts)
        fold.commit(work, _recorded_visit(record, texts, node.depth + 1, style))
        if any(game24.is_right_answer(t, record.numbers) for t in texts):
            return True, calls, scored
    return False, calls, scored


def _recorded_visit(
    record: game24.Recorded, texts: list[str], depth: int, style: str
) -> VisitResult:
    scores = []
    for text in texts:
        value = record.values[text]
        if style == "astar":  # steps still to go, more of them the less it is valued
            to_go = (4 - depth) * (1 + (60 - min(60.0, value)) / 60)
            scores.append(NodeScore(1.0, to_go, None, {"value": value}))
        else:
            scores.append(NodeScore(1.0, 0.0, value, {"value": value}))
    return VisitResult(
        proposals=[Proposal(t) for t in texts],
        outcomes=[StepResult(state=t) for t in texts],
        scores=scores,
    )


def replay_figures() -> dict[str, Any]:
    """Several orders over the same recorded outputs."""
    records = game24.read_recorded()
    rows: dict[str, dict[str, float]] = {
        "tot_as_run": {
            "solved": sum(r.was_solved for r in records),
            "expansions": round(fmean(len(r.children) for r in records), 2),
            "scored": round(fmean(sum(map(len, r.children.values())) for r in records), 2),
        }
    }
    for name in ("greedy", "depth_first", "astar"):
        runs = []
        for record in records:
            algorithm: Algorithm = {
                "greedy": lambda: BestFirst.greedy(use_value=True),
                "depth_first": lambda: DepthFirst(width=1000),
                "astar": BestFirst.astar,
            }[name]()
            runs.append(replay(record, algorithm, name))
        rows[name] = {
            "solved": sum(r[0] for r in runs),
            "expansions": round(fmean(r[1] for r in runs), 2),
            "scored": round(fmean(r[2] for r in runs), 2),
        }
    ours = {n: r for n, r in rows.items() if n != "tot_as_run"}
    best = min(ours.values(), key=lambda r: (-r["solved"], r["expansions"]))
    return {
        "replay_success": best["solved"],
        "replay_expansions": best["expansions"],
        "replay_scored": best["scored"],
        "replay_orders": rows,
    }


__all__ = ["VisitRequest", "blocksworld_figures", "game24_figures", "replay_figures"]
