"""Whole attempts without a tree: best-of-N and (adaptive) self-consistency.

The two cheap baselines that every tree search has to beat at equal cost. Each chain draws one next
action at a time; chains may say the same thing and are still counted apart.

Does not know how answers are judged beyond their final action and reward. Source: self-consistency
(Wang et al. 2023); stopping early: adaptive consistency (Aggarwal et al. 2023), with the Beta rule
for the two leading answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tfgrpo.errors import ConfigError
from tfgrpo.search.algorithms.protocol import GoalSearch, VisitRequest, best_so_far
from tfgrpo.search.node import Node
from tfgrpo.search.tree import Tree

__all__ = ["BestOfN", "majority_probability"]


def majority_probability(first: int, second: int) -> float:
    """Return the probability that the first answer is the likelier of two, given their counts.

    P(p > 1/2) for p ~ Beta(first + 1, second + 1), in closed form as a binomial tail.

    >>> round(majority_probability(3, 0), 4)
    0.9375
    """
    n = first + second + 1
    return float(sum(math.comb(n, k) for k in range(first + 1)) / 2**n)


class BestOfN(GoalSearch):
    """N independent paths from the root.

    Args:
        n: how many.
        pick: `best` by reward, value and cost; `vote` by the most frequent final action.
        confidence: with `vote`, stop once the leading answer is the likelier with this probability;
            None draws all n.
        min_votes: answers before an early stop.
        stop_at_goal: with `best`, stop at the first verified goal.
    """

    merges_siblings = False

    def __init__(
        self,
        n: int = 8,
        *,
        pick: Literal["best", "vote"] = "best",
        confidence: float | None = None,
        min_votes: int = 2,
        stop_at_goal: bool = False,
    ) -> None:
        if n < 1:
            raise ConfigError(f"n={n!r}: give at least 1 chain")
        self.n, self.pick, self.confidence = n, pick, confidence
        self.min_votes, self.stop_at_goal = min_votes, stop_at_goal
        self.lookahead = n if confidence is None else 1
        self._started = 0
        self._heads: list[int] = []
        self._running = 0
        self._votes: Counter[str] = Counter()

    @classmethod
    def best_of(cls, n: int = 8, **options: Any) -> BestOfN:
        """Best-of-N."""
        return cls(n, **options)

    @classmethod
    def self_consistency(cls, n: int = 8, *, confidence: float | None = None) -> BestOfN:
        """The majority answer of n chains, or of as many as it takes."""
        return cls(n, pick="vote", confidence=confidence)

    def select(self, tree: Tree, room: int) -> list[VisitRequest]:
        """Continue running chains first, then start new ones."""
        found: list[VisitRequest] = []
        while len(found) < room:
            if self._heads:
                found.append(VisitRequest(self._heads.pop(0), 1))
            elif self._started < self.n and self._may_start():
                self._started += 1
                found.append(VisitRequest(0, 1))
            else:
                break
            self._running += 1
        return found

    def _may_start(self) -> bool:
        """With early stopping only one more chain runs than has voted, so that none is wasted."""
        return self.confidence is None or not self._running

    def on_children(self, tree: Tree, node: Node, children: Sequence[Node]) -> None:
        """The chain goes on at its new node; without one it has ended."""
        self._running -= 1
        self._heads.extend(c.id for c in children[:1])

    def on_leaf(self, tree: Tree, node: Node) -> None:
        """A chain's answer is the key of its last action."""
        self._running -= 1
        self._votes[node.action_key] += 1
        self._has_goal = self._has_goal or node.is_goal

    def on_fail(self, tree: Tree, node: Node) -> None:
        """A failed chain has no vote."""
        self._running -= 1

    def finished(self, tree: Tree) -> str:
        """Return `converged` when the vote is decided, `goal` where a goal is enough."""
        if self.pick == "best":
            return "goal" if self.stop_at_goal and self._has_goal else ""
        if self.confidence is None or self._votes.total() < self.min_votes:
            return ""
        top = self._votes.most_common(2)
        second = top[1][1] if len(top) > 1 else 0
        sure = majority_probability(top[0][1], second) >= self.confidence
        return "converged" if sure else ""

    def best(self, tree: Tree) -> int:
        """Return the best chain, or the first that gave the majority answer."""
        if self.pick == "best" or not self._votes:
            return best_so_far(tree)
        top = max(self._votes.values())
        for node in tree.with_status("terminal"):
            if self._votes[node.action_key] == top:
                return node.id
        return best_so_far(tree)

    def dump(self) -> dict[str, Any]:
        """Return the heads and votes."""
        return {
            "started": self._started,
            "heads": self._heads,
            "running": self._running,
            "votes": dict(self._votes),
            "has_goal": self._has_goal,
        }

    def load(self, tree: Tree, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._started, self._running = state["started"], state["running"]
        self._heads, self._votes = list(state["heads"]), Counter(state["votes"])
        self._has_goal = state["has_goal"]
