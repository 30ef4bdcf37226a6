"""Level by level: breadth-first search, beam search over the whole level, and diverse beams.

Nothing of a level is dropped before all of it is scored, so the result does not depend on the
order in which visits end. Does not know where scores come from. Source: beam search (common);
diverse beams keep each first step's subtree apart, as diverse verifier tree search does
(HuggingFace search-and-learn); the tree-of-thoughts breadth-first search is a beam by value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfgrpo.errors import ConfigError
from tfgrpo.search.algorithms.protocol import GoalSearch, VisitRequest
from tfgrpo.search.node import Node
from tfgrpo.search.tree import Tree

__all__ = ["Beam"]


def rank_of(node: Node) -> tuple[float, int]:
    """Return a node's place in its level: higher value first, else lower g + h, then age."""
    worth = -node.value if node.value is not None else node.g + node.h
    return worth, node.id


class Beam(GoalSearch):
    """Keeps the best nodes of each level.

    Args:
        width: nodes kept a level; None keeps all of them (breadth-first search).
        subtrees: keep `width` split evenly over this many first steps, each with a beam of its
            own; 1 is one global beam.
        stop_at_goal: stop after the first level that holds a goal; else search on and return the
            best.
    """

    merges_siblings = True

    def __init__(
        self, width: int | None = 5, *, subtrees: int = 1, stop_at_goal: bool = True
    ) -> None:
        if width is not None and (width < 1 or subtrees < 1 or subtrees > width):
            raise ConfigError(
                f"width={width!r}, subtrees={subtrees!r}: give 1 <= subtrees <= width"
            )
        self.width, self.subtrees, self.stop_at_goal = width, subtrees, stop_at_goal
        self.lookahead = 64 if width is None else width
        self._queue: list[int] = [0]
        self._flying: set[int] = set()
        self._next: list[int] = []

    @classmethod
    def breadth_first(cls, **options: Any) -> Beam:
        """Every node of every level."""
        return cls(None, **options)

    @classmethod
    def diverse(cls, width: int = 8, subtrees: int = 4, **options: Any) -> Beam:
        """Independent beams below the best first steps."""
        return cls(width, subtrees=subtrees, **options)

    def select(self, tree: Tree, room: int) -> list[VisitRequest]:
        """Return what is left of this level; the next level starts when all of it is done."""
        if not self._queue and not self._flying:
            self._queue = self._keep(tree)
            self._next = []
        taken, self._queue = self._queue[:room], self._queue[room:]
        self._flying.update(taken)
        return [VisitRequest(i) for i in taken]

    def _keep(self, tree: Tree) -> list[int]:
        level = sorted((tree[i] for i in self._next), key=rank_of)
        if self.width is None:
            kept = [n.id for n in level]
        elif self.subtrees == 1:
            kept = [n.id for n in level[: self.width]]
        else:
            kept = self._keep_apart(tree, level)
        chosen = set(kept)
        for node in level:
            if node.id not in chosen:
                node.status = "pruned"
        return kept

    def _keep_apart(self, tree: Tree, level: Sequence[Node]) -> list[int]:
        assert self.width is not None
        share = math.ceil(self.width / self.subtrees)
        kept: dict[int, list[int]] = {}
        for node in level:
            first = tree.path(node)[1].id
            if first not in kept and len(kept) == self.subtrees:
                continue
            mine = kept.setdefault(first, [])
            if len(mine) < share and not (node.depth == 1 and mine):
                mine.append(node.id)
        return [i for ids in kept.values() for i in ids]

    def on_children(self, tree: Tree, node: Node, children: Sequence[Node]) -> None:
        """Collect the next level."""
        self._flying.discard(node.id)
        self._next.extend(c.id for c in children)

    def on_leaf(self, tree: Tree, node: Node) -> None:
        """Remember that there is a goal."""
        self._flying.discard(node.id)
        self._has_goal = self._has_goal or node.is_goal

    def on_fail(self, tree: Tree, node: Node) -> None:
        """Forget a node that led nowhere."""
        self._flying.discard(node.id)

    def finished(self, tree: Tree) -> str:
        """Return `goal` once the level that found one is done."""
        done = self._has_goal and self.stop_at_goal and not self._queue and not self._flying
        return "goal" if done else ""

    def dump(self) -> dict[str, Any]:
        """Return the level's rest, what is running, and the next level."""
        return {
            "queue": self._queue,
            "flying": sorted(self._flying),
            "next": self._next,
            "has_goal": self._has_goal,
        }

    def load(self, tree: Tree, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._queue, self._next = list(state["queue"]), list(state["next"])
        self._flying, self._has_goal = set(state["flying"]), state["has_goal"]
