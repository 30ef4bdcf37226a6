"""The tree: nodes in one list, found by id; never recursive.

Most nodes of a search stay leaves that nobody looks at again. Where the algorithm can work on
numbers alone, new children are therefore kept as one `LazyChildren` per visit and become `Node`s
when they are asked for: less memory, and fewer objects for the collector to walk over.

Does not know why a node is made or chosen. Source: own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from tfgrpo.search.node import NO_PARTS, Node, NodeScore, Proposal, make_node

__all__ = ["LazyChildren", "Children", "Row", "Tree"]

Row = tuple[float, float, int, float, float | None, float]
"""(f, −g, id, h, value, step cost) of a child. The tuple serves the algorithm's open list as it is:
a second one for each child would cost as much as all else about it."""


class LazyChildren:
    """The children of one visit in the order of their ids, as the proposals and numbers they are.

    Args:
        parent: their parent.
        first: id of the first child.
        seq: number of the visit.
        proposals: one a child.
        rows: their numbers; plain tuples, which the collector stops looking at after one round.
        scores: one a child, kept only where they hold parts or notes.
    """

    __slots__ = ("first", "parent", "proposals", "rows", "scores", "seq")

    def __init__(
        self,
        parent: Node,
        first: int,
        seq: int,
        proposals: Sequence[Proposal],
        rows: Sequence[Row],
        scores: Sequence[NodeScore] | None,
    ) -> None:
        self.parent, self.first, self.seq = parent, first, seq
        self.proposals, self.rows, self.scores = proposals, rows, scores

    def make(self, node_id: int) -> Node:
        """Return one child as a node of its own."""
        at = node_id - self.first
        proposal, prior = self.proposals[at], self.proposals[at].prior
        if prior is None:
            prior = proposal.count / sum([p.count for p in self.proposals])
        _, minus_g, _, h, value, cost = self.rows[at]
        score: Any = (cost, h, value, NO_PARTS, None) if self.scores is None else self.scores[at]
        return make_node(node_id, self.parent, proposal, prior, -minus_g, score, self.seq)


class Children(Sequence[Node]):
    """A brood as the sequence of its nodes; reading one makes it."""

    __slots__ = ("_tree", "brood")

    def __init__(self, tree: Tree, brood: LazyChildren) -> None:
        self._tree, self.brood = tree, brood

    def __len__(self) -> int:
        return len(self.brood.proposals)

    @overload
    def __getitem__(self, at: int) -> Node: ...
    @overload
    def __getitem__(self, at: slice) -> list[Node]: ...
    def __getitem__(self, at: int | slice) -> Node | list[Node]:
        ids = range(self.brood.first, self.brood.first + len(self))[at]
        return self._tree[ids] if isinstance(ids, int) else [self._tree[i] for i in ids]


class Tree:
    """Nodes by id; the root has id 0.

    >>> tree = Tree()
    >>> leaf = tree.add(Node(-1, 0, 1, "go", "go"))
    >>> [n.id for n in tree.path(leaf)], tree.plan(leaf)
    ([0, 1], ['go'])
    """

    __slots__ = ("by_state", "merged_siblings", "merged_states", "places", "root")

    def __init__(self, root: Node | None = None) -> None:
        self.root = root or Node(0, -1, 0, is_executed=True)
        self.places: list[Node | LazyChildren] = [self.root]
        """By id: a node, or the brood that holds its numbers until somebody asks for the node."""
        self.by_state: dict[str, int] = {}
        """State key to the node that stands for it, where states are merged."""
        self.merged_siblings = 0
        """Samples that repeated a sibling."""
        self.merged_states = 0
        """Nodes that reached a state already known."""

    def first(self, count: int) -> Iterator[Node]:
        """Yield the first nodes in order of creation."""
        return (self[i] for i in range(min(count, len(self.places))))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, node_id: int) -> Node:
        found = self.places[node_id]
        if isinstance(found, LazyChildren):
            if node_id < 0:
                node_id += len(self.places)
            found = self.places[node_id] = found.make(node_id)
        return found

    def __iter__(self) -> Iterator[Node]:
        return self.first(len(self.places))

    def open_numbers(self) -> Iterator[tuple[int, float, float, float | None]]:
        """Yield (id, g, h, value) of the open nodes without making any."""
        for node_id, found in enumerate(self.places):
            if isinstance(found, LazyChildren):
                _, minus_g, _, h, value, _ = found.rows[node_id - found.first]
                yield node_id, -minus_g, h, value
            elif found.status == "open":
                yield node_id, found.g, found.h, found.value

    def touched(self) -> Iterator[Node]:
        """Yield, in order of creation, the nodes that anybody has looked at.

        All others are open, have not run, and stand as they were born.
        """
        return (n for n in self.places if isinstance(n, Node))

    def peek(self, node_id: int) -> Node | None:
        """Return a node if anybody has looked at it, else None: it stands as it was born."""
        found = self.places[node_id]
        return found if isinstance(found, Node) else None

    def add(self, node: Node) -> Node:
        """Give a node its id and hang it under its parent."""
        node.id = len(self.places)
        self.places.append(node)
        self.children_of(self[node.parent]).append(node.id)
        return node

    def add_brood(self, parent: Node, brood: LazyChildren) -> Children:
        """Hang the children of a visit under a parent that had none."""
        count = len(brood.proposals)
        self.places += [brood] * count
        parent.children = range(brood.first, brood.first + count)
        return Children(self, brood)

    def children_of(self, node: Node) -> list[int]:
        """Return the node's children as a list that can grow."""
        if not isinstance(node.children, list):
            node.children = list(node.children)
        return node.children

    def path(self, node: Node) -> list[Node]:
        """Return the nodes from the root to `node`, both included."""
        found = [node]
        while node.parent >= 0:
            node = self[node.parent]
            found.append(node)
        found.reverse()
        return found

    def plan(self, node: Node) -> list[Any]:
        """Return the actions from the root to `node`."""
        return [n.action for n in self.path(node)[1:]]

    def child_by_key(self, node: Node, key: str) -> Node | None:
        """Return the child with that action key, or None."""
        for child_id in node.children:
            if self[child_id].action_key == key:
                return self[child_id]
        return None

    def descendants(self, node: Node) -> Iterator[Node]:
        """Yield everything below `node`, parents before children."""
        stack = list(node.children)
        while stack:
            found = self[stack.pop()]
            yield found
            stack.extend(found.children)

    def leaves_below(self, node: Node) -> list[Node]:
        """Return the finished paths at or below `node`."""
        own = [node] if node.status == "terminal" else []
        return own + [n for n in self.descendants(node) if n.status == "terminal"]

    def with_status(self, *status: str) -> list[Node]:
        """Return the nodes of the given kinds in order of creation."""
        pool = self if "open" in status else self.touched()
        return [n for n in pool if n.status in status]

    def reparent(self, node: Node, parent: Node, action: Any, key: str, step_cost: float) -> None:
        """Hang a node, with all below it, under a cheaper parent; `g` and `depth` follow.

        Sound only where costs add up step by step and the two places are the same state.
        """
        self.children_of(self[node.parent]).remove(node.id)
        self.children_of(parent).append(node.id)
        node.parent, node.action, node.action_key = parent.id, action, key
        node.step_cost, node.g, node.depth = step_cost, parent.g + step_cost, parent.depth + 1
        for below in self.descendants(node):
            above = self[below.parent]
            below.g, below.depth = above.g + below.step_cost, above.depth + 1
