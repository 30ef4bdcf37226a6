"""What a search algorithm is: a pure, synchronous choice of what to work on next.

An algorithm sees the tree, says which nodes to visit, and is told what came of it. It never calls
a model or a tool, knows no clock and draws no random number but from the counter it is given, so
the same answers always make the same tree.

A visit is one unit of paid work on one node: run its action if that has not happened yet, and,
unless the path is finished, ask for next actions and score them. The contract:

1. `select` returns at most `room` visits of distinct nodes (an algorithm may ask one node twice
   where it draws samples); an empty list means "none now". A node that it returned is in flight
   until one of the `on_*` methods is called for it; it is not returned again before that. "None
   now" leaves no trace: how often it is asked in vain depends on the machine.
2. For each visit exactly one of `on_children`, `on_leaf`, `on_fail` is called, in commit order.
3. `on_children` may come with no child at all; the algorithm then treats the node as a dead end.
4. `finished` returns why the search may stop, or "". Visits in flight are committed all the same.
5. An algorithm may have a method `rows(path_cost, first_id, scores)` that says how children are
   entered into its open list (`Row`). It is then given `Children`, which become nodes only where
   it looks at them; all others get nodes.
6. `dump` is JSON; `load` on the same tree continues as if nothing had happened.

Does not know models, tools, budgets, asyncio. Idea: ask and tell, as in TreeQuest's stateless
algorithms, but without a copy of the tree and with visits in flight accounted for (own).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tfgrpo.search.node import Node
from tfgrpo.search.tree import Tree

__all__ = ["Algorithm", "GoalSearch", "VisitRequest", "best_goal", "best_so_far"]


class VisitRequest(NamedTuple):
    """One visit: which node, how many samples, from which proposer."""

    node: int
    k: int = 0
    """Samples to draw; 0 leaves it to the settings."""
    arm: int = 0
    """Which proposer, where there are several."""
    prefix: str = ""
    """Text that every sampled action starts with, for engines that can continue a text."""


class Algorithm(Protocol):
    """A way to grow a tree; see the module for the contract."""

    merges_siblings: bool
    """True when equal actions of one parent become one node with a count."""
    lookahead: int
    """Visits that may be open at once in deterministic mode without asking the user."""

    def select(self, tree: Tree, room: int) -> list[VisitRequest]:
        """Return at most `room` visits to make next."""
        ...

    def on_children(self, tree: Tree, node: Node, children: Sequence[Node]) -> None:
        """Take the scored children that a visit made."""
        ...

    def on_leaf(self, tree: Tree, node: Node) -> None:
        """Take a finished path; `node.is_goal` and `node.reward` say how good."""
        ...

    def on_fail(self, tree: Tree, node: Node) -> None:
        """Take a visit that led nowhere; `node.error` says why."""
        ...

    def on_moved(self, tree: Tree, node: Node) -> None:
        """Take a node that hangs under a cheaper parent now, with all below it."""
        ...

    def finished(self, tree: Tree) -> str:
        """Return a stop reason, or "" to go on."""
        ...

    def best(self, tree: Tree) -> int:
        """Return the id of the best node so far, finished or not."""
        ...

    def dump(self) -> dict[str, Any]:
        """Return the algorithm's own state as JSON."""
        ...

    def load(self, tree: Tree, state: Mapping[str, Any]) -> None:
        """Restore the state that `dump` gave, on the tree it belonged to."""
        ...


class GoalSearch:
    """Base of an algorithm that keeps its nodes where they are and stops at a goal, if at all."""

    stop_at_goal = True
    _has_goal = False

    def on_moved(self, tree: Tree, node: Node) -> None:
        """Nothing: the order is by what paths were when their nodes were made."""

    def finished(self, tree: Tree) -> str:
        """Return `goal` at the first goal, where that is enough."""
        return "goal" if self._has_goal and self.stop_at_goal else ""

    def best(self, tree: Tree) -> int:
        """Return the best goal, else the best so far."""
        return best_so_far(tree)


def best_goal(tree: Tree) -> Node | None:
    """Return the goal of highest reward, then lowest cost, then first found; None without one."""
    goals = [n for n in tree.touched() if n.is_goal and n.status == "terminal"]
    return min(goals, key=_goodness) if goals else None


def _goodness(node: Node) -> tuple[float, float, float, int]:
    return (-(node.reward or 0.0), node.g, -_value(node), node.id)


def _value(node: Node) -> float:
    return node.value if node.value is not None else node.mean_value


def best_so_far(tree: Tree) -> int:
    """Return the id of the best node: a goal, else a finished path, else the most promising one."""
    goal = best_goal(tree)
    if goal is not None:
        return goal.id
    finished = tree.with_status("terminal")
    if finished:
        return min(finished, key=_goodness).id
    alive = [n for n in tree if n.status not in ("dead", "pruned") and n.id > 0]
    if not alive:
        return 0
    if any(n.value is not None for n in alive):
        return min(alive, key=lambda n: (-_value(n), n.g + n.h, n.id)).id
    return min(alive, key=lambda n: (n.g + n.h, -n.depth, n.id)).id
