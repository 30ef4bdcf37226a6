"""Monte-Carlo tree search: UCT and PUCT over scored nodes.

One visit walks from the root to a leaf, makes its children, and backs up the children's values.
Visits in flight carry a virtual loss (a visit of value 0), and each node knows how many leaves
below it can still be worked on, so that any number of visits are distinct and subtrees that are
done are left alone. Terminal leaves back up their reward once more and close.

Does not know where values come from (a judge, a verifier, a rollout). Source: UCT (Kocsis and
Szepesvari 2006), PUCT (Rosin 2011; AlphaZero's form), virtual loss (Chaslot et al. 2008); values
of language-model nodes as in LATS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tfgrpo.search.algorithm import Work, best_goal, best_so_far
from tfgrpo.search.node import Node
from tfgrpo.search.tree import Tree

__all__ = ["MCTS"]


class MCTS:
    """UCT or PUCT.

    Args:
        exploration: weight of the exploration term.
        rule: `uct`, mean + c·sqrt(ln N / n); or `puct`, mean + c·prior·sqrt(N) / (1 + n).
        stop_at_goal: stop at the first goal; else spend the budget and return the best.
        unscored: value of a node that the scorer gave none: 1 − step cost where None.
    """

    merges_siblings = True
    lookahead = 1

    def __init__(
        self,
        *,
        exploration: float = math.sqrt(2),
        rule: Literal["uct", "puct"] = "uct",
        stop_at_goal: bool = True,
        unscored: float | None = None,
    ) -> None:
        self.exploration, self.rule = exploration, rule
        self.stop_at_goal, self.unscored = stop_at_goal, unscored
        self._free: list[int] = [1]
        self._has_goal = False

    def select(self, tree: Tree, room: int) -> list[Work]:
        """Walk down `room` times; each walk ends at another leaf."""
        found: list[Work] = []
        while len(found) < room and self._free[0] > 0:
            found.append(Work(self._walk(tree)))
        return found

    def _walk(self, tree: Tree) -> int:
        """Go down to a leaf by the rule; each node on the way gets a visit of value 0."""
        nodes, free, sqrt = tree.nodes, self._free, math.sqrt
        explore, is_puct = self.exploration, self.rule == "puct"
        node = nodes[0]
        while True:
            visits = node.visits
            node.visits = visits + 1
            free[node.id] -= 1
            if node.status != "expanded":
                return node.id
            if is_puct:
                wide = explore * sqrt(visits)
            else:
                wide = explore * sqrt(math.log(visits)) if visits > 1 else 0.0
            best = -math.inf
            for child_id in node.children:
                if not free[child_id]:
                    continue
                child = nodes[child_id]
                n = child.visits
                if is_puct:
                    mean = child.value_sum / n if n else 0.0
                    bound = mean + child.prior * wide / (1 + n)
                else:
                    bound = child.value_sum / n + wide / sqrt(n) if n else math.inf
                if bound > best:
                    best, node = bound, child

    def _add_up(self, tree: Tree, node_id: int, leaves: int, value: float) -> None:
        """Back up what a visit found: leaves that are free, the visits to them, and their values.

        The visit itself was counted on the way down as one of value 0; it becomes the first.
        """
        nodes, free = tree.nodes, self._free
        more = leaves - 1 if leaves else 0
        while node_id >= 0:
            node = nodes[node_id]
            free[node_id] += leaves
            node.visits += more
            node.value_sum += value
            node_id = node.parent

    def _worth(self, node: Node) -> float:
        if node.value is not None:
            return node.value
        return 1.0 - node.step_cost if self.unscored is None else self.unscored

    def on_children(self, tree: Tree, node: Node, children: Sequence[Node]) -> None:
        """Back up the children's values in one walk."""
        free = self._free
        if len(free) < len(tree.nodes):
            free.extend([0] * (len(tree.nodes) - len(free)))
        total = 0.0
        for child in children:
            free[child.id] = 1
            worth = self._worth(child)
            child.visits, child.value_sum = 1, worth
            total += worth
        self._add_up(tree, node.id, len(children), total)

    def on_leaf(self, tree: Tree, node: Node) -> None:
        """Back up the reward of a finished path; the leaf is closed already."""
        self._has_goal = self._has_goal or node.is_goal
        reward = node.reward if node.reward is not None else (1.0 if node.is_goal else 0.0)
        self._add_up(tree, node.id, 0, reward)

    def on_fail(self, tree: Tree, node: Node) -> None:
        """Leave the visit of value 0 where it is: the failure counts against the path."""

    def on_moved(self, tree: Tree, node: Node) -> None:
        """Not supported: visits belong to paths. Merge states with best-first search only."""

    def finished(self, tree: Tree) -> str:
        """Return `goal` at the first goal, where asked."""
        return "goal" if self._has_goal and self.stop_at_goal else ""

    def best(self, tree: Tree) -> int:
        """Return the best goal, else the best finished path, else the most visited leaf."""
        goal = best_goal(tree)
        if goal is not None:
            return goal.id
        if tree.with_status("terminal"):
            return best_so_far(tree)
        node = tree.root
        while True:
            alive = [tree[i] for i in node.children if tree[i].status not in ("dead", "pruned")]
            if not alive:
                return node.id
            node = max(alive, key=lambda n: (n.visits, n.mean_value, -n.id))

    def dump(self) -> dict[str, Any]:
        """Return what is free and the statistics that stand on the nodes."""
        return {"free": self._free, "has_goal": self._has_goal}

    def load(self, tree: Tree, state: Mapping[str, Any]) -> None:
        """Restore the state; visits and values are on the tree's nodes."""
        self._free, self._has_goal = list(state["free"]), state["has_goal"]
