"""Depth-first search, and DFSDT: one child at a time, and two levels back from every leaf.

Preorder: a node's next child is worked on before its siblings. `DepthFirst` draws all children of
a node at once and follows the best first. `DepthFirst.dfsdt` draws one child a visit, shows the
model what it said before (the expander's business), and after a leaf, finished or failed, goes
back `back` levels.

Does not know scores beyond their order. Source: DFSDT of ToolLLM (Qin et al. 2023), behaviour as
read in its code; ours needs no copy of the message list at each node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.search.algorithms.beam import rank_of
from tfgrpo.search.algorithms.protocol import GoalSearch, VisitRequest
from tfgrpo.search.node import Node
from tfgrpo.search.tree import Tree

__all__ = ["DepthFirst"]


class DepthFirst(GoalSearch):
    """A stack of nodes.

    Args:
        width: most children that are followed below one node.
        one_at_a_time: draw one child a visit, and the next one only on the way back.
        back: levels to go back after a leaf; 1 is the parent. With `one_at_a_time` only.
        threshold: children of a lower value are not followed.
    """

    lookahead = 1

    def __init__(
        self,
        width: int = 3,
        *,
        one_at_a_time: bool = False,
        back: int = 1,
        threshold: float | None = None,
    ) -> None:
        if width < 1 or back < 1:
            raise ConfigError(f"width={width!r}, back={back!r}: give at least 1")
        self.width, self.one_at_a_time = width, one_at_a_time
        self.back, self.threshold = back, threshold
        self.merges_siblings = True
        self._stack: list[int] = [0]
        self._draws: dict[int, int] = {}
        self._flying: int | None = None

    @classmethod
    def dfsdt(cls, width: int = 2, back: int = 2) -> DepthFirst:
        """One child at a time, two levels back from a leaf."""
        return cls(width, one_at_a_time=True, back=back)

    def select(self, tree: Tree, room: int) -> list[VisitRequest]:
        """Return the top of the stack; one visit at a time, as the order is the method."""
        if self._flying is not None or room < 1:
            return []
        while self._stack:
            node = tree[self._stack.pop()]
            if node.status in ("dead", "pruned", "terminal"):
                continue
            if self.one_at_a_time and self._draws.get(node.id, 0) >= self.width:
                continue
            self._flying = node.id
            return [VisitRequest(node.id, 1 if self.one_at_a_time else 0)]
        return []

    def on_children(self, tree: Tree, node: Node, children: Sequence[Node]) -> None:
        """Push the children, the best on top; in one-at-a-time mode under them the node itself."""
        self._flying = None
        if self.threshold is not None:
            floor = self.threshold
            for child in children:
                if child.value is not None and child.value < floor:
                    child.status = "pruned"
        kept = sorted((c for c in children if c.status == "open"), key=rank_of)
        if not self.one_at_a_time:
            for child in kept[self.width :]:
                child.status = "pruned"
            self._stack.extend(c.id for c in reversed(kept[: self.width]))
            return
        self._draws[node.id] = self._draws.get(node.id, 0) + 1
        self._stack.append(node.id)
        if kept:
            self._stack.append(kept[0].id)
        else:
            self._go_back(tree, node, 0)

    def on_leaf(self, tree: Tree, node: Node) -> None:
        """Stop at a goal, else go back."""
        self._flying = None
        self._has_goal = self._has_goal or node.is_goal
        self._go_back(tree, node, self.back)

    def on_fail(self, tree: Tree, node: Node) -> None:
        """Go back from a failed action."""
        self._flying = None
        if node.status == "dead":
            self._go_back(tree, node, self.back)
        else:
            self._draws[node.id] = self._draws.get(node.id, 0) + 1
            self._stack.append(node.id)

    def _go_back(self, tree: Tree, node: Node, levels: int) -> None:
        """Take the ancestors nearer than `levels` off the stack: they are not tried again."""
        if not self.one_at_a_time:
            return
        ancestors = tree.path(node)[1:-1][::-1][: max(0, levels - 1)]
        skipped = {n.id for n in ancestors}
        self._stack = [i for i in self._stack if i not in skipped]

    def dump(self) -> dict[str, Any]:
        """Return the stack and the draws."""
        return {
            "stack": self._stack,
            "draws": {str(k): v for k, v in self._draws.items()},
            "flying": self._flying,
            "has_goal": self._has_goal,
        }

    def load(self, tree: Tree, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._stack = list(state["stack"])
        self._draws = {int(k): v for k, v in state["draws"].items()}
        self._flying, self._has_goal = state["flying"], state["has_goal"]
