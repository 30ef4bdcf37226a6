"""The tree: nodes in one list, found by id; never recursive.

Does not know why a node is made or chosen. Source: own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfgrpo.search.node import Node

__all__ = ["Tree"]


class Tree:
    """Nodes by id; the root has id 0.

    >>> tree = Tree()
    >>> leaf = tree.add(Node(-1, 0, 1, "go", "go"))
    >>> [n.id for n in tree.path(leaf)], tree.plan(leaf)
    ([0, 1], ['go'])
    """

    __slots__ = ("by_state", "merged_siblings", "merged_states", "nodes")

    def __init__(self, root: Node | None = None) -> None:
        root = root or Node(0, -1, 0, is_executed=True)
        self.nodes: list[Node] = [root]
        self.by_state: dict[str, int] = {}
        """State key to the node that stands for it, where states are merged."""
        self.merged_siblings = 0
        """Samples that repeated a sibling."""
        self.merged_states = 0
        """Nodes that reached a state already known."""

    @property
    def root(self) -> Node:
        """The first node."""
        return self.nodes[0]

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, node_id: int) -> Node:
        return self.nodes[node_id]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def add(self, node: Node) -> Node:
        """Give a node its id and hang it under its parent."""
        nodes = self.nodes
        node.id = len(nodes)
        nodes.append(node)
        self.children_of(nodes[node.parent]).append(node.id)
        return node

    def children_of(self, node: Node) -> list[int]:
        """Return the node's list of children, made where it was a leaf."""
        if isinstance(node.children, tuple):
            node.children = []
        return node.children

    def path(self, node: Node) -> list[Node]:
        """Return the nodes from the root to `node`, both included."""
        nodes, found = self.nodes, [node]
        while node.parent >= 0:
            node = nodes[node.parent]
            found.append(node)
        found.reverse()
        return found

    def plan(self, node: Node) -> list[Any]:
        """Return the actions from the root to `node`."""
        return [n.action for n in self.path(node)[1:]]

    def child_by_key(self, node: Node, key: str) -> Node | None:
        """Return the child with that action key, or None."""
        for child_id in node.children:
            if self.nodes[child_id].action_key == key:
                return self.nodes[child_id]
        return None

    def descendants(self, node: Node) -> Iterator[Node]:
        """Yield everything below `node`, parents before children."""
        stack = list(node.children)
        while stack:
            found = self.nodes[stack.pop()]
            yield found
            stack.extend(found.children)

    def leaves_below(self, node: Node) -> list[Node]:
        """Return the finished paths at or below `node`."""
        own = [node] if node.status == "terminal" else []
        return own + [n for n in self.descendants(node) if n.status == "terminal"]

    def with_status(self, *status: str) -> list[Node]:
        """Return the nodes of the given kinds in order of creation."""
        return [n for n in self.nodes if n.status in status]

    def reparent(self, node: Node, parent: Node, action: Any, key: str, step_cost: float) -> None:
        """Hang a node, with all below it, under a cheaper parent; `g` and `depth` follow.

        Sound only where costs add up step by step and the two places are the same state.
        """
        self.nodes[node.parent].children.remove(node.id)
        self.children_of(parent).append(node.id)
        node.parent, node.action, node.action_key = parent.id, action, key
        node.step_cost, node.g, node.depth = step_cost, parent.g + step_cost, parent.depth + 1
        for below in self.descendants(node):
            above = self.nodes[below.parent]
            below.g, below.depth = above.g + below.step_cost, above.depth + 1
