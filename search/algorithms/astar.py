"""Best-first search with f = a·g + w·h: A*, weighted and anytime A*, uniform cost, greedy.

The open list is a heap of (f, −g, id) with lazy deletion. A node being worked on is out of the
heap but still counts when optimality is asked: the search ends only when no open or running node
could lead to a cheaper goal, so the answer is as good at any concurrency. With an admissible h
and weight 1 the goal found is optimal; with weight w it costs at most w times the optimum.

Does not know where g and h come from. Source: Hart, Nilsson, Raphael 1968; weighted and anytime
forms: Hansen and Zhou 2007. Memory bound: own.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.search.algorithms.protocol import VisitRequest, best_goal, best_so_far
from tfgrpo.search.node import Node, NodeScore
from tfgrpo.search.tree import Children, Row, Tree

__all__ = ["BestFirst"]

_EPS = 1e-12


_Entry = tuple[float, float, int] | Row
"""(f, −g, id), and what else may follow: ids differ, so nothing behind them is compared."""


def _is_current(tree: Tree, entry: _Entry) -> bool:
    """Return False for an entry whose node has closed or has got a cheaper path since."""
    node = tree.peek(entry[2])
    return node is None or (node.status == "open" and node.g == -entry[1])


class BestFirst:
    """One class for the family; the class methods name its members.

    Args:
        path_weight: weight a of the path cost g; 0 is greedy.
        weight: weight w of the estimate h.
        anytime: after a goal go on with a smaller w and prune what cannot be cheaper.
        use_value: order by minus the scorer's value instead of h (greedy on a judge's score).
        max_open: memory cap of the open list; the worst are pruned and counted.
    """

    merges_siblings = True
    lookahead = 1

    def __init__(
        self,
        *,
        path_weight: float = 1.0,
        weight: float = 1.0,
        anytime: bool = False,
        use_value: bool = False,
        max_open: int | None = None,
    ) -> None:
        self.path_weight, self.weight = path_weight, weight
        self.anytime, self.use_value, self.max_open = anytime, use_value, max_open
        self.pruned_open = 0
        self._heap: list[_Entry] = [(0.0, 0.0, 0)]
        self._flying: set[int] = set()
        self._goal_g: float | None = None
        self._schedule = weight

    @classmethod
    def astar(cls, weight: float = 1.0, **options: Any) -> BestFirst:
        """f = g + w·h."""
        return cls(weight=weight, **options)

    @classmethod
    def uniform_cost(cls, **options: Any) -> BestFirst:
        """f = g."""
        return cls(weight=0.0, **options)

    @classmethod
    def greedy(cls, **options: Any) -> BestFirst:
        """f = h, whatever the path cost so far."""
        return cls(path_weight=0.0, **options)

    def _f(self, g: float, h: float, value: float | None) -> float:
        if self.use_value and value is not None:
            return self.path_weight * g - value
        return self.path_weight * g + self._schedule * h

    def rows(self, above: float, first: int, scores: Sequence[NodeScore]) -> list[Row]:
        """Return what the children of a node of path cost `above` are entered as."""
        path_weight, weight, by_value = self.path_weight, self._schedule, self.use_value
        found: list[Row] = []
        node_id = first
        for cost, h, value, _, _ in scores:
            g = above + cost
            rest = -value if by_value and value is not None else weight * h  # as in `_f`
            found.append((path_weight * g + rest, -g, node_id, h, value, cost))
            node_id += 1
        return found

    def select(self, tree: Tree, room: int) -> list[VisitRequest]:
        """Pop the nodes of least f; entries of nodes that moved or closed are skipped."""
        found: list[VisitRequest] = []
        while self._heap and len(found) < room:
            entry = heapq.heappop(self._heap)
            node_id = entry[2]
            if node_id in self._flying or not _is_current(tree, entry):
                continue
            if self.anytime and self._is_hopeless(tree[node_id]):
                tree[node_id].status = "pruned"
                continue
            self._flying.add(node_id)
            found.append(VisitRequest(node_id))
        return found

    def _is_hopeless(self, node: Node) -> bool:
        """In anytime search: nothing below can be cheaper than the goal that we have."""
        return self._goal_g is not None and node.g + node.h >= self._goal_g - _EPS

    def on_children(self, tree: Tree, node: Node, children: Sequence[Node]) -> None:
        """Put the children into the open list."""
        self._flying.discard(node.id)
        heap, push = self._heap, heapq.heappush
        if isinstance(children, Children):
            for row in children.brood.rows:
                push(heap, row)
        else:
            for child in children:
                push(heap, (self._f(child.g, child.h, child.value), -child.g, child.id))
        if self.max_open is not None and len(heap) > self.max_open + self.max_open // 4:
            self._shrink(tree, self.max_open)

    def _shrink(self, tree: Tree, keep: int) -> None:
        alive = [e for e in self._heap if _is_current(tree, e)]
        alive.sort()
        for entry in alive[keep:]:
            tree[entry[2]].status = "pruned"
            self.pruned_open += 1
        self._heap = alive[:keep]

    def on_leaf(self, tree: Tree, node: Node) -> None:
        """Keep the cheapest goal; in anytime search lower the weight and sort again."""
        self._flying.discard(node.id)
        if not node.is_goal:
            return
        if self._goal_g is None or node.g < self._goal_g:
            self._goal_g = node.g
        if self.anytime and self._schedule > 1.0:
            self._schedule = max(1.0, 1.0 + (self._schedule - 1.0) / 2)
            self._rebuild(tree)

    def on_fail(self, tree: Tree, node: Node) -> None:
        """Forget a node that led nowhere."""
        self._flying.discard(node.id)

    def on_moved(self, tree: Tree, node: Node) -> None:
        """Enter the moved node and what is open below it under their new costs."""
        for found in (node, *tree.descendants(node)):
            if found.status == "open":
                f = self._f(found.g, found.h, found.value)
                heapq.heappush(self._heap, (f, -found.g, found.id))

    def finished(self, tree: Tree) -> str:
        """Return `goal` once no open or running node could lead to a better one."""
        if self._goal_g is None:
            return ""
        if self.path_weight == 0.0:
            return "goal"
        if self.anytime:
            return "" if self._flying or self._heap else "goal"
        bound = self.path_weight * self._goal_g
        flying = (tree[i] for i in self._flying)
        if any(self._f(n.g, n.h, n.value) < bound - _EPS for n in flying):
            return ""
        while self._heap and not _is_current(tree, self._heap[0]):
            heapq.heappop(self._heap)
        return "" if self._heap and self._heap[0][0] < bound - _EPS else "goal"

    def best(self, tree: Tree) -> int:
        """Return the cheapest goal, else the best so far."""
        goals = [n for n in tree.touched() if n.is_goal and n.status == "terminal"]
        if goals and self.path_weight > 0:
            return min(goals, key=lambda n: (n.g, -(n.reward or 0.0), n.id)).id
        goal = best_goal(tree)
        return best_so_far(tree) if goal is None else goal.id

    def _rebuild(self, tree: Tree) -> None:
        self._heap = [
            (self._f(g, h, value), -g, node_id)
            for node_id, g, h, value in tree.open_numbers()
            if node_id not in self._flying
        ]
        heapq.heapify(self._heap)

    def dump(self) -> dict[str, Any]:
        """Return the goal's cost and the current weight; the open list is in the tree."""
        return {
            "goal_g": self._goal_g,
            "weight": self._schedule,
            "flying": sorted(self._flying),
            "pruned_open": self.pruned_open,
        }

    def load(self, tree: Tree, state: Mapping[str, Any]) -> None:
        """Restore the state and make the open list from the tree."""
        self._goal_g, self._schedule = state["goal_g"], state["weight"]
        self._flying = set(state["flying"])
        self.pruned_open = state["pruned_open"]
        self._rebuild(tree)
