"""Blocksworld: the four actions, an admissible estimate, and the exact optimum by networkx.

A state is a text such as `a>b c>. h:d`: what each block stands on, and the block in the hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.environments import shared

TABLE = "."


@dataclass(frozen=True, slots=True)
class State:
    """What every block that is not in the hand stands on, sorted, and the block in the hand."""

    below: tuple[tuple[str, str], ...]
    hand: str = ""

    @property
    def key(self) -> str:
        return " ".join(f"{x}>{y}" for x, y in self.below) + f" h:{self.hand}"


@dataclass(frozen=True, slots=True)
class Instance:
    """One puzzle."""

    instance_id: str
    start: State
    goal: tuple[tuple[str, str], ...]
    optimum: int

    def is_goal(self, state: State) -> bool:
        return set(self.goal) <= set(state.below)

    def to_go(self, state: State) -> float:
        """Two actions for each unmet goal, one less where its block is in the hand: admissible."""
        met = set(state.below)
        return float(sum(2 - (state.hand == x) for x, y in self.goal if (x, y) not in met))


def moves(state: State) -> Iterator[tuple[Any, State, float]]:
    """Yield (action, next state, 1) for every action that is possible."""
    below = dict(state.below)
    covered = set(below.values())
    clear = [x for x in below if x not in covered]
    if state.hand:
        hand = state.hand
        yield ["put-down", hand], _made(below | {hand: TABLE}), 1.0
        for y in clear:
            yield ["stack", hand, y], _made(below | {hand: y}), 1.0
        return
    for x in clear:
        rest = {k: v for k, v in below.items() if k != x}
        if below[x] == TABLE:
            yield ["pick-up", x], _made(rest, x), 1.0
        else:
            yield ["unstack", x, below[x]], _made(rest, x), 1.0


def _made(below: dict[str, str], hand: str = "") -> State:
    return State(tuple(sorted(below.items())), hand)


def read_instances(path: Path | None = None) -> list[Instance]:
    """Return the 150 instances."""
    path = path or shared("data", "search", "blocksworld", "blocksworld_150.jsonl")
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        below = {f[1]: f[2] for f in row["init"] if f[0] == "on"}
        below |= {f[1]: TABLE for f in row["init"] if f[0] == "ontable"}
        hand = next((f[1] for f in row["init"] if f[0] == "holding"), "")
        goal = tuple((f[1], f[2]) for f in row["goal"])
        found.append(Instance(row["id"], _made(below, hand), goal, row["optimal_plan_length"]))
    return found


def exact_optimum(instance: Instance) -> float:
    """Return the least cost of a goal by networkx over every reachable state."""
    import networkx

    graph = networkx.DiGraph()
    queue, seen = [instance.start], {instance.start}
    while queue:
        state = queue.pop()
        graph.add_node(state)
        for _, other, cost in moves(state):
            graph.add_edge(state, other, weight=cost)
            if other not in seen:
                seen.add(other)
                queue.append(other)
    lengths = networkx.single_source_dijkstra_path_length(graph, instance.start)
    return float(min(lengths[s] for s in lengths if instance.is_goal(s)))
