"""Game of 24: exact states and moves, and one recorded GPT-4 search that can be replayed.

A state is a sorted tuple of exact fractions. Costs of the operations differ (plus and minus 1,
times 2, divided 3), so that the cheapest solution is a real question: with equal costs every
solution costs three.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from tests.benchmarks.environments import shared

State = tuple[Fraction, ...]
COSTS = {"+": 1.0, "-": 1.0, "*": 2.0, "/": 3.0}
TARGET = Fraction(24)


def moves(state: State) -> Iterator[tuple[str, State, float]]:
    """Yield (text, next state, cost) for each pair of numbers and operation."""
    for i, j in itertools.combinations(range(len(state)), 2):
        a, b = state[i], state[j]
        rest = [state[k] for k in range(len(state)) if k not in (i, j)]
        results = [("+", a, b, a + b), ("*", a, b, a * b), ("-", a, b, a - b), ("-", b, a, b - a)]
        if b:
            results.append(("/", a, b, a / b))
        if a:
            results.append(("/", b, a, b / a))
        for sign, x, y, value in results:
            yield f"{x}{sign}{y}", tuple(sorted([*rest, value])), COSTS[sign]


def is_goal(state: State) -> bool:
    return state == (TARGET,)


def to_go(state: State) -> float:
    """One operation of the cheapest kind for each number too many: admissible and consistent."""
    return float(len(state) - 1)


def key(state: State) -> str:
    return ",".join(map(str, state))


def read_puzzles(count: int) -> list[State]:
    """Return the first puzzles of the list as start states."""
    lines = shared("data", "search", "game24", "24.csv").read_text().splitlines()[1 : count + 1]
    return [tuple(sorted(Fraction(n) for n in line.split(",")[1].split())) for line in lines]


def exact_optimum(start: State) -> float:
    """Return the least cost of a solution by networkx over every reachable state."""
    import networkx

    graph = networkx.DiGraph()
    queue, seen = [start], {start}
    while queue:
        state = queue.pop()
        for _, other, cost in moves(state):
            known = graph.get_edge_data(state, other)
            if known is None or known["weight"] > cost:
                graph.add_edge(state, other, weight=cost)
            if other not in seen:
                seen.add(other)
                queue.append(other)
    lengths = networkx.single_source_dijkstra_path_length(graph, start)
    return float(lengths[(TARGET,)])


# --- the recorded search ------------------------------------------------------------------------


@dataclass(slots=True)
class Recorded:
    """One recorded search: what was proposed at each state and how each proposal was valued."""

    numbers: tuple[int, ...]
    children: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    was_solved: bool = False


def read_recorded(path: Path | None = None) -> list[Recorded]:
    """Return the 100 recorded searches."""
    path = path or shared("data", "search", "game24", "tot_gpt4_900_999.jsonl.gz")
    found = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            found.append(_recorded(row))
    return found


def _recorded(row: dict[str, Any]) -> Recorded:
    numbers = tuple(int(n) for n in row["steps"][0]["x"].split())
    record = Recorded(numbers, was_solved=any(i["r"] == 1 for i in row["infos"]))
    for level in row["steps"]:
        parents = set(level["ys"])
        for text, value in zip(level["new_ys"], level["values"], strict=True):
            parent = next(y for y in parents if text.startswith(y))
            record.children.setdefault(parent, []).append(text)
            record.values.setdefault(text, value)
    return record


_TOKEN = re.compile(r"\s*(\d+|[()+\-*/])")


def is_right_answer(text: str, numbers: tuple[int, ...]) -> bool:
    """Return whether the last line is an expression over exactly these numbers that makes 24."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    if "answer" not in last.lower():
        return False
    expression = last.lower().replace("answer:", "").split("=")[0].strip()
    tokens = [m[1] for m in _TOKEN.finditer(expression)]
    if "".join(tokens) != re.sub(r"\s+", "", expression):
        return False
    if sorted(int(t) for t in tokens if t.isdigit()) != sorted(numbers):
        return False
    try:
        value, rest = _sum(tokens)
    except (ZeroDivisionError, IndexError, ValueError):
        return False
    return not rest and value == TARGET


def _sum(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, rest = _product(tokens)
    while rest and rest[0] in "+-":
        sign, (other, rest) = rest[0], _product(rest[1:])
        value = value + other if sign == "+" else value - other
    return value, rest


def _product(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, rest = _atom(tokens)
    while rest and rest[0] in "*/":
        sign, (other, rest) = rest[0], _atom(rest[1:])
        value = value * other if sign == "*" else value / other
    return value, rest


def _atom(tokens: list[str]) -> tuple[Fraction, list[str]]:
    if tokens[0] == "(":
        value, rest = _sum(tokens[1:])
        if rest[0] != ")":
            raise ValueError("unbalanced")
        return value, rest[1:]
    return Fraction(int(tokens[0])), tokens[1:]
