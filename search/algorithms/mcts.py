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

from tfgrpo.search.algorithms.protocol import GoalSearch, VisitRequest, best_goal, best_so_far
from tfgrpo.search.node import Node
from tfgrpo.search.tree import Tree

__all__ = ["MCTS"]


_KNOWN = 1 << 12
_INVERSES = [1.0, *(1 / n for n in range(1, _KNOWN))]
_ROOTS = [1.0, *(n**-0.5 for n in range(1, _KNOWN))]
_SPREAD = [0.0, *(math.sqrt(math.log(n)) for n in range(1, _KNOWN))]
"""1/n, 1/sqrt(n) and sqrt(ln n) of the counts that most nodes have; a walk needs five a level."""


def _by_uct(family: Sequence[Node], wide: float) -> Node:
    """Return the child of largest mean + c·sqrt(ln N) / sqrt(n) that has leaves to visit."""
    best, found = -math.inf, family[0]
    for child in family:
        if child.leaves:
            n = child.visits  # at least 1: its own score
            bound = child.value_sum / n + wide * n**-0.5
            if bound > best:
                best, found = bound, child
    return found


def _by_puct(family: Sequence[Node], wide: float) -> Node:
    """Return the child of largest mean + c·prior·sqrt(N) / (1 + n) that has leaves to visit."""
    best, found = -math.inf, family[0]
    for child in family:
        if child.leaves:
            n = child.visits
            bound = child.value_sum / n + child.prior * wide / (1 + n)
            if bound > best:
                best, found = bound, child
    return found


class MCTS(GoalSearch):
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

    def select(self, tree: Tree, room: int) -> list[VisitRequest]:
        """Walk down `room` times; each walk ends at another leaf."""
        walk = self._walk if self.rule == "uct" else self._walk_by_prior
        found: list[VisitRequest] = []
        while len(found) < room and tree.root.leaves > 0:
            found.append(VisitRequest(walk(tree)))
        return found

    def _walk(self, tree: Tree) -> int:
        """Go down to a leaf by UCT; each node on the way gets a visit of value 0."""
        explore, known = self.exploration, _KNOWN
        inverses, roots, spread = _INVERSES, _ROOTS, _SPREAD
        node = tree.root
        while True:
            n = node.visits
            node.visits = n + 1
            node.leaves -= 1
            family = node.open_children
            if family is None:
                return node.id
            if n >= known:
                node = _by_uct(family, explore * math.sqrt(math.log(n)))
                continue
            wide, best = explore * spread[n], -math.inf  # as `_by_uct`, by table
            for child in family:  # none of them has more visits than its parent
                if child.leaves:
                    n = child.visits
                    bound = child.value_sum * inverses[n] + wide * roots[n]
                    if bound > best:
                        best, node = bound, child

    def _walk_by_prior(self, tree: Tree) -> int:
        """Go down to a leaf by PUCT; each node on the way gets a visit of value 0."""
        node = tree.root
        while True:
            node.visits += 1
            node.leaves -= 1
            if node.open_children is None:
                return node.id
            node = _by_puct(node.open_children, self.exploration * math.sqrt(node.visits - 1))

    def _add_up(self, tree: Tree, node: Node, leaves: int, value: float) -> None:
        """Back up what a visit found: leaves that are free, the visits to them, and their values.

        The visit itself was counted on the way down as one of value 0; it becomes the first.
        """
        places: list[Any] = tree.places  # above a node there are only nodes
        more = leaves - 1 if leaves else 0
        while True:
            node.leaves += leaves
            node.visits += more
            node.value_sum += value
            if node.parent < 0:
                return
            node = places[node.parent]

    def _unscored(self, node: Node) -> float:
        return 1.0 - node.step_cost if self.unscored is None else self.unscored

    def on_children(self, tree: Tree, node: Node, children: Sequence[Node]) -> None:
        """Back up the children's values in one walk."""
        family = node.open_children = children if isinstance(children, list) else list(children)
        total = 0.0
        for child in family:
            worth = child.value
            if worth is None:
                worth = self._unscored(child)
            child.visits, child.value_sum = 1, worth
            total += worth
        self._add_up(tree, node, len(family), total)

    def on_leaf(self, tree: Tree, node: Node) -> None:
        """Back up the reward of a finished path; the leaf is closed already."""
        self._has_goal = self._has_goal or node.is_goal
        reward = node.reward if node.reward is not None else (1.0 if node.is_goal else 0.0)
        self._add_up(tree, node, 0, reward)

    def on_fail(self, tree: Tree, node: Node) -> None:
        """Leave the visit of value 0 where it is: the failure counts against the path."""

    def on_moved(self, tree: Tree, node: Node) -> None:
        """Not supported: visits belong to paths. Merge states with best-first search only."""

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
        """Return whether a goal was found; the statistics stand on the nodes."""
        return {"has_goal": self._has_goal}

    def load(self, tree: Tree, state: Mapping[str, Any]) -> None:
        """Restore the state; all else is on the tree's nodes."""
        self._has_goal = state["has_goal"]
