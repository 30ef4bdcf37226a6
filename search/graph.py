"""The tree as a networkx graph, and a check of heuristics against exact costs.

`check_heuristic` walks a small state graph exhaustively, computes the exact cost to a goal from
every state with Dijkstra, and lists where the estimate is too high (not admissible) or drops by
more than a step costs (not consistent).

Needs `networkx` (extra `graph`). Source: definitions of Hart, Nilsson, Raphael 1968.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from tfgrpo.errors import ConfigError, MissingExtraError
from tfgrpo.search.node import show_action
from tfgrpo.search.state import Successors
from tfgrpo.search.tree import Tree

__all__ = ["HeuristicReport", "check_heuristic", "to_networkx"]

_EPS = 1e-9


def _networkx() -> Any:
    try:
        import networkx
    except ImportError as exc:
        raise MissingExtraError.of("graph", "graph export", "networkx") from exc
    return networkx


def to_networkx(tree: Tree) -> Any:
    """Return a `networkx.DiGraph` with the nodes' numbers and the step costs on the edges."""
    graph = _networkx().DiGraph()
    for node in tree:
        graph.add_node(
            node.id,
            label=show_action(node.action) if node.parent >= 0 else "start",
            status=node.status,
            depth=node.depth,
            g=node.g,
            h=node.h,
            is_goal=node.is_goal,
        )
        if node.parent >= 0:
            graph.add_edge(node.parent, node.id, weight=node.step_cost)
    return graph


@dataclass(slots=True)
class HeuristicReport:
    """What the check found."""

    states: int
    optimum: float
    """Exact least cost from the start to a goal; infinity where there is none."""
    not_admissible: list[tuple[Hashable, float, float]] = field(default_factory=list)
    """(state, estimate, exact cost) where the estimate is higher."""
    not_consistent: list[tuple[Hashable, Hashable, float, float]] = field(default_factory=list)
    """(state, next state, drop of the estimate, step cost) where the drop is larger."""

    @property
    def is_admissible(self) -> bool:
        """True when no estimate exceeds the exact cost."""
        return not self.not_admissible

    @property
    def is_consistent(self) -> bool:
        """True when no estimate drops by more than the step's cost (and goals are at 0)."""
        return not self.not_consistent and self.is_admissible


def check_heuristic(
    start: Any,
    successors: Successors,
    to_go: Callable[[Any], float],
    *,
    is_goal: Callable[[Any], bool],
    key: Callable[[Any], Hashable] = str,
    max_states: int = 100_000,
) -> HeuristicReport:
    """Compare an estimate with the exact costs of every reachable state.

    Raises:
        ConfigError: there are more states than `max_states`, or a negative cost.
    """
    networkx = _networkx()
    graph, states, queue = networkx.DiGraph(), {key(start): start}, [start]
    graph.add_node(key(start))
    while queue:
        state = queue.pop()
        for action, other, cost in successors(state):
            if cost < 0:
                raise ConfigError(f"step {action!r:.80} costs {cost!r}: give costs of at least 0")
            here, there = key(state), key(other)
            known = graph.get_edge_data(here, there)
            if known is None or cost < known["weight"]:
                graph.add_edge(here, there, weight=cost)
            if there not in states:
                states[there] = other
                queue.append(other)
        if len(states) > max_states:
            raise ConfigError(
                f"more than {max_states} states: check a smaller instance, or raise max_states"
            )
    goals = [k for k, state in states.items() if is_goal(state)]
    exact: dict[Hashable, float] = {}
    if goals:
        exact = networkx.multi_source_dijkstra_path_length(graph.reverse(copy=False), set(goals))
    estimates = {k: to_go(state) for k, state in states.items()}
    report = HeuristicReport(len(states), exact.get(key(start), math.inf))
    for name, estimate in estimates.items():
        true = exact.get(name, math.inf)
        if estimate > true + _EPS:
            report.not_admissible.append((name, estimate, true))
    for here, there, row in graph.edges(data=True):
        drop = estimates[here] - estimates[there]
        if drop > row["weight"] + _EPS:
            report.not_consistent.append((here, there, drop, row["weight"]))
    return report
